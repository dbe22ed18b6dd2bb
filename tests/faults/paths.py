"""Ways out of a model's directory: every one ends in an error, or in nothing, and no file outside
is opened.

Files are watched in two ways. Python tells of each it opens; what the libraries written in other
languages read shows in the time of the last access of the files planted outside.
"""

import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig

from faults.outcome import Outcome
from faults.patience import TooLong, patience
from faults.words import word_tokenizer
from lema.config.lemaconfig import CONFIG_NAME
from lema.convert.tensors import copy_companions
from lema.data import prepare_data
from lema.errors import LemaError
from lema.lora.base import BASE_NAME, check_base
from lema.lora.files import CONFIG, WEIGHTS, read_safetensors, read_settings
from lema.model import meta_model, read_config
from lema.model.weight_names import match_names
from lema.storage import GlobalBinaryIndex
from lema.storage.index import INDEX_NAME, SINGLE_NAME
from lema.storage.modelfiles import load_generation_config, load_tokenizer

__all__ = ["FORMS", "run"]

SECONDS = 5.0
Act = Callable[[Path], object]
Plant = Callable[[Path, Path], object]
CHAT = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]


def alone(model: Path) -> None:
    """Take the adapter away that lies beside the model, which would be refused before all else."""
    for name in (CONFIG, WEIGHTS):
        (model / name).unlink(missing_ok=True)


def open_model(model: Path) -> None:
    """Open a model as training does, up to where its weights would be read."""
    alone(model)
    skeleton = meta_model(read_config(model), torch.float32)
    match_names(skeleton, GlobalBinaryIndex(model))


def open_trusted(model: Path) -> None:
    """The same, with the code that comes with the model."""
    alone(model)
    meta_model(read_config(model, trust_remote_code=True), torch.float32, trust_remote_code=True)


def tokenize(model: Path) -> None:
    """Load the tokenizer and put a chat through its template."""
    tokenizer = load_tokenizer(model, trusted=False, how="-")
    prepare_data(CHAT, tokenizer, max_length=64)


def open_adapter(model: Path) -> None:
    """Read an adapter that lies in the model's directory."""
    read_settings(model)
    read_safetensors(model / WEIGHTS)
    check_base(model, GlobalBinaryIndex(model / SINGLE_NAME))


def copy_small(model: Path) -> None:
    """Copy what lies beside the weights, as converting a model does."""
    (model.parent / "copy").mkdir()
    copy_companions(model, model.parent / "copy")


def maps_to(target: str) -> Plant:
    """Let the index say that a tensor is in `target`; OUT is the directory outside."""

    def plant(model: Path, outside: Path) -> None:
        names = list(GlobalBinaryIndex(model))
        where = target.replace("OUT", str(outside))
        (model / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(names, where)}))
        (model / SINGLE_NAME).unlink()

    return plant


def shard(make: Callable[[Path, Path], object]) -> Plant:
    """Let the index name a file beside it that is made in a way of its own."""

    def plant(model: Path, outside: Path) -> None:
        maps_to("x.safetensors")(model, outside)
        make(model / "x.safetensors", outside)

    return plant


def linked(name: str, to: str = "") -> Plant:
    """Put a link to the file of that name, or another, outside in the place of a file."""

    def plant(model: Path, outside: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(to or outside / name)

    return plant


def piped(name: str) -> Plant:
    """Put a pipe nobody writes to in the place of a file."""

    def plant(model: Path, outside: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return plant


def says(name: str, **settings: Any) -> Plant:
    """Let a JSON file say something more; OUT is the directory outside."""

    def plant(model: Path, outside: Path) -> None:
        found = json.loads((model / name).read_text()) | settings
        (model / name).write_text(json.dumps(found).replace("OUT", str(outside)))

    return plant


def template(text: str) -> Plant:
    """Give the model a chat template; OUT is the directory outside."""

    def plant(model: Path, outside: Path) -> None:
        (model / "chat_template.jinja").write_text(text.replace("OUT", str(outside)))

    return plant


def cached(link: str) -> Plant:
    """Lay the model out as the hub's cache does, with its weights a link to `link`, relative to
    the snapshot.
    """

    def plant(model: Path, outside: Path) -> None:
        weights = model / SINGLE_NAME
        shutil.copy(weights, outside / SINGLE_NAME)
        weights.unlink()
        weights.symlink_to(link.replace("OUT", os.path.relpath(outside, model)))

    return plant


def templates_folder(whole: bool) -> Plant:
    """Put further chat templates outside: the whole folder, or one file of it, is a link."""

    def plant(model: Path, outside: Path) -> None:
        folder = model / "additional_chat_templates"
        if whole:
            folder.symlink_to(outside)
        else:
            folder.mkdir()
            (folder / "other.jinja").symlink_to(outside / "chat_template.jinja")

    return plant


def chain(file: Path, outside: Path) -> None:
    (file.parent / "one").symlink_to("two")
    (file.parent / "two").symlink_to(outside / SINGLE_NAME)
    file.symlink_to("one")


def loop(file: Path, outside: Path) -> None:
    (file.parent / "one").symlink_to(file)
    file.symlink_to("one")


def through_folder(model: Path, outside: Path) -> None:
    maps_to("sub/model.safetensors")(model, outside)
    (model / "sub").symlink_to(outside)


def config_of_version(model: Path, outside: Path) -> None:
    says("config.json", configuration_files=["config.1.0.0.json"])(model, outside)
    (model / "config.1.0.0.json").symlink_to(outside / "config.json")


def code_link(model: Path, outside: Path) -> None:
    says("config.json", model_type="own", auto_map={"AutoConfig": "evil.Evil"})(model, outside)
    linked("evil.py")(model, outside)


OWN = {"model_type": "own"}
FORMS: Mapping[str, tuple[Plant, Act]] = {
    "index: up": (maps_to("../outside/model.safetensors"), open_model),
    "index: absolute": (maps_to("OUT/model.safetensors"), open_model),
    "index: down and up": (maps_to("a/../../outside/model.safetensors"), open_model),
    "index: dot and up": (maps_to("./../outside/model.safetensors"), open_model),
    "index: backslashes": (maps_to("..\\outside\\model.safetensors"), open_model),
    "index: NUL": (maps_to("../outside/model.safetensors\0.safetensors"), open_model),
    "index: percent": (maps_to("%2e%2e%2foutside%2fmodel.safetensors"), open_model),
    "index: address": (maps_to("file://OUT/model.safetensors"), open_model),
    "index: home": (maps_to("~/model.safetensors"), open_model),
    "index: wide letters": (maps_to("\uff0e\uff0e\uff0foutside\uff0fmodel.safetensors"), open_model),
    "index: no name": (maps_to(""), open_model),
    "index: folder that is a link": (through_folder, open_model),
    "index: a device": (maps_to("/dev/zero"), open_model),
    "index: itself a link": (linked(INDEX_NAME), open_model),
    "shard: link": (shard(lambda file, out: file.symlink_to(out / SINGLE_NAME)), open_model),
    "shard: link of links": (shard(chain), open_model),
    "shard: link to itself": (shard(loop), open_model),
    "shard: link to nothing": (shard(lambda file, out: file.symlink_to(out / "nothing")), open_model),
    "shard: link to a device": (shard(lambda file, out: file.symlink_to("/dev/zero")), open_model),
    "shard: link to a neighbour of the same beginning": (
        shard(lambda file, out: file.symlink_to(out.with_name("model-more") / SINGLE_NAME)),
        open_model,
    ),
    "shard: directory": (shard(lambda file, out: file.mkdir()), open_model),
    "shard: pipe": (shard(lambda file, out: os.mkfifo(file)), open_model),
    "weights: link": (linked(SINGLE_NAME), open_model),
    "weights: pipe": (piped(SINGLE_NAME), open_model),
    "weights: device": (linked(SINGLE_NAME, "/dev/zero"), open_model),
    "cache: another repository's blob": (cached("../../../models--org--other/blobs/f00d"), open_model),
    "cache: up out of the blobs": (cached("../../blobs/../../../outside/model.safetensors"), open_model),
    "cache: far out": (cached("OUT/model.safetensors"), open_model),
    "config: link": (linked("config.json"), open_model),
    "config: pipe": (piped("config.json"), open_model),
    "config: device": (linked("config.json", "/dev/zero"), open_model),
    "config: of another version": (config_of_version, open_model),
    "config: of another version, up": (
        says("config.json", configuration_files=["config.1.0.0/../../../outside/config.json"]),
        open_model,
    ),
    "code: not trusted": (says("config.json", **OWN, auto_map={"AutoConfig": "evil.Evil"}), open_model),
    "code: up": (says("config.json", **OWN, auto_map={"AutoConfig": "../outside/evil.Evil"}), open_trusted),
    "code: absolute": (says("config.json", **OWN, auto_map={"AutoConfig": "OUT/evil.Evil"}), open_trusted),
    "code: of another directory": (
        says("config.json", **OWN, auto_map={"AutoConfig": "OUT--evil.Evil"}),
        open_trusted,
    ),
    "code: link": (code_link, open_trusted),
    "tokenizer: link": (linked("tokenizer.json"), tokenize),
    "tokenizer: pipe": (piped("tokenizer.json"), tokenize),
    "tokenizer: config is a link": (linked("tokenizer_config.json"), tokenize),
    "tokenizer: special tokens are a link": (linked("special_tokens_map.json"), tokenize),
    "tokenizer: names a file": (says("tokenizer_config.json", tokenizer_file="OUT/tokenizer.json"), tokenize),
    "tokenizer: names files": (
        says("tokenizer_config.json", vocab_file="OUT/tokenizer.json", merges_file="OUT/tokenizer.json"),
        tokenize,
    ),
    "tokenizer: names code": (
        says("tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Evil", None]}),
        tokenize,
    ),
    "template: link": (linked("chat_template.jinja"), tokenize),
    "template: folder is a link": (templates_folder(whole=True), tokenize),
    "template: one of several is a link": (templates_folder(whole=False), tokenize),
    "template: include": (template("{% include 'OUT/chat_template.jinja' %}"), tokenize),
    "template: import": (template("{% import '../outside/chat_template.jinja' as x %}{{ x }}"), tokenize),
    "template: extends": (template("{% extends 'OUT/chat_template.jinja' %}"), tokenize),
    "template: open": (
        template("{{ cycler.__init__.__globals__['open']('OUT/evil.py').read() }}"),
        tokenize,
    ),
    "generation: link": (linked("generation_config.json"), load_generation_config),
    "generation: pipe": (piped("generation_config.json"), load_generation_config),
    "adapter: weights are a link": (linked(WEIGHTS), open_adapter),
    "adapter: weights are a pipe": (piped(WEIGHTS), open_adapter),
    "adapter: config is a link": (linked(CONFIG), open_adapter),
    "adapter: config is a pipe": (piped(CONFIG), open_adapter),
    "adapter: settings are a link": (linked(CONFIG_NAME), open_adapter),
    "adapter: its base is a link": (linked(BASE_NAME), open_adapter),
    "copy: link": (linked("special_tokens_map.json"), copy_small),
}  # fmt: skip

_opened: list[str] | None = None  # while a form is watched


def _watch(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event == "open" and isinstance(arguments[0], str | bytes):
        _opened.append(os.fsdecode(arguments[0]))


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Try the first `count` ways out; there are `len(FORMS)`, and more than that are no more.

    Args:
        count: of forms.
        seed: nothing is drawn.
        report: is told of each failure.
    """
    if not _hooked:
        sys.addaudithook(_watch)
        _hooked.append(True)
    started = time.perf_counter()
    failures = []
    chosen = list(FORMS.items())[:count]
    with tempfile.TemporaryDirectory() as name:
        base = _base(Path(name).resolve() / "base")
        for number, (form, (plant, act)) in enumerate(chosen):
            place = Path(name).resolve() / str(number)
            ending = _ending(base, place, plant, act, form.startswith("cache"))
            if ending is not None:
                failures.append(f"{form}: {ending}")
                if report is not None:
                    report(failures[-1])
    return Outcome(
        "path traversal forms",
        "no file outside the model's directory is opened",
        len(chosen),
        len(chosen) - len(failures),
        tuple(failures),
        time.perf_counter() - started,
    )


_hooked: list[bool] = []


def _ending(base: Path, place: Path, plant: Plant, act: Act, cache: bool) -> str | None:
    """What is wrong with how it ended; None: nothing."""
    global _opened
    outside = place / "outside"
    model = place / ("models--org--tiny/snapshots/abc" if cache else "model")
    for one in (outside, model, place / "model-more", place / "models--org--other" / "blobs"):
        shutil.copytree(base, one)
    (place / "models--org--other" / "blobs" / "f00d").write_bytes((base / SINGLE_NAME).read_bytes())
    plant(model, outside)
    strangers = [
        file for file in place.rglob("*") if file.is_file() and not file.is_relative_to(model)
    ]
    for file in strangers:
        os.utime(file, (1, file.stat().st_mtime))
    with _quiet():
        _opened = []
        try:
            with patience(SECONDS):
                act(model)
        except LemaError:
            pass
        except TooLong:
            return f"took more than {SECONDS} s"
        except Exception as error:  # noqa: BLE001
            return f"{type(error).__name__}: {error}"
        finally:
            seen = _opened
            _opened = None
    read = [str(file) for file in strangers if file.stat().st_atime > 1]
    read += [file for file in seen if _leaves(Path(file), place, model)]
    return f"opened {read[0]}" if read else None


def _leaves(file: Path, place: Path, model: Path) -> bool:
    real = file.resolve()
    if str(real) in ("/dev/zero", "/etc/passwd"):
        return True
    return (
        real.is_relative_to(place)
        and not real.is_relative_to(model)
        and not real.is_relative_to(place / "copy")
    )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _base(directory: Path) -> Path:
    """Write a tiny model with everything that may lie beside one, and an adapter."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    word_tokenizer().save_pretrained(directory)
    get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    ).save_pretrained(directory)
    for name in ("special_tokens_map.json", "generation_config.json"):
        (directory / name).write_text("{}")
    (directory / "evil.py").write_text("from transformers import LlamaConfig as Evil\n")
    (directory / CONFIG_NAME).write_text(json.dumps({"model_name_or_path": str(directory)}))
    (directory / BASE_NAME).write_text(json.dumps({"fingerprint": "1-0"}))
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": {}}))
    return directory
