"""axolotl as a source of runs: which are its, and what they are as settings of LEMA."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lema.errors import ConfigError
from lema_tools.importing.axolotl.adapter import adapter
from lema_tools.importing.axolotl.datasets import datasets
from lema_tools.importing.axolotl.model import model
from lema_tools.importing.axolotl.objective import objective
from lema_tools.importing.axolotl.optimizer import batches, optimizer
from lema_tools.importing.axolotl.results import results
from lema_tools.importing.axolotl.silent import SILENT, SILENT_PREFIXES
from lema_tools.importing.full import full_run
from lema_tools.importing.launch import KEYS as LAUNCHER_KEYS
from lema_tools.importing.ledger import Ledger
from lema_tools.importing.translation import DefaultsTable, ForeignRun, Translation
from lema_tools.importing.warmup import broken_off

__all__ = ["DEFAULTS", "PEER", "Axolotl"]

DEFAULTS = DefaultsTable("axolotl")
MODULES = ("axolotl.cli", "scripts/finetune.py")
"""How modules and scripts of axolotl's command line begin."""
EARLIER = {"noisy_embedding_alpha": "neftune_noise_alpha", "evaluation_strategy": "eval_strategy"}
"""Keys that axolotl still reads, by the names that it has for them."""


@dataclass(frozen=True)
class Axolotl:
    """The runs of `axolotl train`."""

    name: str = "axolotl"

    def recognises(self, run: ForeignRun) -> bool:
        """Whether the words of a run are those of this trainer's command line."""
        return any(
            word.rpartition("/")[2] == "axolotl" or word.startswith(MODULES) for word in run.words
        )

    def keys(self) -> frozenset[str]:
        """Return the keys of its files."""
        return DEFAULTS.keys

    def origin(self) -> str:
        """Return the version whose defaults were used."""
        return DEFAULTS.origin

    def translate(self, run: ForeignRun) -> Translation:
        """Return the run as settings of LEMA.

        Raises:
            ConfigError: the run names no model or no data, or a value is wrong for axolotl.
        """
        defaults = DEFAULTS.of("all")
        values = {**run.values, **_renamed(run.values)}
        if not values.get("base_model"):
            raise ConfigError("axolotl's run names no model", where="base_model", how="set it")
        model_keys = {
            "model_name_or_path": values["base_model"],
            "model_revision": values.get("revision_of_model"),
        }  # by which the ledger finds the model's config
        ledger = Ledger(
            {
                **defaults,
                **{key: value for key, value in values.items() if value is not None},
                **model_keys,
            },
            frozenset(values),
            defaults,
            run.directory,
            run.options,
            empty=frozenset(key for key, value in values.items() if value is None),
        )
        for key, name in EARLIER.items():
            ledger.same(key, f"axolotl reads it as {name}")
        model(ledger)
        objective(ledger)
        datasets(ledger)
        optimizer(ledger)
        batches(ledger)
        adapter(ledger)
        results(ledger)
        broken_off(ledger, "warmup_steps")
        full_run(ledger, "optimizer")
        _others(ledger)
        return ledger.translation


PEER = Axolotl()


def _renamed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return today's keys for earlier ones. `ConfigError`: the file has both, with values."""
    renamed = dict[str, Any]()
    for key, name in EARLIER.items():
        if not values.get(key):
            continue
        if values.get(name):
            what = f"axolotl takes {name}, or its earlier name {key}, not both"
            raise ConfigError(what, where=key, how=f"leave {key} out")
        renamed[name] = values[key]
    return renamed


def _others(ledger: Ledger) -> None:
    """Note keys that no part has settled: those that change no number, and the rest."""
    known = frozenset(DEFAULTS.contents["keys"])
    for key in sorted(ledger.written - ledger.settled()):
        value = ledger[key]
        if _empty(value) or (key in ledger.defaults and ledger.is_default(key)):
            ledger.same(key, "none there, none here" if _empty(value) else "axolotl's default")
        elif key in SILENT:
            ledger.lost(key, SILENT[key], changes_numbers=False)
        elif key.startswith(SILENT_PREFIXES):
            what = "it is about reports, kernels or devices, and LEMA streams layers"
            ledger.lost(key, what, changes_numbers=False)
        elif key in LAUNCHER_KEYS:
            what = "LEMA has its own exchange between processes"
            ledger.lost(key, what, changes_numbers=False)
        elif key in known:
            ledger.lost(key, "LEMA has nothing that stands for it")
        else:
            version = DEFAULTS.contents["version"]
            what = f"axolotl {version} has no such key; a plugin or another version may read it"
            ledger.lost(key, what)


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ("", [], {})
