"""torchtune as a source of runs: which are its, and what they are as settings of LEMA."""

from collections.abc import Mapping
from dataclasses import dataclass

from lema.errors import ConfigError
from lema_tools.importing.full import full_run
from lema_tools.importing.ledger import Ledger
from lema_tools.importing.torchtune.components import component_of, flat_keys
from lema_tools.importing.torchtune.sources import sources
from lema_tools.importing.torchtune.training import batches, loss, model, optimizer, tokenizer
from lema_tools.importing.translation import DefaultsTable, ForeignRun, Translation
from lema_tools.importing.warmup import broken_off

__all__ = ["DEFAULTS", "PEER", "Torchtune"]

DEFAULTS = DefaultsTable("torchtune")
PARTS = (model, tokenizer, sources, optimizer, batches, loss)

_STREAMS = "LEMA streams layers, and decides by the memory how they are computed"
_PROCESSES = "LEMA has its own exchange between processes"
_LOGS = "LEMA writes each step to metrics.jsonl"
SILENT: Mapping[str, str] = {
    "ac_mode": _STREAMS,
    "ac_option": _STREAMS,
    "enable_activation_checkpointing": _STREAMS,
    "enable_activation_offloading": _STREAMS,
    "activation_offloading_use_streams": _STREAMS,
    "low_cpu_ram": _STREAMS,
    "memory_efficient_fsdp_wrap": _PROCESSES,
    "fsdp": _PROCESSES,
    "fsdp_cpu_offload": _PROCESSES,
    "fsdp_reshard_after_forward": _PROCESSES,
    "custom_sharded_layers": _PROCESSES,
    "data_parallel_replicate_dim": _PROCESSES,
    "data_parallel_shard_dim": _PROCESSES,
    "context_parallel_dim": _PROCESSES,
    "tensor_parallel_dim": _PROCESSES,
    "tensor_parallel_plan": _PROCESSES,
    "use_distributed_state_dict": _PROCESSES,
    "distributed": _PROCESSES,
    "use_flex": "LEMA computes attention with `transformers`",
    "log_peak_memory_stats": _LOGS,
    "log_level": _LOGS,
    "metric_logger": f"{_LOGS}; report_to names trackers",
    "debug_logging_enabled": _LOGS,
    "debug_num_samples_per_step": _LOGS,
    "profiler": "lema profile and lema trace look into a step",
    "checkpointer": "LEMA reads all weights of the directory, and writes PEFT's format",
    "ref_checkpointer": "LEMA's reference is the model itself without adapters",
    "base_model_path": "named by other keys",
    "name": "named by other keys",
    "device": "LEMA takes the first device that can run; --device names one",
    "save_adapter_weights_only": "LEMA writes adapters alone; `lema merge` writes models",
    "enable_async_checkpointing": "LEMA's checkpoints hold all that a run resumes from",
    "save_every_n_epochs": "LEMA writes checkpoints every save_steps steps",
    "keep_last_n_checkpoints": "LEMA keeps save_total_limit checkpoints",
    "collate_fn": "LEMA pads rows of a batch to the longest",
    "dataloader": "LEMA tokenises rows once, before the first step",
    "batch_size_val": "LEMA evaluates every row with the memory of training",
    "log_every_n_steps": _LOGS,
    "tokenizer": "LEMA reads the tokenizer in the model's directory",
}
"""The first parts of keys that change no number, each with what LEMA does in their place."""

REFUSED = {
    "kd_loss": ("torchtune's distillation from a teacher", "see docs/objectives.md"),
    "teacher_model": ("torchtune's distillation from a teacher", "see docs/objectives.md"),
    "ppo_epochs": ("torchtune's training with rewards", "use TRL: docs/trainers.md"),
    "grpo_samples": ("torchtune's training with rewards", "use TRL: docs/trainers.md"),
    "reward_checkpointer": ("torchtune's training with rewards", "use TRL: docs/trainers.md"),
    "inference": ("torchtune's training with rewards", "use TRL: docs/trainers.md"),
    "quantizer": ("torchtune's quantisation-aware training", "see quantize_base"),
    "prompt": ("writing of answers, which trains nothing", "use lema generate or lema chat"),
    "tasks": ("an evaluation by tasks, which trains nothing", "use lema eval"),
}
"""The first parts of keys of recipes that have no counterpart."""

MULTIMODAL = ("encoder_trainable", "decoder_trainable", "fusion_trainable", "image_size")


@dataclass(frozen=True)
class Torchtune:
    """The recipes of torchtune that fine-tune with SFT or DPO."""

    name: str = "torchtune"

    def recognises(self, run: ForeignRun) -> bool:
        """Whether a run has components or is a command line of torchtune's."""
        components = any(
            isinstance(value, Mapping) and "_component_" in value for value in run.values.values()
        )
        return components or tuple(run.words[:2]) == ("tune", "run")

    def keys(self) -> frozenset[str]:
        """Return the keys at the top of its recipes' files."""
        return frozenset(key.partition(".")[0] for key in DEFAULTS.contents["recipe_keys"])

    def origin(self) -> str:
        """Return the version whose defaults were used."""
        return DEFAULTS.origin

    def translate(self, run: ForeignRun) -> Translation:
        """Return the run as settings of LEMA.

        Raises:
            ConfigError: the recipe has no counterpart, or a value is wrong for torchtune.
        """
        values = flat_keys({key: value for key, value in run.values.items() if key not in LAUNCHER})
        _check_recipe(run, values)
        defaults = DEFAULTS.of("all")
        known = {**defaults, **values, "model_name_or_path": _model_of(values)}
        ledger = Ledger(known, frozenset(values), defaults, run.directory)
        for part in PARTS:
            part(ledger)
        _results(ledger)
        broken_off(ledger, "lr_scheduler.num_warmup_steps")
        full_run(ledger, f"optimizer.{'fused' if ledger['optimizer.fused'] else '_component_'}")
        _launched(run, ledger)
        _others(ledger)
        return ledger.translation


PEER = Torchtune()

LAUNCHER = ("nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint", "standalone")


def _model_of(values: Mapping[str, object]) -> object:
    return values.get("checkpointer.checkpoint_dir")


def _check_recipe(run: ForeignRun, values: Mapping[str, object]) -> None:
    """Refuse recipes without a counterpart."""
    words = " ".join(run.words)
    for key, value in values.items():
        part = key.partition(".")[0]
        if part in REFUSED and value is not None:
            what, how = REFUSED[part]
            raise ConfigError(f"`lema train` has nothing for {what}", where=key, how=how)
        if part == "model" and key.rpartition(".")[2] in MULTIMODAL:
            what = "`lema train` trains on text, and this model reads images"
            raise ConfigError(what, where=key, how="name a model of text")
    if not component_of(values, "optimizer"):
        what = "the file has no optimizer, so it trains nothing"
        where = words or "optimizer"
        raise ConfigError(what, where=where, how="give the file of a recipe that fine-tunes")


def _results(ledger: Ledger) -> None:
    if ledger["output_dir"]:
        ledger.carry("output_dir", "output_dir")
    if ledger["resume_from_checkpoint"]:
        what = "LEMA resumes its own checkpoints with --resume, none of torchtune's"
        ledger.lost("resume_from_checkpoint", what)
    else:
        ledger.same("resume_from_checkpoint", "no")
    if ledger["checkpointer.adapter_checkpoint"]:
        what = "LEMA continues with adapters in PEFT's format: name one (adapter_name_or_path)"
        ledger.lost("checkpointer.adapter_checkpoint", what)
    steps = ledger["save_every_n_steps"]
    if steps:
        ledger.carry("save_every_n_steps", "save_steps", int(steps))
    every = ledger["run_val_every_n_steps"]
    if every:
        ledger.carry("run_val_every_n_steps", "eval_steps", int(every))
    else:
        ledger.same("run_val_every_n_steps", "no evaluation between steps")
        if ledger.translation.settings.pop("eval_data", None) is not None:
            ledger.same("dataset_val._component_", "torchtune evaluates only if it is told when")
    reference = ledger["ref_checkpointer.checkpoint_dir"]
    if (
        reference
        and str(reference).rstrip("/") != ledger.translation.settings["model_name_or_path"]
    ):
        what = "LEMA's reference is the model itself without adapters"
        ledger.lost("ref_checkpointer.checkpoint_dir", what)
    if ledger.translation.settings["objective"] == "dpo":
        if ledger.translation.settings.pop("trains", None):
            what = "LEMA trains all weights with objective: sft alone; here it trains an adapter"
            ledger.translation.same.pop("model._component_", None)
            ledger.lost("model._component_", what)
        elif ledger["model.lora_dropout"]:
            ledger.put(lora_dropout=0.0)
            ledger.translation.same.pop("model.lora_dropout", None)
            ledger.lost("model.lora_dropout", "preference runs have no dropout in LEMA")


def _launched(run: ForeignRun, ledger: Ledger) -> None:
    """Note that several processes each take `batch_size` rows, but for those that share them."""
    processes = _count(run, "nproc_per_node") * _count(run, "nnodes")
    sharing = _degree(ledger, "tensor_parallel_dim") * _degree(ledger, "context_parallel_dim")
    written = _degree(ledger, "data_parallel_shard_dim")
    written *= _degree(ledger, "data_parallel_replicate_dim")
    key = "nproc_per_node" if processes > 1 else "data_parallel_shard_dim"
    readers = processes // sharing if processes > 1 else written
    if readers <= 1:
        return
    rows = int(ledger["batch_size"]) * readers
    ledger.put(batch_size=rows, micro_batch_size=int(ledger["batch_size"]))
    what = f"batch_size: {rows}, the rows of all {readers} processes that read rows of their own"
    ledger.differs(key, what, changes_numbers=False)


def _count(run: ForeignRun, key: str) -> int:
    """Return a number of the launcher, after which the recipe may come as a further word."""
    value = run.values.get(key) or 1
    text = str(value[0] if isinstance(value, list) else value).rpartition(":")[2]
    if not text.isdecimal():
        what = f"the number of processes is not said by {text}"
        raise ConfigError(what, where=key, how="write a number")
    return int(text)


def _degree(ledger: Ledger, key: str) -> int:
    """Return into how many parts a dimension of the processes is cut; -1, the rest, is none."""
    return max(1, int(ledger[key] or 1))


def _others(ledger: Ledger) -> None:
    """Note keys that no part has settled: those that change no number, once for all keys of a
    component, and unknown ones.
    """
    silent = set[str]()
    for key in sorted(ledger.written - ledger.settled()):
        part = key.partition(".")[0]
        if part in SILENT:
            silent.add(part)
        elif ledger[key] in (None, False) or ledger.is_default(key):
            ledger.same(key, "none there, none here")
        else:
            ledger.lost(key, "LEMA has nothing that stands for it")
    for part in sorted(silent):
        ledger.lost(part, SILENT[part], changes_numbers=False)
