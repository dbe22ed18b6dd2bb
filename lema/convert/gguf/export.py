"""Writes a model, or an adapter alone, as GGUF, with a `Modelfile` beside it.

An adapter is merged into its base first, layer by layer (`lema.convert.merge`), into a directory
that goes when it has been converted. What is written appears when it is complete.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lema.config.acting import ACTING
from lema.config.lemaconfig import CONFIG_NAME
from lema.convert.adapted import open_adapter
from lema.convert.delta import apply_delta, is_delta
from lema.convert.gguf.llamacpp import (
    CONVERTER,
    LORA_CONVERTER,
    QUANTIZER,
    locate,
    run_program,
)
from lema.convert.gguf.loraform import check_taken, write_lora
from lema.convert.gguf.modelfile import modelfile_for
from lema.convert.gguf.towers import check_no_towers, towers_note
from lema.convert.merge import merge_adapter
from lema.errors import ConfigError, ModelError, WeightsError
from lema.lora.attach import param_filter
from lema.lora.files import CONFIG, read_settings
from lema.lora.merge import wrapped
from lema.model.files import ModelFiles
from lema.model.skeleton import find_towers
from lema.storage.atomic import appearing, free_directory
from lema.storage.modelfiles import check_code, load_generation_config, load_tokenizer
from lema.storage.regular import check_separate

__all__ = ["ADAPTER_FILE", "MODELFILE", "MODEL_FILE", "QUANTIZATIONS", "GgufExport", "export_gguf"]

MODEL_FILE = "model.gguf"
ADAPTER_FILE = "adapter.gguf"
MODELFILE = "Modelfile"
BASE_FILE = "./base.gguf"  # what a Modelfile of an adapter names, to be put there by the user
CONVERTED = ("auto", "f32", "f16", "bf16", "q8_0")
"""Types that the converters write. `auto`: the 16-bit type that is nearest to the weights', and of
an adapter f32."""
QUANTIZED = (
    *("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_0", "q4_1", "q4_k_s", "q4_k_m"),
    *("q5_0", "q5_1", "q5_k_s", "q5_k_m", "q6_k", "iq4_nl", "iq4_xs"),
)
"""Types that `llama-quantize` makes of the first ones."""
QUANTIZATIONS = CONVERTED + QUANTIZED
MODEL_CONFIG = "config.json"
CODE_REFERENCES = "auto_map"  # the key by which the files of a model name code
TOKENIZER_CONFIG = "tokenizer_config.json"
HOW_TOKENIZER = "put the tokenizer's files beside the weights"


@dataclass(frozen=True)
class GgufExport:
    """What was written.

    Attributes:
        directory: with the GGUF file and the `Modelfile`.
        file: the GGUF file.
        lines: of a shell, each of which serves it.
        notes: what a user should know of the `Modelfile`.
    """

    directory: Path
    file: Path
    lines: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Tools:
    """llama.cpp's programs and how to run them."""

    converter: Path
    quantizer: Path | None  # None: none is needed
    quantize: str
    show: Callable[[str], object]

    def convert(self, model: Path, file: Path, arguments: list[str | Path]) -> None:
        """Convert what is in a directory to one file."""
        if self.quantizer is None:
            options: list[str | Path] = ["--outtype", self.quantize, "--outfile", file]
            run_program(self.converter, [*options, *arguments, model], self.show)
            return
        wide = file.with_name(f"wide-{file.name}")
        run_program(
            self.converter, ["--outtype", "auto", "--outfile", wide, *arguments, model], self.show
        )
        run_program(self.quantizer, [wide, file, self.quantize.upper()], self.show)
        wide.unlink()


def export_gguf(
    source_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    *,
    quantize: str = "auto",
    adapter_alone: bool = False,
    llama_cpp: str | os.PathLike[str] | None = None,
    base_dir: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    note: Callable[[str], object] = lambda _: None,
    show: Callable[[str], object] = lambda _: None,
) -> GgufExport:
    """Write a model, or an adapter alone, as GGUF, by llama.cpp's converters.

    Args:
        source_dir: a saved adapter, a delta, or a model in the hub's format.
        out_dir: a new or empty directory.
        quantize: one of `QUANTIZATIONS`.
        adapter_alone: write the adapter for llama.cpp's `--lora`, and not the model.
        llama_cpp: the directory of llama.cpp; None: the environment variable `LLAMA_CPP`, or the
            PATH.
        base_dir: where the base is by now; None: where the adapter says.
        trust_remote_code: whether code beside the base may run.
        note: takes a sentence on what was found.
        show: takes each line that a converter prints, with its end.

    Returns:
        What was written.

    Raises:
        ConfigError: `out_dir` is not empty, there is no such `quantize`, llama.cpp is not there, or
            an adapter has what llama.cpp does not take.
        ModelError: a converter failed; its last lines are in the error.
        AdapterError: there is no adapter, or it does not fit the model.
        WeightsError: the base model is damaged, or there is none.
        DiskError: a file could not be written. Nothing is left behind by any of these.
    """
    quantize = quantize.lower()
    _check_quantization(quantize, adapter_alone=adapter_alone)
    out = free_directory(out_dir, 1)
    source = Path(source_dir)
    check_separate(out, [source])
    directory = None if llama_cpp is None else Path(llama_cpp)
    tools = _Tools(
        locate(LORA_CONVERTER if adapter_alone else CONVERTER, directory),
        locate(QUANTIZER, directory) if quantize in QUANTIZED else None,
        "f32" if adapter_alone and quantize == "auto" else quantize,
        show,
    )
    options: dict[str, Any] = {
        "base_dir": base_dir,
        "trust_remote_code": trust_remote_code,
        "note": note,
    }
    if adapter_alone:
        return _write_adapter(source, out, tools, **options)
    return _write_model(source, out, tools, **options)


def _check_quantization(quantize: str, *, adapter_alone: bool) -> None:
    if quantize not in QUANTIZATIONS:
        what = f"there is no quantization {quantize!r}"
        raise ConfigError(what, where="--quantize", how=f"choose {', '.join(QUANTIZATIONS)}")
    if adapter_alone and quantize not in CONVERTED:
        what = f"llama.cpp has no adapters in {quantize}"
        raise ConfigError(what, where="--quantize", how=f"choose {', '.join(CONVERTED)}")


def _write_model(
    source: Path,
    out: Path,
    tools: _Tools,
    *,
    base_dir: str | os.PathLike[str] | None,
    trust_remote_code: bool,
    note: Callable[[str], object],
) -> GgufExport:
    system, date = _of_run(source)
    if not is_delta(source) and not _is_model(source):
        opened = open_adapter(
            source, base_dir, trust_remote_code=trust_remote_code, note=lambda _: None
        )
        skeleton = opened.base.skeleton
        check_no_towers(find_towers(skeleton), param_filter(skeleton, opened.lora))
    with appearing(out) as partial:
        model = partial / "merged"
        if is_delta(source):
            apply_delta(source, model, base_dir, trust_remote_code=trust_remote_code)
        elif _is_model(source):
            _check_code(source, trusted=trust_remote_code)
            model = source
        else:
            merge_adapter(
                source, model, base_dir=base_dir, trust_remote_code=trust_remote_code, note=note
            )
        if model is not source and not trust_remote_code:
            _drop_code_references(model)
        tokenizer = load_tokenizer(model, trusted=trust_remote_code, how=HOW_TOKENIZER)
        modelfile = modelfile_for(
            tokenizer, f"./{MODEL_FILE}", end_tokens=_end_tokens(model), system=system, date=date
        )
        (partial / MODELFILE).write_text(modelfile.text(), encoding="utf-8", newline="\n")
        of_towers = towers_note(model, trust_remote_code=trust_remote_code)
        tools.convert(model, partial / MODEL_FILE, [])
        if model is not source:
            shutil.rmtree(model)
    file = out / MODEL_FILE
    lines = (f"llama-server -m {_word(file)}", _ollama_line(out))
    return GgufExport(out, file, lines, (*of_towers, *modelfile.notes))


def _write_adapter(
    source: Path,
    out: Path,
    tools: _Tools,
    *,
    base_dir: str | os.PathLike[str] | None,
    trust_remote_code: bool,
    note: Callable[[str], object],
) -> GgufExport:
    opened = open_adapter(source, base_dir, trust_remote_code=trust_remote_code, note=note)
    base = opened.base.directory
    check_separate(out, [base])
    towers = find_towers(opened.base.skeleton)
    opened.attach()
    adapted = [name for name, _ in wrapped(opened.base.skeleton)]
    check_taken(opened.lora, adapted)
    check_no_towers(towers, adapted)
    _check_code(base, trusted=trust_remote_code)
    files = ModelFiles(
        opened.settings, trust_remote_code=trust_remote_code, directory=base, adapter=source
    )
    with appearing(out) as partial:
        lora = partial / "lora"
        write_lora(
            source,
            lora,
            base_dir=base_dir,
            trust_remote_code=trust_remote_code,
            note=lambda _: None,
        )
        tools.convert(lora, partial / ADAPTER_FILE, ["--base", base])
        shutil.rmtree(lora)
        modelfile = modelfile_for(
            files.tokenizer,
            BASE_FILE,
            adapter=f"./{ADAPTER_FILE}",
            end_tokens=_end_tokens(source) or _end_tokens(base),
            system=opened.settings.system_prompt,
            date=opened.settings.template_date,
        )
        missing = f"FROM names the base as GGUF, which is to be put there: that of {base.name}."
        modelfile = replace(modelfile, notes=(missing, *modelfile.notes))
        (partial / MODELFILE).write_text(modelfile.text(), encoding="utf-8", newline="\n")
    file = out / ADAPTER_FILE
    lines = (
        f"llama-server -m {_word(out / BASE_FILE)} --lora {_word(file)}",
        _ollama_line(out),
    )
    return GgufExport(out, file, lines, modelfile.notes)


def _ollama_line(out: Path) -> str:
    return f"ollama create {_word(out.name)} -f {_word(out / MODELFILE)}"


def _word(text: str | Path) -> str:
    """Return a word of a shell, also where a path has blanks."""
    return shlex.quote(str(text))


def _is_model(directory: Path) -> bool:
    return (directory / MODEL_CONFIG).is_file() and not (directory / CONFIG).is_file()


def _of_run(source: Path) -> tuple[str | None, str | None]:
    """Return the system message and the date of the run that wrote a directory; None: it has
    none, or no run wrote it.
    """
    if not (source / CONFIG_NAME).is_file():
        return None, None
    settings, _ = read_settings(source, unread=ACTING.keys())
    return settings.system_prompt, settings.template_date


def _end_tokens(directory: Path) -> list[int]:
    """Return the numbers of the tokens at which texts end, as `generation_config.json` says."""
    settings = load_generation_config(directory)
    end_tokens = None if settings is None else settings.eos_token_id
    return (
        end_tokens if isinstance(end_tokens, list) else [] if end_tokens is None else [end_tokens]
    )


def _check_code(directory: Path, *, trusted: bool) -> None:
    """Refuse a model with code of its own that is not trusted: the converters run that of a
    tokenizer without asking.
    """
    check_code(directory, trusted=trusted)
    if trusted:
        return
    for name in (MODEL_CONFIG, TOKENIZER_CONFIG):
        if CODE_REFERENCES in _json(directory / name):
            what = "llama.cpp's converter may run the code that this model names"
            how = "read that code; if you trust it, add --trust-remote-code"
            raise ModelError(what, where=f"{directory / name}: {CODE_REFERENCES}", how=how)


def _drop_code_references(directory: Path) -> None:
    """Let a merged model name no code, so that the converters run none."""
    for name in (MODEL_CONFIG, TOKENIZER_CONFIG):
        values = _json(directory / name)
        if values.pop(CODE_REFERENCES, None) is not None:
            text = json.dumps(values, indent=2) + "\n"
            (directory / name).write_text(text, encoding="utf-8", newline="\n")


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        what = f"the file cannot be read: {error}"
        raise WeightsError(what, where=str(file), how="correct the file") from error
    return values if isinstance(values, dict) else {}
