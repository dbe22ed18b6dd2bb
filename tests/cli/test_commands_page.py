"""docs/commands.md is what its command prints, and has every command of the app."""

from importlib.metadata import entry_points
from pathlib import Path

from commandspage import page

from lema.cli.app import VERBS

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


def test_the_page_is_what_its_command_prints() -> None:
    assert PAGE.read_text(encoding="utf-8").splitlines() == list(page()), (
        "make the page again: python tests/support/commandspage.py > docs/commands.md"
    )


def test_it_has_every_command_once() -> None:
    titles = [
        line.split()[-1]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("## lema ")
    ]
    of_packages = sorted(point.name for point in entry_points(group="lema.verbs"))
    assert {"data", "demo", "doctor", "eval", "generate", "models"} <= {*of_packages}
    assert titles == [*(verb.__name__ for verb in VERBS), *of_packages, "show", "schema", "import"]
