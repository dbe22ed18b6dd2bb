"""What LEMA reads through pickle: the interpreter says of each object that a pickle names, by its
audit hook.

`torch.load(weights_only=True)` makes no such find: its unpickler knows tensors and plain values,
and looks nothing up.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

__all__ = ["ALLOWED", "found", "watch"]

ROOT = Path(__file__).resolve().parents[2]
PLACES = tuple(f"{ROOT / name}/" for name in ("lema", "backends"))

# By file (from the root of the repository) and function: pickles that are no files, and what
# becomes of them.
ALLOWED: Mapping[tuple[str, str], str] = {
    (
        "lema/backend/torchrun.py",
        "gather_objects",
    ): "torch.distributed's own way to send plain data between one run's processes",
    ("backends/lema_neuron/comm.py", "split"): "the ranks of a group",
    (
        "lema/model/split.py",
        "_learn",
    ): "torch's own code, which transformers has compiled for flex attention",
    ("lema/model/split.py", "_logits"): "the same, of later calls",
    ("lema/model/split.py", "call_layer"): "the same, of a layer",
    (
        "lema/model/layers/compiled.py",
        "_compile",
    ): "torch's own code, which it compiled before, in the user's cache directory",
}

_found: list[str] = []
_watching: list[int] = []


def watch() -> None:
    """Begin to look, once in this process; children that are forked look too."""
    if not _watching:
        _watching.append(1)
        sys.addaudithook(_hook)


def found() -> list[str]:
    """Return what was looked up for a pickle since the last call, and by which lines of LEMA's."""
    told = list(_found)
    _found[:] = []
    return told


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if event != "pickle.find_class":
        return
    frames = [
        frame for frame in _frames(sys._getframe(1)) if frame.f_code.co_filename.startswith(PLACES)
    ]
    if not frames or any(_place(frame) in ALLOWED for frame in frames):
        return
    lines = [
        f"  {frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"
        for frame in frames
    ]
    _found.append(
        "\n".join([f"{'.'.join(map(str, arguments))} was looked up for a pickle", *lines])
    )


def _frames(innermost: FrameType | None) -> Iterator[FrameType]:
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def _place(frame: FrameType) -> tuple[str, str]:
    return Path(frame.f_code.co_filename).relative_to(ROOT).as_posix(), frame.f_code.co_name
