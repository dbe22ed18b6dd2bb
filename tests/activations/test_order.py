"""Nothing is read before it is there, and nothing is overwritten while it is copied: on every
course events allow.

The order is that of `lema.activations` and `lema.backend.queues` themselves, on queues that take
any course. Take away one of the lines that see to it, and some course goes wrong.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from offloadscenario import Course

import lema.activations.offload
import lema.activations.pieces

pytestmark = pytest.mark.filterwarnings("ignore:no space for")  # some courses have none

COURSES = 1500
# the module, a text that is in it once, and what stands there instead
Change = tuple[str, str, str]


def code_under_test(*changes: Change) -> SimpleNamespace:
    """Return `Offload`, the text of its modules changed."""
    found: dict[str, object] = {}
    for module in (lema.activations.pieces, lema.activations.offload):
        name = module.__name__.rpartition(".")[2]
        source = Path(str(module.__file__)).read_text()
        for _, old, new in [change for change in changes if change[0] == name]:
            assert source.count(old) == 1, f"{old!r} is not in {name}.py once"
            source = source.replace(old, new)
        made = ModuleType(module.__name__)
        exec(compile(source, str(module.__file__), "exec"), made.__dict__)
        vars(made).update(found)
        found = {key: vars(made)[key] for key in ("Piece", "span_of", "view")}
    return SimpleNamespace(Offload=vars(made)["Offload"])


CODE = code_under_test()


@pytest.mark.slow
@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 40))
def test_b8_every_byte_comes_back_and_every_memory_is_given_back(seed: int) -> None:
    Course(CODE, seed).run()


@pytest.fixture
def collected_at_every_turn() -> Iterator[None]:
    """The garbage collector runs whenever something is made."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(1, 1, 1)
    yield
    gc.set_threshold(*before)
    gc.unfreeze()


@pytest.mark.usefixtures("collected_at_every_turn")
def test_the_garbage_collector_may_drop_what_is_packed_at_any_moment() -> None:
    for seed in range(40):
        Course(CODE, seed, cycles=True).run()


MUTANTS: dict[str, list[Change]] = {
    "a source is held after its copy": [("pieces", "            self.tensor = None\n", "")],
    "a source is not held": [
        ("pieces", "self.tensor: Tensor | None = tensor.detach()", "self.tensor = None")
    ],
    "compute goes on before the copy": [("pieces", "            self._download.release()\n", "")],
    "compute does not wait for what comes back": [
        ("pieces", "self._upload.wait()[:", "self._upload._slot.memory[:")
    ],
    "a storage is taken for another at its address": [
        ("pieces", "StorageWeakRef(storage)", "None")
    ],
    "what was overwritten is taken for what was": [
        ("pieces", "(storage._cdata, self.version)", "(storage._cdata, 0)"),
        (
            "offload",
            "(tensor.untyped_storage()._cdata, tensor._version), []",
            "(tensor.untyped_storage()._cdata, 0), []",
        ),
    ],
    "what was overwritten on its way comes back": [
        ("pieces", "self._left_at = self.tensor._version", "pass")
    ],
    "what was overwritten early is handed out": [
        ("offload", "piece.version_copied, piece.version,", "0, 0,")
    ],
    "another part of a storage is handed out": [
        ("pieces", "self.start <= start and start + nbytes <= self.start + self.nbytes", "True")
    ],
    "an offset is forgotten": [("offload", "+ self._first - piece.start", "- piece.start")],
    "a part begins where the storage does": [
        ("offload", " + self._first - piece.start", " + self._first")
    ],
    "strides are forgotten": [
        ("offload", "self._stride = tensor.stride()", "self._stride = tensor.contiguous().stride()")
    ],
    "a part is too short": [("pieces", "return start, end - start", "return start, end - first")],
    "a buffer is read before it is filled": [
        ("pieces", "waiting_piece.filled(download.landed)", "waiting_piece.filled(int)")
    ],
    "a buffer is filled again while it is copied": [
        ("pieces", "used(upload.drained)", "used(int)")
    ],
    "host memory is not given back": [("pieces", "        self._waiting_piece.drop()\n", "")],
    "host memory is given back while it is wanted": [
        (
            "pieces",
            "        self._waiting_piece.used(upload",
            "        self._waiting_piece.drop()\n        self._waiting_piece.used(upload",
        )
    ],
    "what is left of a stash stays": [
        ("offload", "                oldest.release()", "                pass")
    ],
    "the end of a forward lets nothing go": [
        ("offload", "                piece.release()", "                pass")
    ],
    "a backward that is over keeps what it brought": [
        ("offload", "alone():\n            self._forget(backward)", "alone():\n            pass")
    ],
    "what comes back is held for ever": [("pieces", "            self._upload = None\n", "")],
    "a piece is forgotten with the first of its tensors": [
        ("offload", "if piece.tensors.alive == 0:", "if piece.tensors.alive >= 0:")
    ],
    "nobody sees a graph go": [("offload", "        self._lost.append((piece, came))\n", "")],
    "a piece is never forgotten": [("offload", "if piece.tensors.alive == 0:", "if False:")],
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mutant", MUTANTS)
def test_without_any_one_of_its_lines_some_course_goes_wrong(mutant: str) -> None:
    code = code_under_test(*MUTANTS[mutant])
    with pytest.raises(AssertionError):
        for seed in range(COURSES):
            Course(code, seed).run()
