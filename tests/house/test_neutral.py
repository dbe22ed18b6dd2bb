"""The code names no architecture, and the core names no device: what it does holds for those
that come next.
"""

import re
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("lema/**/*.py"), *ROOT.glob("backends/**/*.py")])
ORDINARY_WORDS = {"align", "beam", "bit", "clip", "ctrl", "git"}  # and architectures as well
# Programs that are named after one, and ids of the hub in examples.
NO_CODE = re.compile(
    r"llama[._-]?cpp|llama-(?:quantize|server|adapter|cli)|llama-factory|qwen/qwen3-\w+",
    re.IGNORECASE,
)
# Their subject is what others publish by name: chat templates, expressions of tokenizers, and what
# releases of servers take.
TABLES = {
    "lema/data/chat/pieces.py",
    "lema/data/templates/named.py",
    "lema/lora/serving/servers.py",
}
DEVICES = re.compile(r"cuda|neuron|rocm|(?<![a-z])(xla|xpu|npu|mps|hip)(?![a-z])", re.IGNORECASE)


def words(text: str) -> str:
    """Cut names written in one word where a capital begins, and lower what is left."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text).lower()


def architectures_in(text: str) -> set[str]:
    names = {
        form for key in CONFIG_MAPPING for form in (key.lower(), key.lower().replace("_", "-"))
    } - ORDINARY_WORDS
    alternatives = "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))
    pattern = re.compile(rf"(?<![a-z0-9])({alternatives})(?![a-z0-9])")
    text = NO_CODE.sub("", text)
    return {found for form in (text.lower(), words(text)) for found in pattern.findall(form)}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "file",
    [file for file in FILES if file.relative_to(ROOT).as_posix() not in TABLES],
    ids=lambda file: str(file.relative_to(ROOT)),
)
def test_no_file_names_an_architecture(file: Path) -> None:
    assert not architectures_in(file.read_text())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("if model_type == 'llama':", {"llama"}),
        ("# as in LlamaForCausalLM", {"llama"}),
        ("from transformers.models.gpt2 import modeling_gpt2", {"gpt2"}),
        ("QWEN2_MOE_LAYERS", {"qwen2_moe"}),
        ("GPT2LMHeadModel", {"gpt2"}),
        ("llama.cpp, llama_cpp, LLAMA_CPP, LLaMA-Factory, llama-server", set()),
        ("clip_grad_norm_(bit, optimize, sample, align)", set()),
    ],
)
def test_names_of_architectures_are_found_however_they_are_written(
    text: str, found: set[str]
) -> None:
    assert architectures_in(text) == found


def test_the_core_names_no_device() -> None:
    named = [
        (file.relative_to(ROOT).as_posix(), line.strip())
        for file in FILES
        if file.is_relative_to(ROOT / "lema")
        for line in file.read_text().splitlines()
        if DEVICES.search(line)
    ]
    assert named == []


def test_there_are_files_to_look_at() -> None:
    names = {file.relative_to(ROOT).as_posix() for file in FILES}
    assert names >= TABLES
    assert {
        "lema/engine/streamed.py",
        "lema/stream/lease.py",
        "backends/lema_cpu/backend.py",
    } <= names
