"""The environment variables that change what a run does."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from lema.backend import Finding, Level
from lema.cli.doctor.machine import usable_processors

__all__ = ["LAUNCHED", "environment"]


SECTION = "environment"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # by `torchrun`
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
SECRET = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
PLAIN = ("HF_HOME", "HF_HUB_CACHE", "HF_ENDPOINT", "TOKENIZERS_PARALLELISM", "MALLOC_ARENA_MAX", "LD_PRELOAD")
ALLOCATOR = re.compile(r"PYTORCH_(\w+_)?ALLOC_CONF")
YES = {"1", "true", "yes", "on"}


def environment(given: Mapping[str, str] = os.environ, threads: float | None = None) -> Iterator[Finding]:
    """Tell which variables that matter are set, and what they do; `threads` of the machine may be kept busy."""
    found = [
        *_threads(given, usable_processors() if threads is None else threads),
        *_hub(given),
        *(_says(name, given) for name in sorted(given) if ALLOCATOR.fullmatch(name)),
        *(_says(name, given) for name in PLAIN if name in given),
        *_launched(given),
    ]
    yield from found or [Finding(SECTION, "variables", Level.OK, "No variable is set that matters.")]


def _threads(given: Mapping[str, str], threads: float) -> Iterator[Finding]:
    for name in filter(given.__contains__, THREADS):
        asked = given[name].split(",")[0]
        if asked.isdigit() and int(asked) < int(threads):
            what = f"{name}={given[name]}: computing in host memory uses {asked} of {threads:g} hardware threads."
            how = f"unset {name}, or set it to {int(threads)}"
            yield Finding(SECTION, name, Level.NOTE, what, how, facts={"value": given[name]})
        else:
            yield _says(name, given)


def _hub(given: Mapping[str, str]) -> Iterator[Finding]:
    for name in filter(given.__contains__, OFFLINE):
        if given[name].lower() in YES:
            what = f"{name}={given[name]}: nothing is fetched from the hub; models come from the cache or a directory."
            yield Finding(SECTION, name, Level.NOTE, what, facts={"value": given[name]})
        else:
            yield _says(name, given)
    for name in SECRET:
        if given.get(name):
            yield Finding(SECTION, name, Level.OK, f"{name} is set.", facts={"value": "set"})


def _launched(given: Mapping[str, str]) -> Iterator[Finding]:
    """Tell what `torchrun` said: all of it, or nothing."""
    facts = {name.lower(): given.get(name) for name in LAUNCHED}
    if not (there := [name for name in LAUNCHED if name in given]):
        return
    if missing := [name for name in LAUNCHED if not given.get(name)]:
        what = f"{', '.join(there)} set, {', '.join(missing)} not: torchrun sets all of them."
        how = f"start the processes with torchrun, or unset {' '.join(there)}"
        yield Finding(SECTION, "torchrun", Level.WARNING, what, how, facts=facts)
        return
    what = f"torchrun started this process: {given['RANK']} of {given['WORLD_SIZE']}."
    yield Finding(SECTION, "torchrun", Level.NOTE, what, facts=facts)


def _says(name: str, given: Mapping[str, str]) -> Finding:
    return Finding(SECTION, name, Level.OK, f"{name}={given[name]}.", facts={"value": given[name]})
