"""Every code block of the README and of docs/: which are run by a test, and what is checked of
those that are not.

A block between `<!-- NAME -->` and `<!-- end -->` is run by the test that names it. All blocks in
Python are, except those that need a GPU, which compile. For the other blocks, test_docs.py checks
the settings, and the tests here check that each `lema` command has a verb and options that exist,
and that each script exists.
"""

import re
from pathlib import Path

import pytest
from typer.main import get_command

from lema.cli.app import app
from lema.config import LemaConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"(?:<!-- ([\w ]+) -->\n)?^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
COMMANDS = get_command(app).commands  # type: ignore[attr-defined] # a group has commands
NEED_A_DEVICE = {"rewards.md": 1}  # Python blocks of each page that name `device="cuda"`
RUN = {  # name of a block, and the tests that run it
    "own rows": "tests/cli/test_own_rows.py",
    "demo command": "tests/cli/test_demo.py",
    "test command": "tests/house/test_readme.py",
    "config example": "tests/house/test_readme.py",
    "python example": "tests/house/test_readme.py",
    "activations example": "tests/activations/test_activations_page.py",
    "trainer example": "tests/activations/test_activations_page.py",
    "trl yaml": "tests/importing/test_trl.py",
    "llamafactory yaml": "tests/importing/llamafactory/test_llamafactory_page.py",
    "unsloth script": "tests/importing/test_unsloth_page.py",
    "unsloth yaml": "tests/importing/test_unsloth_page.py",
    "unsloth python": "tests/importing/test_unsloth_page.py",
    "axolotl yaml": "tests/importing/test_axolotl.py",
    "phases example": "tests/train/phases/test_phases_page.py",
    "data example": "tests/house/test_readme.py",
    "settings example": "tests/house/test_readme.py",
    "operations example": "tests/activations/test_activations_page.py",
    "sft example": "tests/peers_trl/test_trl_page.py",
    "images example": "tests/peers_trl/test_trl_images.py",
    "images rows": "tests/train/test_image_runs.py",
    "sounds rows": "tests/train/test_sound_runs.py",
    "reward example": "tests/peers_trl/test_trl_page.py",
    "grpo example": "tests/peers_trl/test_trl_page.py",
    "mixin example": "tests/peers_trl/test_trl_page.py",
    "served example": "tests/peers_trl/test_trl_page.py",
    "replaying example": "tests/train/hf/test_replayed_choices.py",
    "vllm adapter": "tests/peers_serving/test_serving_page.py",
    "vllm swap": "tests/peers_serving/test_serving_page.py",
    "vllm merged": "tests/peers_serving/test_serving_page.py",
}


def blocks(page: Path) -> list[tuple[str, str, str]]:
    """The name, the language and the text of every block of a page."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def test_every_named_block_is_run_by_the_test_that_is_listed() -> None:
    assert {name for page in PAGES for name, _, _ in blocks(page) if name} == RUN.keys()
    texts = {
        name: (ROOT / file).read_text(encoding="utf-8")
        for name, file in RUN.items()
        if name != "demo command"
    }
    assert not [
        name for name, text in texts.items() if not re.search(rf"\b{name.split()[0]}\b", text)
    ]


def test_python_that_is_not_run_needs_a_device_and_compiles() -> None:
    kept = {
        page: [text for name, kind, text in blocks(page) if kind == "python" and not name]
        for page in PAGES
    }
    found = {
        str(page.relative_to(ROOT)).removeprefix("docs/"): texts for page, texts in kept.items()
    }
    assert {page: len(texts) for page, texts in found.items() if texts} == NEED_A_DEVICE
    for page, texts in found.items():
        for text in texts:
            assert 'device="cuda"' in text
            compile(text, page, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_has_a_verb_and_options_that_exist(page: Path) -> None:
    settings = {f"--{name.replace('_', '-')}" for name in LemaConfig.defaults()}
    for _, kind, text in blocks(page):
        for line in text.replace("\\\n", " ").splitlines() if kind in ("", "bash") else []:
            command = line.partition(" #")[0]
            for script in re.findall(r"python ((?:benchmarks|tests|runs)/\S+\.py)", command):
                assert (ROOT / script).is_file(), script
            if not (called := re.match(r"(?:\S+=\S+ )*(?:\S*/)?lema ([a-z-]+)(.*)", command)):
                continue
            verb = COMMANDS[called[1]]
            own = {option for parameter in verb.params for option in parameter.opts} | {
                "--help",
                "--debug",
            }
            used = {one.partition("=")[0] for one in called[2].split() if one.startswith("--")}
            assert called[1] == "config" or used <= own | settings, command
