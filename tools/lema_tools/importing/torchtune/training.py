"""The model, what trains, the optimizer, the batches and the loss of torchtune's runs."""

from lema.errors import ConfigError
from lema_tools.importing.ledger import Ledger
from lema_tools.importing.torchtune.components import component_of
from lema_tools.importing.torchtune.templates import FAMILIES, chat_template

__all__ = ["batches", "loss", "model", "optimizer", "tokenizer"]

MODULES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "output_proj": "o_proj"}
"""torchtune's names of attention's modules by those of `transformers`."""

MLP = ("gate_proj", "up_proj", "down_proj")
FUSED = ("phi3", "phi4")
"""Families whose modules `transformers` has fused, where torchtune adapts the parts."""

POSITIONS = {
    "llama2": 4096,
    "llama3": 8192,
    "llama3_1": 131072,
    "llama3_2": 131072,
    "llama3_3": 131072,
    "mistral": 32768,
    "gemma": 8192,
    "gemma2": 8192,
    "qwen2": 32768,
    "qwen2_5": 32768,
    "qwen3": 40960,
    "phi3": 4096,
    "phi4": 16384,
}
"""The longest row of each family, by its builders, where the file does not limit rows."""

SHORT = 4096  # tokens, of a family that is not known
TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
OPTIMIZERS = {
    "AdamW": "adamw_torch",
    "PagedAdamW": "paged_adamw_32bit",
    "PagedAdamW8bit": "paged_adamw_8bit",
    "AdamW8bit": "adamw_8bit",
    "SGD": "sgd",
    "Adagrad": "adagrad",
    "RMSprop": "rmsprop",
}
LOSSES = ("LinearCrossEntropyLoss", "CEWithChunkedOutputLoss", "CrossEntropyLoss")


def model(ledger: Ledger) -> None:
    """Translate which model it is, its type, and what of it trains."""
    folder = ledger["checkpointer.checkpoint_dir"]
    if not folder:
        how = "name the model's directory"
        raise ConfigError("the run has no model", where="checkpointer.checkpoint_dir", how=how)
    ledger.carry("checkpointer.checkpoint_dir", "model_name_or_path", str(folder).rstrip("/"))
    if component_of(ledger.values, "checkpointer") == "FullModelMetaCheckpointer":
        what = "LEMA reads models in the format of `transformers`: name such a directory"
        ledger.lost("checkpointer._component_", what)
    name = component_of(ledger.values, "model")
    adapts = name.startswith(("lora_", "qlora_"))
    ledger.same("model._component_", "trains: full" if not adapts else "an adapter")
    ledger.carry("compile", "torch_compile", bool(ledger["compile"]))
    _type(ledger)
    if adapts:
        _lora(ledger, name)
    else:
        ledger.put(trains="full")
    for key in ledger.written:
        if key.startswith("model.") and key not in ledger.settled():
            what = "LEMA takes the model as its config.json describes it: change that"
            ledger.lost(key, what, changes_numbers=key != "model.max_seq_len")


def _type(ledger: Ledger) -> None:
    kind = ledger["dtype"]
    if kind not in TYPES:
        raise ConfigError(f"torchtune has no dtype {kind!r}", where="dtype", how="use bf16 or fp32")
    ledger.put(dtype=TYPES[kind], compute_dtype="weights")
    what = "what trains and its moments have this type in torchtune, too, and float32 in LEMA"
    if kind == "fp32":
        ledger.translation.same["dtype"] = "dtype: float32"
    else:
        ledger.differs("dtype", f"dtype: {TYPES[kind]}; {what}")


def _lora(ledger: Ledger, name: str) -> None:
    for key, setting in {
        "lora_rank": "lora_rank",
        "lora_alpha": "lora_alpha",
        "lora_dropout": "lora_dropout",
        "use_dora": "lora_use_dora",
    }.items():
        ledger.carry(f"model.{key}", setting)
    parts = list(ledger["model.lora_attn_modules"] or [])
    unknown = [part for part in parts if part not in MODULES]
    if unknown:
        what = f"torchtune has no module {unknown[0]!r} of attention"
        raise ConfigError(what, where="model.lora_attn_modules", how=f"use {', '.join(MODULES)}")
    targets = [MODULES[part] for part in parts]
    targets += MLP if ledger["model.apply_lora_to_mlp"] else ()
    targets += ["lm_head"] if ledger["model.apply_lora_to_output"] else []
    ledger.put(lora_target_modules=targets, lora_target_parameters=[], lora_init=True)
    family = _family(ledger)
    if family in FUSED:
        what = f"{family} has fused modules in `transformers`, and LEMA adapts these as a whole"
        ledger.put(lora_target_modules=None)
        ledger.lost("model.lora_attn_modules", what)
    else:
        text = f"lora_target_modules: {targets}"
        ledger.translation.same["model.lora_attn_modules"] = text
    ledger.same("model.apply_lora_to_mlp", "in lora_target_modules")
    ledger.same("model.apply_lora_to_output", "in lora_target_modules")
    if name.startswith("qlora_") or ledger["model.quantize_base"]:
        ledger.put(quantize_base="nf4")
        what = (
            "quantize_base: nf4; both quantise the scales of blocks, too, torchtune to torchao's "
            "int8, and LEMA as bitsandbytes does"
        )
        ledger.differs("model.quantize_base", what)
    else:
        ledger.carry("model.quantize_base", "quantize_base", None)


def _family(ledger: Ledger) -> str:
    """The family of models that a builder belongs to."""
    return str(ledger["model._component_"]).rpartition(".")[0].rpartition(".")[2]


def tokenizer(ledger: Ledger) -> None:
    """Translate the tokenizer's length, and what it writes around messages."""
    name = component_of(ledger.values, "tokenizer")
    length = ledger["tokenizer.max_seq_len"]
    positions = ledger.model_config.get("max_position_embeddings")
    longest = positions or POSITIONS.get(_family(ledger), SHORT)
    cut = min(length or longest, longest)
    ledger.put(max_length=cut, overlong="error")
    what = (
        "torchtune makes the last token that it keeps of a longer row its end"
        if length
        else "torchtune has no limit, and the model no more positions"
    )
    how = "LEMA refuses such a row before the first step: overlong: truncate cuts it"
    ledger.differs(
        "tokenizer.max_seq_len",
        f"max_length: {cut}, overlong: error; {what}. {how}",
        changes_numbers=False,
    )
    own = ledger["tokenizer.prompt_template"]
    if name not in FAMILIES:
        ledger.put(chat_template=None)
        what = f"LEMA does not know what {name} writes; it takes the tokenizer's chat template"
        ledger.lost("tokenizer._component_", what)
    else:
        family = FAMILIES[name]
        ledger.put(chat_template=chat_template(family))
        if family.in_pieces:
            what = (
                "chat_template: the same text; torchtune encodes it piece by piece, which may give "
                "other tokens where pieces meet"
            )
            ledger.differs("tokenizer._component_", what)
        else:
            ledger.same("tokenizer._component_", "chat_template: its text and masks")
    templates = [key for key in ledger.written if key.startswith("tokenizer.prompt_template")]
    for key in templates:
        if own is None and key == "tokenizer.prompt_template":
            ledger.same(key, "none")
        else:
            ledger.lost(key, "LEMA writes what the tokenizer writes by default: give chat_template")
    for key in ("path", "merges_file", "vocab_path", "merges_path", "special_tokens_path"):
        ledger.same(f"tokenizer.{key}", "LEMA reads the tokenizer in the model's directory")


def optimizer(ledger: Ledger) -> None:
    """Translate the optimizer, its learning rate and its schedule."""
    name = component_of(ledger.values, "optimizer")
    if name in OPTIMIZERS:
        ledger.put(optim=OPTIMIZERS[name])
        ledger.same("optimizer._component_", f"optim: {OPTIMIZERS[name]}")
    else:
        ledger.put(optim="adamw_torch")
        ledger.lost("optimizer._component_", f"LEMA has no {name}; adamw_torch is used instead")
    if ledger["optimizer.fused"] and name == "AdamW":
        ledger.carry("optimizer.fused", "optim", "adamw_torch_fused")
    else:
        ledger.same("optimizer.fused", "no")
    if ledger["optimizer.lr"] is None:
        how = "set it"
        raise ConfigError("the optimizer has no learning rate", where="optimizer.lr", how=how)
    ledger.carry("optimizer.lr", "learning_rate", ledger.number("optimizer.lr"))
    decay = ledger.number("optimizer.weight_decay")
    if name in ("SGD", "Adagrad", "RMSprop") and "optimizer.weight_decay" not in ledger.written:
        decay = 0.0
    ledger.carry("optimizer.weight_decay", "weight_decay", decay)
    first, second = ledger["optimizer.betas"]
    ledger.put(adam_beta1=float(first), adam_beta2=float(second))
    ledger.same("optimizer.betas", f"adam_beta1: {first}, adam_beta2: {second}")
    ledger.carry("optimizer.eps", "adam_epsilon", ledger.number("optimizer.eps"))
    norm = ledger["clip_grad_norm"]
    value = None if norm is None else ledger.number("clip_grad_norm")
    ledger.carry("clip_grad_norm", "max_grad_norm", value)
    _schedule(ledger)
    ledger.same(
        "optimizer_in_bwd", "LEMA decides when a layer is updated; the numbers are the same"
    )
    for key in ledger.written:
        if key.startswith("optimizer.") and key not in ledger.settled():
            ledger.lost(key, "LEMA's optimizers have no such argument")


def _schedule(ledger: Ledger) -> None:
    name = component_of(ledger.values, "lr_scheduler")
    warmup = int(ledger["lr_scheduler.num_warmup_steps"] or 0)
    ledger.put(warmup_ratio=0.0, warmup_steps=warmup, lr_scheduler_kwargs=None)
    if not name:
        ledger.put(lr_scheduler_type="constant")
        return
    if name != "get_cosine_schedule_with_warmup":
        ledger.put(lr_scheduler_type="constant")
        ledger.lost("lr_scheduler._component_", f"LEMA has no {name}; the rate is constant")
    else:
        ledger.carry("lr_scheduler._component_", "lr_scheduler_type", "cosine")
    cycles = ledger.number("lr_scheduler.num_cycles")
    if cycles != 0.5:
        ledger.put(lr_scheduler_kwargs={"num_cycles": cycles})
    ledger.same("lr_scheduler.num_cycles", "lr_scheduler_kwargs")
    ledger.same("lr_scheduler.num_warmup_steps", f"warmup_steps: {warmup}")


def batches(ledger: Ledger) -> None:
    """Translate how many rows a step has, how long the run is, and in which order rows come."""
    ledger.carry("batch_size", "batch_size", int(ledger["batch_size"]))
    accumulation = int(ledger["gradient_accumulation_steps"])
    ledger.carry("gradient_accumulation_steps", "gradient_accumulation_steps", accumulation)
    epochs = int(ledger["epochs"])
    ledger.carry("epochs", "num_train_epochs", float(epochs))
    most = ledger["max_steps_per_epoch"]
    ledger.carry("max_steps_per_epoch", "max_steps", None if most is None else int(most) * epochs)
    if most is not None and epochs > 1:
        del ledger.translation.same["max_steps_per_epoch"]
        what = (
            f"max_steps: {int(most) * epochs}; torchtune begins each epoch with the first rows of "
            "a new order, and LEMA goes on with the others"
        )
        ledger.differs("max_steps_per_epoch", what)
    elif most is not None:
        ledger.translation.same["max_steps_per_epoch"] += " (if the data have as many)"
    else:
        del ledger.translation.same["epochs"]
        what = (
            f"num_train_epochs: {epochs}; torchtune leaves out what fills no whole step at the end "
            "of an epoch, so it may have fewer steps and another schedule: with "
            "max_steps_per_epoch and one epoch the steps are the same"
        )
        ledger.differs("epochs", what)
    _order(ledger)
    _packing(ledger)


def _order(ledger: Ledger) -> None:
    seed = ledger["seed"]
    shuffles = bool(ledger["shuffle"])
    ledger.put(shuffle=shuffles, micro_batch_size=None, group_by_length=False)
    if seed is None:
        ledger.same("shuffle", f"shuffle: {shuffles}")
        ledger.same("seed", "torchtune takes another one in each run; LEMA has its default, 42")
        return
    ledger.carry("seed", "seed", int(seed))
    if shuffles:
        ledger.differs("shuffle", "shuffle: true, in another order than torchtune's of this seed")
    else:
        ledger.same("shuffle", "shuffle: false")


def _packing(ledger: Ledger) -> None:
    """Carry packing, which each data set of a list is told for itself.

    Raises:
        ConfigError: some of them are packed, which torchtune refuses, too.
    """
    several = ledger["dataset"] if isinstance(ledger["dataset"], list) else []
    packs = [bool(entry.get("packed")) for entry in several]
    if any(packs) and not all(packs):
        what = "torchtune packs all data sets of a list, or none"
        raise ConfigError(what, where="dataset", how="write the same packed in each")
    packed = all(packs) if packs else bool(ledger["dataset.packed"])
    ledger.put(packing=packed)
    if packed:
        key = "dataset" if packs else "dataset.packed"
        ledger.translation.same.pop(key, None)
        ledger.differs(key, "packing: true, which fills packs with other rows")


def loss(ledger: Ledger) -> None:
    """Translate the loss.

    Raises:
        ConfigError: it is one for which LEMA has no objective.
    """
    name = component_of(ledger.values, "loss")
    if name in LOSSES or not name:
        ledger.put(objective="sft", loss_type="nll")
        ledger.same("loss._component_", "objective: sft")
    elif name in ("DPOLoss", "RSOLoss"):
        kind, key = ("sigmoid", "beta") if name == "DPOLoss" else ("hinge", "gamma")
        ledger.put(objective="dpo", loss_type=kind, reference="base")
        ledger.same("loss._component_", f"objective: dpo, loss_type: {kind}")
        ledger.carry(f"loss.{key}", "beta", ledger.number(f"loss.{key}"))
        if ledger.number("loss.label_smoothing") and name == "DPOLoss":
            ledger.lost(
                "loss.label_smoothing", "LEMA's sigmoid loss takes pairs as they are ordered"
            )
        else:
            ledger.same("loss.label_smoothing", "none")
    else:
        what = f"LEMA has no objective for {name}"
        raise ConfigError(what, where="loss._component_", how="see docs/objectives.md")
