"""Variables that Trainium's compiler, runtime and host memory go by: what is missing is added, what is there stays.

A user's own settings win: a variable that is set is never written over; to a list of flags, those that are missing are
appended. So setting them twice is setting them once. Sources: the Neuron SDK's pages on the compiler's flags for
training (neuronx-cc, `NEURON_CC_FLAGS`) and on out-of-memory of the host (`MALLOC_ARENA_MAX`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from lema_neuron.probe import Runtime

__all__ = ["set_variables", "variables"]

FLAGS = "NEURON_CC_FLAGS"
# A failed compilation is kept, and fails again from there without a word, unless it is to be tried again.
# The compiler would multiply float32 as bfloat16 by itself.
COMPILER: Mapping[Runtime, tuple[str, ...]] = {
    "xla": ("--auto-cast=none", "--model-type=transformer", "--retry_failed_compilation"),
}
UNSET: Mapping[Runtime, Mapping[str, str]] = {
    # glibc gives every thread an arena of its own, and a machine of 128 cores runs out of memory while it compiles. It
    # looks when a process starts: this one keeps what it has, the compilers it starts obey.
    "xla": {"PJRT_DEVICE": "NEURON", "MALLOC_ARENA_MAX": "64"},
    "native": {"MALLOC_ARENA_MAX": "64"},
}


def variables(given: Mapping[str, str], runtime: Runtime) -> dict[str, str]:
    """Return what to set so that a runtime finds what it needs, beside what is given.

    Args:
        given: the environment.
        runtime: which computes; nothing is set for one without a device.

    Returns:
        Names and values that differ from those given; none, where nothing is missing.
    """
    found = {name: value for name, value in UNSET.get(runtime, {}).items() if name not in given}
    before = given.get(FLAGS, "")
    there = {_name(word) for word in _words(before)}
    missing = [flag for flag in COMPILER.get(runtime, ()) if _name(flag) not in there]
    if missing:
        found[FLAGS] = " ".join(filter(None, [before, *missing]))
    return found


def set_variables(runtime: Runtime) -> dict[str, str]:
    """Set what is missing in this process's environment, before anything reads it; return what was set."""
    found = variables(os.environ, runtime)
    os.environ.update(found)
    return found


def _words(flags: str) -> list[str]:
    """The flags, as the compiler's own parser has them; as they stand, where a quote is not closed."""
    try:
        return shlex.split(flags)
    except ValueError:
        return flags.split()


def _name(flag: str) -> str:
    """The name of a flag, however it is written: `--model-type=x`, `--model_type x`."""
    return flag.partition("=")[0].replace("_", "-")
