"""LLaMA-Factory as a source of runs: which are its, and what they are as settings of LEMA."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from math import prod
from typing import Any

from lema.errors import ConfigError
from lema_tools.importing.full import full_run
from lema_tools.importing.launch import KEYS as LAUNCHER_KEYS
from lema_tools.importing.ledger import Ledger
from lema_tools.importing.llamafactory.adapter import adapter, names_of
from lema_tools.importing.llamafactory.model import model
from lema_tools.importing.llamafactory.objective import objective
from lema_tools.importing.llamafactory.optimizer import batches, optimizer
from lema_tools.importing.llamafactory.results import results
from lema_tools.importing.llamafactory.rows import rows
from lema_tools.importing.llamafactory.silent import SILENT
from lema_tools.importing.llamafactory.sources import sources
from lema_tools.importing.translation import DefaultsTable, ForeignRun, Translation
from lema_tools.importing.warmup import broken_off

__all__ = ["DEFAULTS", "PEER", "LlamaFactory"]

DEFAULTS = DefaultsTable("llamafactory")

PROGRAMS = ("llamafactory-cli", "lmf", "llamafactory")
VERBS = ("train", "export", "chat", "eval", "api", "webchat", "webui", "version", "env")
BACKENDS = {
    "use_kt": "KTransformers",
    "use_mca": "Megatron Core",
    "use_megatron_bridge": "Megatron Bridge",
    "use_hyper_parallel": "HyperParallel",
    "fp8": "products in 8 bits",
}
"""Keys that turn on another way of computing, each with keys of its own."""

OF_LAUNCHERS = LAUNCHER_KEYS | {
    *("nproc_per_node", "nnodes", "node_rank", "rdzv_backend", "rdzv_endpoint", "standalone"),
    *("FORCE_TORCHRUN", "NPROC_PER_NODE", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "RDZV_ID", "MAX_RESTARTS"),
}
"""Options of torchrun and accelerate, and variables before the command, which are no keys."""
OF_BACKENDS = ("kt_", "hyper_parallel_", "fp8_")


@dataclass(frozen=True)
class LlamaFactory:
    """The runs of `llamafactory-cli train`."""

    name: str = "LLaMA-Factory"

    def recognises(self, run: ForeignRun) -> bool:
        """Whether the words of a run are those of this trainer's command line."""
        return any(word.rpartition("/")[2] in PROGRAMS for word in run.words)

    def keys(self) -> frozenset[str]:
        """Return the keys of its files."""
        return DEFAULTS.keys

    def origin(self) -> str:
        """Return the version whose defaults were used."""
        return DEFAULTS.origin

    def translate(self, run: ForeignRun) -> Translation:
        """Return the run as settings of LEMA.

        Raises:
            ConfigError: the run trains nothing, or a key or value is wrong for LLaMA-Factory.
        """
        ledger = _opened(run)
        _check_verb(run, ledger)
        model(ledger)
        objective(ledger)
        training = sources(ledger)
        rows(ledger, training)
        batches(ledger)
        optimizer(ledger)
        adapter(ledger)
        results(ledger)
        broken_off(ledger, "warmup_steps")
        full_run(ledger, "optim")
        _backends(ledger)
        _others(ledger)
        return ledger.translation


PEER = LlamaFactory()


def _opened(run: ForeignRun) -> Ledger:
    """Return the run's values over LLaMA-Factory's defaults.

    Raises:
        ConfigError: a key is none of LLaMA-Factory's, which refuses it, too.
    """
    defaults = DEFAULTS.of("all")
    others = DEFAULTS.of("megatron")
    words = {key: value for key, value in run.values.items() if key in OF_LAUNCHERS}
    values = {key: value for key, value in run.values.items() if key not in words}
    if unknown := [key for key in values if key not in others]:
        key = unknown[0]
        close = get_close_matches(key, defaults, 2)
        how = f"did you mean {' or '.join(close)}?" if close else "leave it out"
        what = f"LLaMA-Factory {DEFAULTS.contents['version']} has no such key, and refuses it"
        raise ConfigError(what, where=key, how=how)
    launched = {key: words.get(key) for key in LAUNCHER_KEYS} | _processes(words)
    return Ledger(
        {**defaults, **values, **launched},
        frozenset(values),
        defaults,
        run.directory,
        run.options,
    )


def _processes(words: Mapping[str, object]) -> dict[str, int]:
    """Return how many processes the variables and options of torchrun ask for, if they do."""
    counts = [
        value if not isinstance(value, list) else value[0]
        for key, value in words.items()
        if key.lower() in ("nproc_per_node", "nnodes")
    ]
    if not counts:
        return {}
    if not all(str(count).isdecimal() for count in counts):
        what = f"the number of processes is not said by {counts[0]}"
        raise ConfigError(what, where="nproc_per_node", how="write a number")
    return {"num_processes": prod(int(str(count)) for count in counts)}


def _check_verb(run: ForeignRun, ledger: Ledger) -> None:
    """Refuse commands and files that do not train, with LEMA's command for them."""
    verbs = [word for word in run.words if word in VERBS]
    verb = verbs[0] if verbs else "train"
    trains = bool(ledger["do_train"])
    adapters = names_of(ledger["adapter_name_or_path"])
    if verb == "export" or (ledger["export_dir"] and not trains):
        out = ledger["export_dir"] or "OUT"
        what = "this file merges an adapter into a model, and trains nothing"
        how = f"run: lema merge {adapters[0]} {out}" if adapters else ""
        if not adapters:
            what = "this file saves a model, and trains nothing"
            how = "use the model's directory; lema prepare quantises, lema merge adds an adapter"
        raise ConfigError(what, where="export_dir", how=how)
    if verb != "train":
        what = f"`llamafactory-cli {verb}` trains nothing"
        how = "use lema chat, lema generate or lema eval with the adapter"
        raise ConfigError(what, where=verb, how=how)
    if not trains and not ledger["dataset"]:
        what = "this file is for writing answers, and trains nothing"
        how = "use lema chat or lema generate with the adapter"
        raise ConfigError(what, where="dataset", how=how)
    if not trains and (ledger["do_eval"] or ledger["do_predict"]):
        what = "this file evaluates, and trains nothing"
        how = "use lema eval, or lema generate --prompts"
        raise ConfigError(what, where="do_train", how=how)
    if not trains:
        what = "LLaMA-Factory trains nothing without do_train: true; LEMA trains with this file"
        ledger.differs("do_train", what, changes_numbers=False)


def _backends(ledger: Ledger) -> None:
    for key, name in BACKENDS.items():
        if ledger[key]:
            what = f"LEMA streams layers instead of {name}"
            ledger.lost(key, what, changes_numbers=key == "fp8")
        else:
            ledger.same(key, "no")
    if ledger["full_determinism"]:
        ledger.carry("full_determinism", "deterministic", True)
    else:
        ledger.same("full_determinism", "no")
    if ledger["freeze_language_model"]:
        ledger.lost("freeze_language_model", "LEMA trains the language model alone")
    else:
        ledger.same("freeze_language_model", "no")


def _others(ledger: Ledger) -> None:
    """Note keys that no part has settled: those that change no number, and the rest."""
    for key in sorted(ledger.written - ledger.settled()):
        if key in SILENT:
            ledger.lost(key, SILENT[key], changes_numbers=False)
        elif key.startswith(OF_BACKENDS) or key not in ledger.defaults:
            ledger.lost(key, "LEMA streams layers", changes_numbers=False)
        elif _empty(ledger[key]) or ledger.is_default(key):
            ledger.same(key, "none there, none here")
        else:
            ledger.lost(key, "LEMA has nothing that stands for it")


def _empty(value: Any) -> bool:
    return value in (None, False, "", [], {})
