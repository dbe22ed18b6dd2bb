"""The pages on how LEMA is built: short enough to be read, and every module, file and chapter
they name exists.
"""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest
from ruamel.yaml import YAML

import lema
import lema.activations
import lema.train
from lema.config import LemaConfig

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = DOCS / "architecture.md"
CODE = "lema/**/*.py", "backends/**/*.py", "tools/**/*.py", "benchmarks/*.py"
SOURCES = sorted(path for files in CODE for path in ROOT.glob(files))
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
MOST_LINES = 120  # of the page on the architecture, and of the README
MOST_LINES_OF_A_PAGE = 210
# tables that grow with the types of models and with the commands
LONG = {
    "models.md",
    "commands.md",
}
# Names with dots that are no modules: groups of entry points, and the repository's own name.
GROUPS = {
    "lema.backends",
    "lema.settings",
    "lema.doctors",
    "lema.verbs",
    "lema.config_verbs",
    "lema.shard_formats",
}
ROOMS = sorted(
    path.parent
    for path in ROOT.glob("lema/**/__init__.py")
    if path.parent.name not in ("lema", "utils")
)


def names_of(page: Path) -> set[str]:
    """The dotted names of LEMA that stand in back quotes on a page."""
    quoted = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    return {
        name for text in quoted for name in re.findall(r"^lema(?:\.\w+)+$", text.removesuffix("()"))
    } - GROUPS


def imported_by(page: Path) -> set[str]:
    """The dotted names of LEMA that the examples of a page import."""
    lines = re.findall(
        r"^ *from (lema[\w.]*) import ([\w, ]+)$", page.read_text(encoding="utf-8"), re.MULTILINE
    )
    return {f"{module}.{name.split()[0]}" for module, names in lines for name in names.split(",")}


def resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of one or of a class in one."""
    found: object = lema
    for at, part in enumerate(parts := name.split(".")[1:], start=1):
        try:
            found = importlib.import_module(".".join(["lema", *parts[:at]]))
        except ModuleNotFoundError:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_name_of_lema_in_back_quotes_or_an_example_exists(page: Path) -> None:
    assert not [name for name in sorted(names_of(page) | imported_by(page)) if not resolves(name)]


def test_every_name_of_lema_in_a_docstring_or_a_comment_exists() -> None:
    names = {name: path.name for path in SOURCES for name in names_of(path)}
    assert not {name: path for name, path in names.items() if not resolves(name)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_and_page_that_is_named_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    files = re.findall(r"`((?:lema|tests|benchmarks|backends|tools|configs)/[\w/.*-]+)`", text)
    files += [f"backends/{name}" for name in re.findall(r"`(lema_\w+/[\w/.]+)`", text)]
    links = [link for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text) if "://" not in link]
    # git ignores these
    kept = [name for name in files if not name.startswith("benchmarks/results/")]
    missing = [name for name in kept if not [*ROOT.glob(name)]]
    assert not missing + [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_linked_heading_exists(page: Path) -> None:
    for target, anchor in re.findall(
        r"\]\(([\w/.-]*\.md)?#([\w-]+)\)", page.read_text(encoding="utf-8")
    ):
        other = page.parent / target if target else page
        headings = re.findall(r"^#+ (.+)$", other.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {
            re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings
        }, anchor


def test_the_settings_of_every_example_are_ours() -> None:
    """Files of other trainers, which some pages show too, are between markers with their names."""
    ours = {*LemaConfig.json_schema()["properties"], "phases", "trains"}
    for page in PAGES:
        text = re.sub(
            r"<!-- (?:axolotl|trl|llamafactory) yaml -->.*?<!-- end -->",
            "",
            page.read_text(encoding="utf-8"),
            flags=re.S,
        )
        for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL):
            settings = YAML(typ="safe", pure=True).load(block)
            assert settings.keys() <= ours, page.name
            if "model_name_or_path" in settings:
                LemaConfig(**{key: value for key, value in settings.items() if key != "trains"})


def test_every_message_that_is_explained_is_one_of_ours() -> None:
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    table = page.partition("| message | what to do |")[2].partition("\n\n")[0]
    quoted = [
        text for row in table.splitlines() for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    ]
    trees = (ast.parse(source.read_text(encoding="utf-8")) for source in SOURCES)
    texts = (
        node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
    )
    code = "\n".join(text for text in texts if isinstance(text, str))
    assert len(quoted) > 10
    assert not [text for text in quoted for part in text.split("...") if part.strip() not in code]


def test_pages_are_read_in_one_sitting() -> None:
    lines = {page: len(page.read_text(encoding="utf-8").splitlines()) for page in PAGES}
    assert lines[PAGE] <= MOST_LINES and lines[ROOT / "README.md"] <= MOST_LINES
    assert not [
        page
        for page, count in lines.items()
        if count > MOST_LINES_OF_A_PAGE and page.name not in LONG
    ]


def test_pages_install_from_the_clone_and_not_from_an_index_without_lema() -> None:
    """The page on installing says what messages of the program mean by the distribution's name."""
    install = re.compile(r"pip install [^`\n|]*lema-lora")
    naming = [page for page in PAGES if install.search(page.read_text(encoding="utf-8"))]
    assert naming == [DOCS / "install.md"]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = {
        extra
        for page in PAGES
        for words in re.findall(
            r'pip install -e "\.\[([\w,-]+)\]"', page.read_text(encoding="utf-8")
        )
        for extra in words.split(",")
    }
    assert {"eval", "quantize"} <= named <= extras["optional-dependencies"].keys()


def test_the_readme_leads_to_the_planner() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "](docs/planner/index.html)" in readme
    assert (DOCS / "planner" / "index.html").is_file()


def test_a_chat_of_another_tool_leads_to_the_chat_of_lema() -> None:
    rows = [
        row
        for page in DOCS.glob("coming-from-*.md")
        for row in re.findall(
            r"^\| `[\w-]+ chat\b.*$", page.read_text(encoding="utf-8"), re.MULTILINE
        )
    ]
    assert len(rows) == 2 and all("`lema chat" in row for row in rows)


def test_the_first_page_leads_to_every_other() -> None:
    links = re.findall(r"\]\(([\w/-]+\.md)\)", (DOCS / "index.md").read_text(encoding="utf-8"))
    pages = {str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS)}
    assert {*links, "index.md"} == pages and len(links) == len(set(links))
    nav = re.findall(
        r"^ +- (?:LEMA: )?([\w/-]+\.md)$",
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert sorted(nav) == sorted(pages)


def test_the_python_reference_has_every_public_name() -> None:
    named = re.findall(
        r"^::: (lema[\w.]+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert not [name for name in named if not resolves(name)]
    rooms = (lema, lema.train, lema.activations)
    public = {"BackendContract", *(name for room in rooms for name in room.__all__)} - {
        "__version__"
    }
    assert {name.rpartition(".")[2] for name in named} == public


def test_the_page_names_every_room_and_every_file_of_a_step() -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, rooms, steps, _ = re.split(
        r"^## (?:The rooms|One step|Five invariants).*$", text, flags=re.MULTILINE
    )
    assert set(re.findall(r"^\| \d \| `(\w+)` \|", rooms, re.MULTILINE)) == {
        room.name for room in ROOMS if room.parent.name == "lema"
    }
    columns = re.findall(r"^\| \d+ \| [^|]+ \| ([^|]+) \|", steps, re.MULTILINE)
    assert len(columns) == 12
    files = [name for column in columns for name in re.findall(r"`([^`]+)`", column)]
    assert not [name for name in files if not (ROOT / "lema" / name).exists()]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(ROOT)))
def test_a_room_begins_with_its_one_sentence_and_names_pages_that_exist(room: Path) -> None:
    said = importlib.import_module(".".join(room.relative_to(ROOT).parts)).__doc__ or ""
    assert re.match(r"[A-Z`][^.]+(?:\.\w[^.]*)*\.(?:\s|$)", said)
    assert not [
        page for page in re.findall(r"docs/[\w/-]+\.md", said) if not (ROOT / page).exists()
    ]
