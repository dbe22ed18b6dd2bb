"""Nothing is read through pickle: every test ends with this looked at; here, that a look finds
what there is.
"""

import pickle
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from types import CodeType

import pickles
import pytest
from forked import run_forked

HERE = str(Path(__file__).resolve().parents[2])


def reader(file: str, function: str = "read") -> CodeType:
    """Compile a function that unpickles, as if it stood in a file of LEMA's."""
    return compile(
        f"def {function}(data):\n    import pickle\n    return pickle.loads(data)\n", file, "exec"
    )


@pytest.mark.parametrize(
    "place", ["lema/train/checkpoint/format.py", "backends/lema_cpu/__init__.py"]
)
def test_what_our_code_looks_up_for_a_pickle_is_found(place: str) -> None:
    names: dict[str, object] = {}
    exec(reader(f"{HERE}/{place}"), names)
    names["read"](pickle.dumps(OrderedDict()))  # type: ignore[operator]
    (told,) = pickles.found()
    assert "collections.OrderedDict" in told and place in told and "in read" in told
    assert not pickles.found()


def test_what_others_look_up_is_theirs() -> None:
    pickle.loads(pickle.dumps(OrderedDict()))
    assert not pickles.found()


@pytest.mark.parametrize("place", pickles.ALLOWED)
def test_what_goes_between_processes_is_no_file(place: tuple[str, str]) -> None:
    names: dict[str, object] = {}
    file, function = place
    exec(reader(f"{HERE}/{file}", function), names)
    names[function](pickle.dumps(OrderedDict()))  # type: ignore[operator]
    assert not pickles.found()


def unpickles() -> None:
    names: dict[str, object] = {}
    exec(reader(f"{HERE}/lema/train/checkpoint/format.py"), names)
    names["read"](pickle.dumps(OrderedDict()))  # type: ignore[operator]


def test_processes_that_are_forked_look_too(tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError, match=r"collections\.OrderedDict was looked up for a pickle"
    ):
        run_forked(unpickles, [], 1, tmp_path, 60)


STARTED = (
    "import sys; sys.path[:0] = {paths!r}; from test_pickles import unpickles; unpickles(); "
    "print('goes on')"
)


@pytest.mark.slow
def test_processes_that_are_started_look_too() -> None:
    command = [
        sys.executable,
        "-c",
        STARTED.format(paths=[f"{HERE}/tests/house", f"{HERE}/tests/support"]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (97, "goes on\n")
    assert "collections.OrderedDict was looked up for a pickle" in done.stderr
