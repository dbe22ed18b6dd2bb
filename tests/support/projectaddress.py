"""Writes the project's public address wherever it is told: `python tests/support/projectaddress.py
ADDRESS`.

`[project.urls]` of pyproject.toml has it, and the other files have what is there. As long as there
is no such section the project has no address: PLACEHOLDER stands in links, and files that can do
without one say nothing.
"""

import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

__all__ = ["PLACEHOLDER", "WRITERS", "address_of", "main", "texts"]

PLACEHOLDER = "https://github.com/OWNER/REPOSITORY"
FORM = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+(?<!\.git)")
LINKS = re.compile(
    r"(?<=\(https://colab\.research\.google\.com/github/)[\w.-]+/[\w.-]+(?=/blob/)"
    r"|(?<=\?src=https://github\.com/)[\w.-]+/[\w.-]+(?=/blob/)"
)
WITHOUT = (
    "The link in each\nthat opens it there has `OWNER/REPOSITORY` in place of an address, "
    "because the project has no"
    " public one yet, so upload the notebook, and the wheel that\nits first cell installs."
)
WITH = "The link in each\nopens it there. Upload the wheel that\nits first cell installs."


def address_of(root: Path) -> str:
    """Return the address that pyproject.toml says, or PLACEHOLDER."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address: str = project.get("urls", {}).get("Repository", PLACEHOLDER)
    return address


def _metadata(text: str, address: str) -> str:
    text = re.sub(r"^\[project\.urls\]\n(?:.+\n)*\n", "", text, flags=re.MULTILINE)
    pages = {
        "Repository": "",
        "Documentation": "/tree/main/docs",
        "Changelog": "/blob/main/CHANGELOG.md",
    }
    lines = [
        f'{name} = "{address}{page}"\n' for name, page in {**pages, "Issues": "/issues"}.items()
    ]
    section = "".join(["[project.urls]\n", *lines, "\n"]) if address != PLACEHOLDER else ""
    return text.replace("[project.scripts]\n", f"{section}[project.scripts]\n")


def _line(before: str, key: str) -> Callable[[str, str], str]:
    """Return what keeps a line with the address before one that begins with `before`."""

    def write(text: str, address: str) -> str:
        text = re.sub(rf"^{key}: .*\n", "", text, flags=re.MULTILINE)
        line = f"{key}: {address}\n" if address != PLACEHOLDER else ""
        return re.sub(rf"^(?={before}:)", line, text, count=1, flags=re.MULTILINE)

    return write


def _links(text: str, address: str) -> str:
    return LINKS.sub(address.removeprefix("https://github.com/"), text)


def _page(text: str, address: str) -> str:
    return text.replace(WITH, WITHOUT) if address == PLACEHOLDER else text.replace(WITHOUT, WITH)


WRITERS: Mapping[str, Callable[[str, str], str]] = {
    "pyproject.toml": _metadata,
    "CITATION.cff": _line("license", "repository-code"),
    "mkdocs.yml": _line("docs_dir", "repo_url"),
    "docs/install.md": _page,
    "notebooks/colab.ipynb": _links,
    "notebooks/kaggle.ipynb": _links,
}
"""The files that have the address, and what writes it into the text of each."""


def texts(root: Path, address: str) -> dict[str, str]:
    """Return the text of each file as it is with an address."""
    return {
        name: write((root / name).read_text(encoding="utf-8"), address)
        for name, write in WRITERS.items()
    }


def main(arguments: list[str], root: Path = Path(__file__).parents[2]) -> int:
    """Write the address into all files; return 2 if it is none."""
    if len(arguments) != 1 or not FORM.fullmatch(arguments[0]):
        sys.stderr.write(f"give one address of the form {PLACEHOLDER}\n")
        return 2
    for name, text in texts(root, arguments[0]).items():
        (root / name).write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
