"""The environment variables of Trainium's compiler and runtime: missing ones are added, and others
are not changed.

The user's own settings win: a variable that is set is not overwritten, and only missing flags are
appended to a list of flags. So a second call changes nothing. Sources: the Neuron SDK's pages on
the compiler's flags for training (neuronx-cc, `NEURON_CC_FLAGS`) and on out-of-memory of the host
(`MALLOC_ARENA_MAX`).
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

from lema_neuron.probe import Runtime

__all__ = ["set_variables", "variables"]

FLAGS = "NEURON_CC_FLAGS"
# The compiler caches a failed compilation, and fails again without a message unless it is told to
# retry. By default, it would multiply float32 as bfloat16.
COMPILER: Mapping[Runtime, tuple[str, ...]] = {
    "xla": ("--auto-cast=none", "--model-type=transformer", "--retry_failed_compilation"),
}
UNSET: Mapping[Runtime, Mapping[str, str]] = {
    # glibc gives every thread an arena of its own, and a machine of 128 cores runs out of memory
    # while it compiles. It reads the variable when a process starts, so this affects the compilers
    # that this process starts, not itself.
    "xla": {"PJRT_DEVICE": "NEURON", "MALLOC_ARENA_MAX": "64"},
    "native": {"MALLOC_ARENA_MAX": "64"},
}


def variables(environ: Mapping[str, str], runtime: Runtime) -> dict[str, str]:
    """Return the variables that must be set for a runtime, in addition to those that are set.

    Args:
        environ: the environment.
        runtime: a runtime without a device needs no variables.

    Returns:
        Names and values that differ from those given; empty if nothing is missing.
    """
    missing_variables = {
        name: value for name, value in UNSET.get(runtime, {}).items() if name not in environ
    }
    before = environ.get(FLAGS, "")
    there = {_name(word) for word in _words(before)}
    missing = [flag for flag in COMPILER.get(runtime, ()) if _name(flag) not in there]
    if missing:
        missing_variables[FLAGS] = " ".join(filter(None, [before, *missing]))
    return missing_variables


def set_variables(runtime: Runtime) -> dict[str, str]:
    """Set missing variables in this process's environment, before anything reads them; return
    those it has set.
    """
    added = variables(os.environ, runtime)
    os.environ.update(added)
    return added


def _words(flags: str) -> list[str]:
    """Split flags like the compiler's own parser; split at spaces if a quote is not closed."""
    try:
        return shlex.split(flags)
    except ValueError:
        return flags.split()


def _name(flag: str) -> str:
    """The name of a flag, however it is written: `--model-type=x`, `--model_type x`."""
    return flag.partition("=")[0].replace("_", "-")
