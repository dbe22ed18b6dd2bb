"""The project's public address is set in one place by one command, and every file that tells it
tells the same.
"""

import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from projectaddress import PLACEHOLDER, WRITERS, address_of, main, texts

ROOT = Path(__file__).parents[2]
ADDRESS = "https://github.com/some-one/lema.lora"
NAMED_HERE = {"tests/support/projectaddress.py"}


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the files that have the address, as they are without one."""
    for name, text in texts(ROOT, PLACEHOLDER).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def contents(root: Path) -> dict[str, str]:
    return {name: (root / name).read_text(encoding="utf-8") for name in WRITERS}


def test_all_files_have_the_address_of_pyproject() -> None:
    assert contents(ROOT) == texts(ROOT, address_of(ROOT))


def test_no_other_file_waits_for_the_address() -> None:
    words = ["git", "grep", "-l", "--untracked", PLACEHOLDER.removeprefix("https://github.com/")]
    listed = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    if not shutil.which("git") or not (ROOT / ".git").exists():  # not a clone
        listed = [name for name, text in contents(ROOT).items() if "OWNER/REPOSITORY" in text]
    assert set(listed) - NAMED_HERE - {"tests/house/test_address.py"} <= WRITERS.keys()


def test_one_command_sets_it_everywhere(copy: Path) -> None:
    before = contents(copy)
    assert address_of(copy) == PLACEHOLDER
    assert "urls" not in tomllib.loads(before["pyproject.toml"])["project"]
    for address in (ADDRESS, "https://github.com/another/name"):
        assert main([address], copy) == 0
        after = contents(copy)
        slug = address.removeprefix("https://github.com/")
        assert [name for name, text in after.items() if "OWNER/REPOSITORY" in text] == []
        assert [name for name, text in after.items() if slug not in text] == ["docs/install.md"]
        urls = tomllib.loads(after["pyproject.toml"])["project"]["urls"]
        assert urls["Repository"] == address and all(
            url.startswith(address) for url in urls.values()
        )
        assert f"repository-code: {address}\n" in after["CITATION.cff"]
        assert f"repo_url: {address}\n" in after["mkdocs.yml"]
        assert f"github/{slug}/blob/main/notebooks/colab.ipynb)" in after["notebooks/colab.ipynb"]
        assert f"src={address}/blob/main/notebooks/kaggle.ipynb)" in after["notebooks/kaggle.ipynb"]
        assert after == texts(copy, address) and address_of(copy) == address
        assert texts(copy, PLACEHOLDER) == before, "nothing else was changed"


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_that_was_not_written_is_seen(name: str, copy: Path) -> None:
    before = contents(copy)
    main([ADDRESS], copy)
    (copy / name).write_text(before[name], encoding="utf-8")
    assert contents(copy) != texts(copy, address_of(copy))


@pytest.mark.parametrize(
    "given", [[], ["lema"], [f"{ADDRESS}/"], [f"{ADDRESS}.git"], [ADDRESS, ADDRESS]]
)
def test_what_is_no_address_is_refused(
    given: list[str], copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(copy)
    assert main(given, copy) == 2
    assert f"of the form {PLACEHOLDER}" in capsys.readouterr().err
    assert contents(copy) == before
