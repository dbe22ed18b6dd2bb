"""Every setting misspelt and of the wrong type, in a file of settings and in one of phases.

Each must be refused by name and line, a misspelt one with the name it is nearest to, before torch
is imported. So the cases run in a process of their own, which imports nothing but the settings.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from faults.outcome import Outcome

__all__ = ["run"]

SECONDS = 1.0
HEAVY = ("torch", "transformers", "peft", "datasets")
WRONG: tuple[Any, ...] = ({"a": "x"}, [[1]], float("nan"), "", -1.5)
PHASES = {
    "model_name_or_path": "m",
    "train_data": {"text": ".", "chat": "."},
    "batch_size": 2,
    "max_length": 16,
    "phases": [
        {
            "trains": "full",
            "tokens": 64,
            "learning_rate": 1e-3,
            "mixture": [{"name": "text", "rate": 1.0}],
        },
        {
            "trains": "lora",
            "tokens": 64,
            "learning_rate": 1e-3,
            "mixture": [{"name": "chat", "rate": 1.0}],
            "lora_rank": 2,
            "fade": {"steps": 2},
        },
    ],
}
# of the wrong values, those that are not wrong everywhere
ALLOWED: list[list[Any]] = [
    ["suffix", ""],
    ["train_data", {"a": "x"}],
    ["eval_data", {"a": "x"}],
]
SLIPS = 3  # of each setting


@dataclass(frozen=True)
class Level:
    """Settings that stand together.

    Attributes:
        name: of the level, in words.
        known: the settings.
        path: of what holds them in `PHASES`; None: they are those of a file without phases.
    """

    name: str
    known: tuple[str, ...]
    path: tuple[Any, ...] | None = None


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Misspell every setting in three ways, and give each every wrong type: `count` cases, spread
    over all there are.

    Args:
        count: of cases; more than there are is all.
        seed: of the letters.
        report: is told how long it took.
    """
    started = time.perf_counter()
    code = (
        f"import sys; sys.path[:0] = {sys.path!r}; from faults import configkeys; "
        f"configkeys._child({count}, {seed})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        return Outcome(*_WORDS, 1, 0, (done.stderr[-2000:],), time.perf_counter() - started)
    found = json.loads(done.stdout)
    failures = [*found["failures"], *(f"{name} was imported" for name in found["heavy"])]
    if report is not None:
        report(f"{found['settings']} settings; the slowest refusal took {found['slowest']:.3f} s")
    return Outcome(
        *_WORDS,
        found["cases"],
        found["cases"] - len(failures),
        tuple(failures),
        time.perf_counter() - started,
    )


_WORDS = (
    "misspelt key, wrong type, every config field",
    "refused with the nearest name and its line, before torch",
)


def _child(count: int, seed: int) -> None:
    """Run in a process of its own; prints what was found."""
    random = Random(seed)
    failures = []
    cases = 0
    slowest = 0.0
    levels = list(_levels())
    every = [
        (level, *one)
        for level in levels
        for setting in level.known
        for one in _tries(setting, level, random)
    ]
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "settings.yaml"
        for level, key, value, near in every[:: max(1, len(every) // count)]:
            before = time.process_time()
            wrong = _refused(file, level, key, value, near)
            slowest = max(slowest, time.process_time() - before)
            cases += 1
            if wrong is not None:
                failures.append(f"{level.name}: {key}: {value!r}: {wrong}")
    if slowest > SECONDS:
        failures.append(f"the slowest refusal took {slowest:.1f} s")
    heavy = sorted(set(HEAVY) & sys.modules.keys())
    num_settings = sum(len(level.known) for level in levels)
    found = {
        "cases": cases,
        "failures": failures,
        "heavy": heavy,
        "slowest": slowest,
        "settings": num_settings,
    }
    json.dump(found, sys.stdout)


def _tries(setting: str, level: Level, random: Random) -> Iterator[tuple[str, Any, str]]:
    """Yield what is written, with which value, and the setting that is meant."""
    for slip in sorted({_slip(setting, kind, random) for kind in range(SLIPS)} - set(level.known)):
        yield slip, 1, setting
    for value in WRONG:
        if [setting, value] not in ALLOWED:
            yield setting, value, ""


def _levels() -> Iterator[Level]:
    from lema.config import LemaConfig
    from lema.config.backendsettings import backend_settings
    from lema.data import Sampling
    from lema.train.phases.phase import FadeConfig, Phase
    from lema.train.phases.plan import PhasePlan

    yield Level(
        "settings", tuple(name for name in LemaConfig.model_fields if name != "model_name_or_path")
    )
    yield Level("settings of backends", tuple(backend_settings()))
    yield Level("plan", tuple(name for name in PhasePlan.model_fields if name != "phases"), ())
    yield Level("phase", tuple(Phase.model_fields), ("phases", 1))
    yield Level("data set", tuple(_fields(Sampling)), ("phases", 1, "mixture", 0))
    yield Level("fade", tuple(FadeConfig.model_fields), ("phases", 1, "fade"))


def _fields(kind: Any) -> list[str]:
    return list(kind.__dataclass_fields__)


def _slip(word: str, kind: int, random: Random) -> str:
    """Drop, double or swap a letter."""
    at = random.randrange(len(word) - 1)
    match kind % 3:
        case 0:
            return word[:at] + word[at + 1 :]
        case 1:
            return word[: at + 1] + word[at:]
        case _:
            return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def _refused(file: Path, level: Level, key: str, value: Any, near: str) -> str | None:
    """What is wrong with how a setting was refused; None: nothing. A misspelt one must lead to
    `near`.
    """
    from lema.config import LemaConfig
    from lema.errors import ConfigError
    from lema.train.phases.file import read_phase_file

    document: Any = {"model_name_or_path": "m"} if level.path is None else deepcopy(PHASES)
    holder = document
    for step in level.path or ():
        holder = holder[step]
    holder.pop(key, None)
    holder[key] = value
    text = json.dumps(document, indent=1).replace("NaN", ".nan")
    file.write_text(text)
    lines = text.splitlines()
    begins = [
        number for number, line in enumerate(lines, 1) if line.lstrip().startswith(f'"{key}":')
    ]
    # a fault within the value is said of its own line
    long = len(json.dumps(value, indent=1).splitlines())
    read: Callable[[Path], object] = LemaConfig.from_yaml if level.path is None else read_phase_file
    try:
        read(file)
    except ConfigError as error:
        said = str(error)
        if key not in said:
            return f"not named: {said}"
        if near and (near not in error.how or error.how.count(" or ") > 2):
            return f"the name meant is not offered: {said}"
        if not any(
            f"{file}:{line + further}" in said for line in begins for further in range(long)
        ):
            return f"the line is not named: {said}"
        return None
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return "it was taken"
