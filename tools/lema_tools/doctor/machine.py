"""The machine: packages, system, processors, memory, the limits that this process is under,
environment variables.

Installed packages are compared with the requirements in LEMA's own metadata, so that no list is
repeated here. Files such as those of `/proc` are read below `root`, which tests put elsewhere.
"""

import os
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import metadata, requires
from itertools import starmap
from pathlib import Path

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion

from lema.backend import Fact, Finding, Level
from lema.backend.findings import PAIRS, installed_version, known_bad
from lema.backend.host.limits import Limit, limit
from lema.backend.host.processors import usable_processors
from lema.backend.hostmemory import memory_limit as group_limit
from lema.compat import TESTED, untested
from lema.config.units import human_bytes
from lema.errors import DISTRIBUTION, installing

__all__ = ["LAUNCHED", "environment", "machine", "versions"]


SECTION = "machine"
ENVIRONMENT = "environment"
VERSIONS = "versions"
OTHER = "lema"  # of the public index: an optimizer, whose import name is this project's, too
DEVELOPERS = {"dev", "test"}  # extras that no run needs
RELATED = ("deepspeed", "flash-attn", "kernels", "triton")  # that change what torch and others do
ROOT = Path("/")
ENOUGH_FILES = 1024  # a large model has some hundred, and two descriptors are open of each
ENOUGH_SHARED = 1 << 30
MAY_LOCK = 1 << 14  # CAP_IPC_LOCK
# by `torchrun`
LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
SECRET = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
PLAIN = (
    "HF_HOME",
    "HF_HUB_CACHE",
    "HF_ENDPOINT",
    "TOKENIZERS_PARALLELISM",
    "MALLOC_ARENA_MAX",
    "LD_PRELOAD",
)
ALLOCATOR = re.compile(r"PYTORCH_(\w+_)?ALLOC_CONF")
YES = {"1", "true", "yes", "on"}
Limits = Callable[[str], Limit]


def machine(root: Path = ROOT, limits: Limits = limit) -> Iterator[Finding]:
    """Tell what the machine is and what this process may take of it."""
    facts = dict[str, Fact](
        system=platform.system(), kernel=platform.release(), architecture=platform.machine()
    )
    yield Finding(
        SECTION,
        "system",
        Level.OK,
        "{system} {kernel} on {architecture}.".format(**facts),
        facts=facts,
    )
    yield processors(root)
    yield memory(root)
    yield huge_pages(root)
    yield locked_memory(root, limits)
    yield open_files(limits)
    yield shared_memory(root)


def processors(root: Path = ROOT) -> Finding:
    """Tell how many processors there are, and how many of them this process may use."""
    total = os.cpu_count() or 1
    usable = usable_processors(root)
    model = _field(root / "proc/cpuinfo", "model name", "Model") or platform.processor()
    facts = dict[str, Fact](
        model=model, cores=psutil.cpu_count(logical=False), threads=total, usable_threads=usable
    )
    what = f"{model or 'unknown processor'}, {total} hardware threads"
    what += f", of which this process may use {usable:g}." if usable < total else "."
    return Finding(
        SECTION, "processors", Level.NOTE if usable < total else Level.OK, what, facts=facts
    )


def memory(root: Path = ROOT) -> Finding:
    """Tell the memory there is, and the limit of this process's control group, if it is less."""
    virtual = psutil.virtual_memory()
    bound = group_limit(root)
    facts: dict[str, Fact] = {"total_bytes": virtual.total, "available_bytes": virtual.available}
    facts |= {"swap_bytes": psutil.swap_memory().total, "limit_bytes": bound}
    what = (
        f"{human_bytes(virtual.total)} of memory, {human_bytes(virtual.available)} of it available"
    )
    if bound is None or bound >= virtual.total:
        return Finding(SECTION, "memory", Level.OK, f"{what}.", facts=facts)
    what += (
        f"; this process's control group may have {human_bytes(bound)}, which a fraction or "
        "auto in a config "
    )
    how = f"set host_memory in bytes, below {human_bytes(bound)}"
    return Finding(SECTION, "memory", Level.WARNING, f"{what}does not know.", how, facts=facts)


def huge_pages(root: Path = ROOT) -> Finding:
    """Tell whether memory for layers can be in huge pages."""
    setting = ""  # the one in brackets: `always [madvise] never`; empty: there is no such setting
    with suppress(OSError):
        text = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="utf-8")
        setting = text.partition("[")[2].partition("]")[0]
    facts: dict[str, Fact] = {"setting": setting}
    if setting in ("always", "madvise"):
        return Finding(SECTION, "huge pages", Level.OK, f"Huge pages: {setting}.", facts=facts)
    what = (
        "Memory for layers is not in huge pages, so filling it takes more requests and more work."
    )
    how = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled" if setting else ""
    return Finding(SECTION, "huge pages", Level.NOTE, what, how, facts=facts)


def locked_memory(root: Path = ROOT, limits: Limits = limit) -> Finding:
    """Tell how much memory this process may lock."""
    soft, hard = limits("MEMLOCK")
    exempt = bool(int(_field(root / "proc/self/status", "CapEff") or "0", 16) & MAY_LOCK)
    facts: dict[str, Fact] = {"limit_bytes": soft, "hard_limit_bytes": hard, "exempt": exempt}
    if soft is None or exempt:
        why = "this process is exempt from the limit" if exempt else "there is no limit"
        return Finding(
            SECTION, "locked memory", Level.OK, f"All memory may be locked: {why}.", facts=facts
        )
    what = (
        f"This process may lock {human_bytes(soft)} of memory; some systems hold page-locked "
        "copies to that."
    )
    how = (
        "ulimit -l unlimited (memlock in /etc/security/limits.conf; --ulimit memlock=-1 for a "
        "container)"
    )
    return Finding(SECTION, "locked memory", Level.NOTE, what, how, facts=facts)


def open_files(limits: Limits = limit) -> Finding:
    """Tell how many files this process may have open."""
    soft, hard = limits("NOFILE")
    facts: dict[str, Fact] = {"limit": soft, "hard_limit": hard}
    if soft is not None and soft < ENOUGH_FILES:
        what = f"Only {soft:,} files may be open, and a model may lie in some hundred of them."
        return Finding(
            SECTION, "open files", Level.WARNING, what, f"ulimit -n {ENOUGH_FILES}", facts=facts
        )
    many = "Any number of" if soft is None else f"{soft:,}"
    return Finding(SECTION, "open files", Level.OK, f"{many} files may be open.", facts=facts)


def shared_memory(root: Path = ROOT) -> Finding:
    """Tell whether several processes of this machine can share memory."""
    directory = root / "dev/shm"
    size = free = None
    with suppress(OSError):
        size, _, free = shutil.disk_usage(directory)
    anonymous = hasattr(os, "memfd_create")
    facts: dict[str, Fact] = {"total_bytes": size, "free_bytes": free, "memfd": anonymous}
    if not anonymous:
        what = (
            "Host memory that processes share is a temporary file: this system has no memfd_create."
        )
        return Finding(SECTION, "shared memory", Level.NOTE, what, facts=facts)
    if size is not None and not os.access(directory, os.W_OK):
        what = "/dev/shm cannot be written: data are tokenised in one process."
        return Finding(
            SECTION,
            "shared memory",
            Level.NOTE,
            what,
            "mount a tmpfs there that may be written",
            facts=facts,
        )
    if size is not None and size < ENOUGH_SHARED:
        what = (
            f"/dev/shm has {human_bytes(size)}; weights are shared without it, but libraries "
            "that carry tensors "
        )
        what += "between processes use it."
        return Finding(
            SECTION, "shared memory", Level.NOTE, what, "--shm-size=1g for a container", facts=facts
        )
    amount = "" if size is None else f", and /dev/shm has {human_bytes(size)}"
    return Finding(
        SECTION, "shared memory", Level.OK, f"Processes can share host memory{amount}.", facts=facts
    )


def _field(file: Path, *names: str) -> str:
    """Return what a file of `/proc` says first under one of some names; empty: nothing."""
    with suppress(OSError):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in names:
                return value.strip()
    return ""


def environment(
    variables: Mapping[str, str] = os.environ, threads: float | None = None
) -> Iterator[Finding]:
    """Tell which variables that matter are set, and what they do; `threads` of the machine may
    be kept busy.
    """
    busy = usable_processors() if threads is None else threads
    names = (*THREADS, *OFFLINE, *SECRET, *sorted(filter(ALLOCATOR.fullmatch, variables)), *PLAIN)
    there = [
        name for name in names if name in variables and (variables[name] or name not in SECRET)
    ]
    findings = [*(_variable(name, variables[name], busy) for name in there), *_launched(variables)]
    yield from findings or [
        Finding(ENVIRONMENT, "variables", Level.OK, "No relevant variable is set.")
    ]


def _variable(name: str, value: str, threads: float) -> Finding:
    level = Level.OK
    what = f"{name}={value}."
    how = ""
    asked = value.split(",")[0]
    if name in THREADS and asked.isdigit() and int(asked) < int(threads):
        level = Level.NOTE
        how = f"unset {name}, or set it to {int(threads)}"
        what = (
            f"{name}={value}: computing in host memory uses {asked} of {threads:g} hardware "
            "threads."
        )
    elif name in OFFLINE and value.lower() in YES:
        level = Level.NOTE
        what = (
            f"{name}={value}: nothing is downloaded from the hub; models come from the cache "
            "or a directory."
        )
    elif name in SECRET:
        what = f"{name} is set."
        value = "set"
    return Finding(ENVIRONMENT, name, level, what, how, facts={"value": value})


def _launched(variables: Mapping[str, str]) -> Iterator[Finding]:
    """Tell what `torchrun` said: all of it, or nothing."""
    facts = {name.lower(): variables.get(name) for name in LAUNCHED}
    if not (there := [name for name in LAUNCHED if name in variables]):
        return
    if missing := [name for name in LAUNCHED if not variables.get(name)]:
        what = f"{', '.join(there)} set, {', '.join(missing)} not: torchrun sets all of them."
        how = f"start the processes with torchrun, or unset {' '.join(there)}"
        yield Finding(ENVIRONMENT, "torchrun", Level.WARNING, what, how, facts=facts)
        return
    what = f"torchrun started this process: {variables['RANK']} of {variables['WORLD_SIZE']}."
    yield Finding(ENVIRONMENT, "torchrun", Level.NOTE, what, facts=facts)


def versions() -> Iterator[Finding]:
    """Tell the version of every package that matters, whether it is the one asked for, and which
    do not go together.
    """
    lema_metadata = metadata(DISTRIBUTION)
    yield Finding(
        VERSIONS,
        "lema",
        Level.OK,
        f"lema {lema_metadata['Version']}.",
        facts=_facts(lema_metadata["Version"]),
    )
    yield from _same_name()
    yield _python(lema_metadata["Requires-Python"])
    yield from starmap(_standing, _requirements(DISTRIBUTION))
    yield _tested()
    for name in RELATED:
        installed = installed_version(name)
        text = (
            f"{name} {installed}."
            if installed
            else f"{name} is not installed; LEMA does not need it."
        )
        yield Finding(VERSIONS, name, Level.OK, text, facts=_facts(installed))
    yield from list(known_bad(PAIRS, VERSIONS)) or [
        Finding(VERSIONS, "pairs", Level.OK, "No installed packages conflict.")
    ]


def _same_name() -> Iterator[Finding]:
    """Tell of another project's package in the same folder, if it is installed."""
    if (installed := installed_version(OTHER)) is not None:
        what = (
            f"The package {OTHER} {installed} is another project's with the same folder: one "
            "overwrites the other."
        )
        how = f"pip uninstall {OTHER}, then pip install --force-reinstall --no-deps {DISTRIBUTION}"
        yield Finding(VERSIONS, "same name", Level.PROBLEM, what, how, facts=_facts(installed))


def _tested() -> Finding:
    """Tell which releases of the libraries LEMA's tests ran with."""
    facts = {name: ", ".join(releases) for name, releases in TESTED.items()}
    if mismatches := untested():
        how = f"nothing, if all is well; else PIP_CONSTRAINT=constraints.txt {installing()}"
        return Finding(
            VERSIONS,
            "tested",
            Level.NOTE,
            f"LEMA was not tested with {mismatches}.",
            how,
            facts=facts,
        )
    listed = "; ".join(f"{name} {releases}" for name, releases in facts.items())
    return Finding(VERSIONS, "tested", Level.OK, f"LEMA was tested with {listed}.", facts=facts)


def _python(required: str) -> Finding:
    installed = platform.python_version()
    facts = _facts(installed, required, True)
    if SpecifierSet(required).contains(installed, prereleases=True):
        return Finding(VERSIONS, "python", Level.OK, f"Python {installed}.", facts=facts)
    what = f"Python {installed} is not what LEMA needs: {required}."
    how = "make an environment with another Python"
    return Finding(VERSIONS, "python", Level.PROBLEM, what, how, facts=facts)


def _requirements(name: str) -> Iterator[tuple[Requirement, str]]:
    """Yield what a distribution requires here, each with the extra that asks for it, if any."""
    extras = [
        extra for extra in metadata(name).get_all("Provides-Extra") or [] if extra not in DEVELOPERS
    ]
    seen: set[str] = set()
    for requirement in map(Requirement, requires(name) or []):
        of = canonicalize_name(requirement.name)
        for extra in ("", *extras):
            if of not in seen and (
                requirement.marker is None or requirement.marker.evaluate({"extra": extra})
            ):
                seen.add(of)
                yield requirement, extra


def _standing(requirement: Requirement, extra: str) -> Finding:
    name = canonicalize_name(requirement.name)
    specifier = str(requirement.specifier)
    installed = installed_version(name)
    facts = _facts(installed, specifier, not extra)
    how = installing(extra) if extra else f'pip install "{name}{specifier}"'
    if installed is None:
        level, what = (
            (Level.NOTE, f"; extra {extra} brings it")
            if extra
            else (Level.PROBLEM, "; LEMA needs it")
        )
        return Finding(VERSIONS, name, level, f"{name} is not installed{what}.", how, facts=facts)
    with suppress(InvalidVersion):
        if requirement.specifier.contains(installed, prereleases=True):
            return Finding(VERSIONS, name, Level.OK, f"{name} {installed}.", facts=facts)
    level = Level.WARNING if extra else Level.PROBLEM
    return Finding(
        VERSIONS,
        name,
        level,
        f"{name} {installed} is not what LEMA needs: {specifier}.",
        how,
        facts=facts,
    )


def _facts(
    installed: str | None, specifier: str = "", required: bool = False
) -> dict[str, str | bool | None]:
    return {"installed": installed, "wanted": specifier, "required": required}
