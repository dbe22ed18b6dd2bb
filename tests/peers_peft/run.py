"""PEFT's own LoRA tests on streamed models: `tox -e peers-peft -- [arguments of pytest]`.

The tests are read from the source distribution of the installed version, and stay in a temporary
directory.
"""

import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

FILES = ("test_decoder_models.py", "test_target_parameters.py")
HERE = Path(__file__).resolve().parent


def unpacked(place: Path) -> Path:
    """Download PEFT's sources and return the directory of its tests, made a package."""
    wanted = [
        "--no-binary",
        "peft",
        "--no-deps",
        "--no-build-isolation",
        f"peft=={version('peft')}",
    ]
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--dest", place, *wanted], check=True
    )
    with tarfile.open(next(place.glob("peft-*.tar.gz"))) as archive:
        archive.extractall(place, filter="data")
    tests = next(place.glob("peft-*/tests"))
    (tests / "__init__.py").touch()
    return tests


def main() -> int:
    """Run the tests, and return the exit code of pytest."""
    with tempfile.TemporaryDirectory() as place:
        tests = unpacked(Path(place))
        paths = [
            HERE,
            HERE.parent / "support",
            HERE.parents[1],
            HERE.parents[1] / "backends",
            HERE.parents[1] / "tools",
        ]
        start = (
            f"import sys, pytest; sys.path[:0] = {[*map(str, paths)]!r}; "
            "sys.exit(pytest.main(sys.argv[1:]))"
        )
        options = [
            "-p",
            "peft_on_streams",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            tests.parent,
            "-c",
            "/dev/null",
        ]
        own = list(sys.argv[1:])
        return subprocess.run(
            [sys.executable, "-c", start, *options, *(tests / name for name in FILES), *own]
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
