"""What llama.cpp computes from an exported model or adapter is what transformers and PEFT compute."""

import json
import shutil
from contextlib import closing
from itertools import islice
from pathlib import Path

import gguf
import pytest
import torch
from clirun import lema
from ggufruns import (
    CONFIGS,
    IDS,
    loaded,
    named_text,
    of_llamacpp,
    of_transformers,
    opened,
    tokenizer_of,
    write_adapter,
    write_base,
)
from gotemplates import render
from llama_cpp import Llama
from smallrun import tokenizer
from torch import Tensor

from lema.convert import merge_adapter
from lema.convert.gguf.export import GgufExport, export_gguf
from lema.convert.gguf.llamacpp import QUANTIZER, locate
from lema.data.templates.named import NAMED
from lema.errors import ConfigError, ModelError

pytestmark = pytest.mark.filterwarnings("ignore")  # of llama_cpp and what it imports

WORST = 1e-3  # of log-probabilities, in fp32
# llama.cpp's GELU is a table in fp16 on the CPU.
EXACT = {kind: WORST if kind.startswith("gemma") else 2e-5 for kind in CONFIGS}
RANKS = {"llama": {"lora_use_rslora": True, "lora_rank_pattern": {"q_proj": 3}}}
QUESTION = [{"role": "user", "content": "who grinds corn?"}]


def has_quantizer() -> bool:
    try:
        return locate(QUANTIZER, None).is_file()
    except ConfigError:
        return False


class Exported:
    """A base, its adapter, the merged model, and all of it as GGUF in fp32."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.base = write_base(kind, directory / "base")
        self.adapter = write_adapter(self.base, directory / "adapter", **RANKS.get(kind, {}))
        self.merged = merge_adapter(self.adapter, directory / "merged")
        self.model = export_gguf(self.adapter, directory / "model", quantize="f32")
        self.plain = export_gguf(self.base, directory / "plain", quantize="f32")
        self.lora = export_gguf(self.adapter, directory / "lora", adapter_alone=True)


@pytest.fixture(scope="module", params=CONFIGS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return Exported(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base whose rows are long enough for every type, and its adapter."""
    directory = tmp_path_factory.mktemp("rows_of_256")
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    base = write_base("llama", directory / "base", **sizes)
    return base, write_adapter(base, directory / "adapter")


def worst(left: Tensor, right: Tensor) -> float:
    return float((left - right).abs().max())


def test_base_is_that_of_transformers(exported: Exported) -> None:
    difference = worst(of_llamacpp(exported.plain.file), of_transformers(loaded(exported.base)))
    assert difference < EXACT[exported.kind]


def test_merged_model_is_that_of_transformers(exported: Exported) -> None:
    expected = of_transformers(loaded(exported.merged))
    assert worst(of_llamacpp(exported.model.file), expected) < EXACT[exported.kind]
    # the adapter changes what the model says by hundreds of times as much
    assert worst(of_transformers(loaded(exported.base)), expected) > 0.5


def test_adapter_on_the_base_is_the_merged_model(exported: Exported) -> None:
    expected = of_transformers(loaded(exported.merged))
    got = of_llamacpp(exported.plain.file, exported.lora.file)
    assert worst(got, expected) < EXACT[exported.kind]


def test_adapter_is_that_of_peft(exported: Exported) -> None:
    from peft import PeftModel

    if exported.kind == "mixtral":
        pytest.skip("PEFT's adapters of experts are compared as the merged model")
    peft = PeftModel.from_pretrained(loaded(exported.base), exported.adapter)  # type: ignore[arg-type]
    got = of_llamacpp(exported.plain.file, exported.lora.file)
    assert worst(got, of_transformers(peft)) < EXACT[exported.kind]


def test_file_has_the_chat_template_and_the_tokenizers_numbers(exported: Exported) -> None:
    expected = tokenizer_of(exported.merged)
    text = "the miller of mill 7 says hello<|im_end|>"
    with closing(opened(exported.model.file)) as model:
        assert model.metadata["tokenizer.chat_template"] == expected.chat_template
        assert model.tokenize(text.encode(), special=True) == expected(text)["input_ids"]


def test_chat_is_answered_with_the_rendering_of_the_template(exported: Exported) -> None:
    """llama.cpp's own rendering, the Modelfile's and transformers' are tokens for tokens the same."""
    expected = tokenizer_of(exported.merged)
    text = expected.apply_chat_template(QUESTION, tokenize=False, add_generation_prompt=True)
    template = template_of(exported.model)
    chat = [(message["role"], message["content"]) for message in QUESTION]
    written = render(template, chat)
    assert text.removeprefix("<s>") == written
    with closing(opened(exported.model.file)) as model:
        # as Ollama does: what is rendered, behind the token that the file has added
        tokens = model.tokenize(written.encode(), special=True)
        begun = text.startswith("<s>")
        assert tokens == expected(text, add_special_tokens=not begun)["input_ids"]
        assert all(0 <= token < model.n_vocab() for token in words_of(model, tokens))


def words_of(model: Llama, tokens: list[int], count: int = 4) -> list[int]:
    """Return the tokens that a model goes on with, at most so many."""
    return list(islice(model.generate(tokens, temp=0), count))


def test_blank_behind_special_tokens_is_llamacpps(llama: tuple[Path, Path], tmp_path: Path) -> None:
    """A tokenizer with `legacy: false` has none; docs/gguf.md says so."""
    base = Path(shutil.copytree(llama[0], tmp_path / "base"))
    file = base / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"legacy": False}))
    plain = export_gguf(base, tmp_path / "out", quantize="f32")
    text = "<|im_start|>user"
    with closing(opened(plain.file)) as model:
        by_llamacpp = model.tokenize(text.encode(), special=True)
    by_transformers = tokenizer_of(base)(text)["input_ids"]
    blank = tokenizer_of(base).convert_tokens_to_ids("\u2581")
    assert by_llamacpp != by_transformers
    assert [number for number in by_llamacpp if number != blank] == by_transformers


def template_of(export: GgufExport) -> str:
    text = (export.directory / "Modelfile").read_text()
    return text.partition('TEMPLATE """')[2].partition('"""')[0]


@pytest.mark.parametrize("quantize", ["auto", "f16", "bf16", "q8_0"])
def test_types_of_the_converter_answer(
    quantize: str, llama: tuple[Path, Path], tmp_path: Path
) -> None:
    _, adapter = llama
    answers(export_gguf(adapter, tmp_path / "out", quantize=quantize), adapter, tmp_path, 0.05)


@pytest.mark.skipif(not has_quantizer(), reason="llama-quantize is not built")
@pytest.mark.parametrize(
    ("quantize", "tolerance"), [("q4_k_m", 1.0), ("q5_k_m", 0.5), ("q6_k", 0.3)]
)
def test_types_of_the_quantizer_answer(
    quantize: str, tolerance: float, llama: tuple[Path, Path], tmp_path: Path
) -> None:
    _, adapter = llama
    export = export_gguf(adapter, tmp_path / "out", quantize=quantize)
    answers(export, adapter, tmp_path, tolerance)
    types = {tensor.tensor_type.name.lower() for tensor in gguf.GGUFReader(export.file).tensors}
    assert any(kind.startswith(quantize[:4]) for kind in types)


def answers(export: GgufExport, adapter: Path, folder: Path, tolerance: float) -> None:
    """Compare a file's distributions with the merged model's, and have it write some words."""
    merged = merge_adapter(adapter, folder / "merged")
    expected = of_transformers(loaded(merged))
    got = of_llamacpp(export.file)
    divergence = (expected.exp() * (expected - got)).sum(-1).mean()
    assert float(divergence) < tolerance
    with closing(opened(export.file)) as model:
        assert all(0 <= token < model.n_vocab() for token in words_of(model, IDS))


def test_tokenizer_that_the_converter_has_not_is_refused_with_what_to_do(
    llama: tuple[Path, Path], tmp_path: Path
) -> None:
    base, _ = llama
    changed = Path(shutil.copytree(base, tmp_path / "base"))
    (changed / "tokenizer.model").unlink()
    (changed / "tokenizer_config.json").unlink()
    tokenizer().save_pretrained(changed)  # byte-level, trained here
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ModelError, match="pre-tokenizer was not recognized") as refused:
        export_gguf(changed, tmp_path / "out", quantize="f32")
    assert "list of the tokenizers" in refused.value.how
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    adapter = write_adapter(changed, tmp_path / "adapter")
    alone = export_gguf(adapter, tmp_path / "alone", adapter_alone=True)
    assert alone.file.stat().st_size > 1000


@pytest.mark.parametrize("name", sorted(NAMED))
def test_llamacpp_renders_a_named_template_as_its_modelfile_does(
    name: str, llama: tuple[Path, Path], tmp_path: Path
) -> None:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    from lema.convert.gguf.modelfile import modelfile_for

    opened_tokenizer = tokenizer_of(llama[0])
    opened_tokenizer.chat_template = named_text(name)
    modelfile = modelfile_for(opened_tokenizer, "x")
    if modelfile.template is None:
        assert name in ("mistral_v2v3", "mistral_v3_tekken")
        return
    formatter = Jinja2ChatFormatter(template=named_text(name), eos_token="</s>", bos_token="<s>")
    prompt = formatter(messages=QUESTION).prompt  # type: ignore[arg-type]
    chat = [(message["role"], message["content"]) for message in QUESTION]
    assert prompt.removeprefix("<s>") == render(modelfile.template, chat)


def test_command_line_exports_and_llamacpp_opens_it(
    llama: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, adapter = llama
    out = tmp_path / "out"
    assert lema("export", adapter, out, "--for", "gguf", "--quantize", "q8_0") == 0
    printed = capsys.readouterr()
    assert f"next: llama-server -m {out}/model.gguf" in printed.out
    assert "Model successfully exported" in printed.err
    assert torch.isfinite(of_llamacpp(out / "model.gguf")).all()
