"""TRL as a source of runs: which are its, and what they are as settings of LEMA."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lema.errors import ConfigError
from lema_tools.importing.full import full_run
from lema_tools.importing.translation import ForeignRun, Translation
from lema_tools.importing.trl.adapter import adapter
from lema_tools.importing.trl.batches import batches, engine
from lema_tools.importing.trl.earlier import earlier
from lema_tools.importing.trl.kind import DEFAULTS, kind_of, words_of_trl
from lema_tools.importing.trl.ledger import Ledger
from lema_tools.importing.trl.objective import objective
from lema_tools.importing.trl.optimizer import optimizer
from lema_tools.importing.trl.precision import model
from lema_tools.importing.trl.results import results
from lema_tools.importing.trl.rows import rows
from lema_tools.importing.trl.silent import SILENT
from lema_tools.importing.trl.sources import sources
from lema_tools.importing.warmup import broken_off

__all__ = ["PEER", "Trl"]

PARTS: tuple[Callable[[Ledger], None], ...] = (
    model,
    sources,
    rows,
    batches,
    optimizer,
    engine,
    adapter,
    objective,
    results,
)
"""What translates a run, one concept after the other."""

BEYOND = {
    "reward": (
        "`lema train` has no loss for a head that scores texts",
        "use TRL's RewardTrainer with a model of lema.streamed(...): docs/trainers.md, Rewards",
    ),
    "grpo": (
        "`lema train` generates no completions to reward",
        "use TRL's GRPOTrainer with a model of lema.streamed(...): docs/trainers.md, GRPO",
    ),
}
"""Kinds of run that are refused: the reason, and the way."""


@dataclass(frozen=True)
class Trl:
    """TRL's scripts `sft`, `dpo` and `kto`."""

    name: str = "TRL"

    def recognises(self, run: ForeignRun) -> bool:
        """Whether the words of a run are those of this trainer's command line."""
        return bool(words_of_trl(run))

    def keys(self) -> frozenset[str]:
        """Return the keys of its files."""
        return DEFAULTS.keys

    def origin(self) -> str:
        """Return the version whose defaults were used."""
        return DEFAULTS.origin

    def translate(self, run: ForeignRun) -> Translation:
        """Return the run as settings of LEMA.

        Raises:
            ConfigError: the kind of run is unclear or none of LEMA's, or a value is wrong.
        """
        kind = kind_of(run)
        if kind in BEYOND:
            what, how = BEYOND[kind]
            raise ConfigError(what, where=f"trl {kind}", how=how)
        defaults = DEFAULTS.of(kind)
        ledger = _opened(run, kind, defaults)
        for part in PARTS:
            part(ledger)
        broken_off(ledger, "warmup_steps")
        full_run(ledger, "optim")
        _silent(ledger)
        earlier(ledger)
        _unknown(ledger)
        return ledger.translation


PEER = Trl()


def _opened(run: ForeignRun, kind: str, defaults: Mapping[str, Any]) -> Ledger:
    """Return the run's values over TRL's defaults."""
    values = dict(_switch(key, value, defaults) for key, value in run.values.items())
    return Ledger(
        {**defaults, **values}, frozenset(values), defaults, run.directory, run.options, kind=kind
    )


def _switch(key: str, value: Any, defaults: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the key that a switch such as `--no_gradient_checkpointing` turns off."""
    name = key.removeprefix("no_")
    if key not in defaults and isinstance(defaults.get(name), bool) and value is True:
        return name, False
    return key, value


def _silent(ledger: Ledger) -> None:
    """Note what the run has of keys that change no number."""
    for key in sorted(ledger.written - ledger.settled()):
        if key in SILENT:
            ledger.lost(key, SILENT[key], changes_numbers=False)


def _unknown(ledger: Ledger) -> None:
    """Note keys that no part has settled: TRL's own with no counterpart, and unknown ones."""
    for key in sorted(ledger.written - ledger.settled()):
        if key in ledger.defaults and ledger.is_default(key):
            ledger.same(key, "none there, none here")
        elif key in ledger.defaults:
            ledger.lost(key, "LEMA has nothing that stands for it")
        else:
            what = f"TRL {DEFAULTS.contents['version']} has no such key, and ignores it"
            ledger.lost(key, what)
