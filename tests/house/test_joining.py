"""Files for those who join: the commands of CONTRIBUTING.md are ours, and nothing is published
without a person.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def read(path: str | Path) -> Any:
    return YAML(typ="safe", pure=True).load((ROOT / path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def lint() -> list[str]:
    """The commands of `tox -e lint`."""
    (section,) = re.findall(
        r"^\[testenv:lint\]\n(.*?)^\[", (ROOT / "tox.ini").read_text(), re.DOTALL | re.MULTILINE
    )
    commands = section.partition("commands =\n")[2].partition("\n\n")[0]
    return [line.strip() for line in commands.splitlines()]


def test_hooks_are_those_of_the_lint_environment(lint: list[str]) -> None:
    (repository,) = read(".pre-commit-config.yaml")["repos"]
    assert repository["repo"] == "local"  # nothing is downloaded
    entries = [
        re.sub(r"^env \S+ | --force-exclude$", "", hook["entry"]) for hook in repository["hooks"]
    ]
    assert entries == lint


def test_the_commands_of_contributing_are_those_of_tox(lint: list[str]) -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^## Five commands\n+```bash\n(.*?)```", text, re.DOTALL | re.MULTILINE)
    commands = [line.partition("#")[0].strip() for line in block.splitlines()]
    assert commands == [" && ".join(lint[:2]), lint[2], "mypy", "pytest tests/data", "tox run"]
    assert (ROOT / commands[3].split()[1]).is_dir()
    named = set(re.findall(r"`tox -e (\w+)`", text))
    assert named <= set(
        re.findall(r"^\[testenv:(\w+)\]", (ROOT / "tox.ini").read_text(), re.MULTILINE)
    )


def newest_release() -> str:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    return next(re.finditer(r"(?m)^## \[(\d[^\]]*)\]", text))[1]


def test_the_citation_is_of_this_version() -> None:
    citation = read("CITATION.cff")
    assert (
        str(citation["version"]) == newest_release() and citation["license"] == PROJECT["license"]
    )
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


@pytest.mark.parametrize(
    "form", [form for form in FORMS if form.name != "config.yml"], ids=lambda form: form.stem
)
def test_a_form_of_an_issue_has_a_name_and_fields(form: Path) -> None:
    asked = read(form)
    assert asked["name"] and asked["description"]
    fields = [field for field in asked["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields) > 3


def test_a_release_is_checked_and_published_by_a_person_alone() -> None:
    workflow = read(".github/workflows/release.yml")
    jobs = workflow["jobs"]
    triggers = workflow["on"]
    assert workflow["permissions"] == {"contents": "read"}
    assert not triggers["workflow_dispatch"]["inputs"]["publish"]["default"]
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert "github.event_name == 'workflow_dispatch' && inputs.publish" in jobs["publish"]["if"]
    assert jobs["publish"]["needs"] == ["check", "image"] and jobs["image"]["needs"] == "build"
    assert jobs["publish"]["environment"] == "release"
    (demo,) = [step["run"] for step in jobs["check"]["steps"] if "lema demo" in step.get("run", "")]
    assert (
        jobs["check"]["needs"] == "build"
        and "python -m venv fresh" in demo
        and "constraints.txt" in demo
    )
