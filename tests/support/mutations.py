"""Ways in which a published checkpoint and its `config.json` may be other than those that a test
would make.

A mutation is data: the settings that the model is built with, keys of `config.json` that are
changed or dropped over the weights as they are, what becomes of the stored tensors and of the
files, and what the model is opened with. Which mutations a model type has depends on the fields of
its config, so a new type needs no list of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from asloaded import store, tensors
from formmutations import forms_of
from mutation import Mutation, Tensors, sharded
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tinyconfig import tiny_config
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from lema.model.skeleton import auto_class

__all__ = ["ACCEPTED", "REFUSED", "TYPES", "mutations_of"]

TYPES = (
    "llama",
    "gemma2",
    "phi3",
    "gpt2",
    "mixtral",
    "mistral",
    "qwen2",
    "qwen3",
    "gpt_neox",
    "opt",
    "olmo2",
)
TYPES += ("cohere", "granite", "gemma3", "qwen3_moe", "starcoder2", "glm4", "bloom")


def _chosen(pattern: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    """Change the tensors whose names have a word; one that starts with "not " is not to be
    there.
    """
    word = pattern.removeprefix("not ")
    wanted = not pattern.startswith("not ")
    return lambda held: {
        name: change(one) if (word in name) is wanted else one for name, one in held.items()
    }


def _without(*words: str) -> Callable[[Tensors], Tensors]:
    return lambda held: {
        name: one for name, one in held.items() if not any(word in name for word in words)
    }


def _renamed(change: Callable[[str], str]) -> Callable[[Tensors], Tensors]:
    return lambda held: {change(name): one for name, one in held.items()}


def _with(
    *made: tuple[str, tuple[int, ...]], dtype: torch.dtype = torch.float32
) -> Callable[[Tensors], Tensors]:
    return lambda held: held | {name: torch.full(shape, 0.5).to(dtype) for name, shape in made}


def _embeddings(held: Tensors) -> str:
    """Return the name of the table of tokens."""
    ends = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
    return next(name for name in held if name.endswith(ends))


def _head(held: Tensors) -> str:
    ends = ("lm_head.weight", "embed_out.weight")
    return next((name for name in held if name.endswith(ends)), "lm_head.weight")


def _head_of_its_own(held: Tensors) -> Tensors:
    return held | {_head(held): held[_embeddings(held)].flip(0).contiguous()}


def _head_like_embeddings(held: Tensors) -> Tensors:
    return held | {_head(held): held[_embeddings(held)].clone()}


def _head_alone(held: Tensors) -> Tensors:
    rest = {name: one for name, one in held.items() if name != _embeddings(held)}
    return rest | {_head(held): held[_embeddings(held)]}


def _longer_embeddings(held: Tensors) -> Tensors:
    name = _embeddings(held)
    return held | {name: torch.cat([held[name], held[name][:3]])}


def _last_layer_again(held: Tensors) -> Tensors:
    """Store one layer more than the config has, as checkpoints with layers for predicting
    further tokens do.
    """
    return held | {
        name.replace(".3.", ".4."): one.clone() for name, one in held.items() if ".3." in name
    }


def _old_norm(name: str) -> str:
    """Return the name of a norm's weight as TensorFlow's checkpoints had it."""
    if "norm" not in name.lower() and "ln_" not in name:
        return name
    stem, _, last = name.rpartition(".")
    return f"{stem}.{ {'weight': 'gamma', 'bias': 'beta'}.get(last, last) }"


def _halves_of_two_kinds(held: Tensors) -> Tensors:
    return _chosen("norm", Tensor.half)(_chosen("not norm", Tensor.bfloat16)(held))


def _beside_old_shards(directory: Path) -> None:
    """Leave a model in one file beside the shards of one with other values, as a second upload
    does.
    """
    held = tensors(directory)
    store(directory, {name: one + 1 for name, one in held.items()})
    sharded({})(directory)
    save_file(held, directory / "model.safetensors", metadata={"format": "pt"})


def _named_otherwise(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "weights.safetensors")


def _pickled(directory: Path) -> None:
    torch.save(tensors(directory), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def _without_metadata(directory: Path) -> None:
    held = tensors(directory)
    save_file(held, directory / "model.safetensors")


def _no_generation(directory: Path) -> None:
    (directory / "generation_config.json").unlink(missing_ok=True)


def _with_adapter(directory: Path) -> None:
    """Leave an adapter in the model's directory, which `from_pretrained` attaches."""
    base = auto_class(AutoConfig.from_pretrained(directory)).from_pretrained(directory)
    get_peft_model(
        base, LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    ).save_pretrained(directory)


def _with_adapter_config(directory: Path) -> None:
    """Leave the config of an adapter there alone."""
    LoraConfig(r=2, target_modules="all-linear").save_pretrained(directory)


def _generation(**settings: Any) -> Callable[[Path], None]:
    return lambda directory: (
        (directory / "generation_config.json").write_text(json.dumps(settings)) and None
    )


ONE: dict[str, Any] = {"lengths": (12,)}  # a single micro-batch

# Fields that every config has, over weights as they are; of those that a call asks for, one value
# each.
COMMON = (
    Mutation("as it is"),
    *(
        Mutation(f"{name}={value!r}", edited={name: value}, top={name: value})
        for name, value in (
            ("return_dict", False),
            ("use_cache", False),
            ("use_cache", True),
            ("output_attentions", True),
            ("output_hidden_states", True),
            ("gradient_checkpointing", True),
            ("torchscript", True),
            ("is_decoder", True),
            ("is_decoder", False),
            ("is_encoder_decoder", True),
            ("tie_encoder_decoder", True),
            ("use_bfloat16", True),
            ("pretraining_tp", 2),
            ("chunk_size_feed_forward", 4),
            ("pruned_heads", {"0": [1]}),
            ("problem_type", "multi_label_classification"),
            ("num_labels", 5),
            ("architectures", None),
            ("architectures", ["NoModelOfThatName"]),
            ("transformers_version", "4.20.0"),
            ("tokenizer_class", "NoTokenizer"),
            ("_name_or_path", "somewhere/else"),
            ("auto_map", {"AutoModelForCausalLM": "modeling_own.OwnModel"}),
            ("_commit_hash", "0" * 40),
            ("a_field_of_nobody", {"nested": [1, None]}),
            ("bos_token_id", None),
            ("eos_token_id", None),
            ("eos_token_id", [2, 5]),
            ("pad_token_id", None),
            ("max_length", 30),
            ("do_sample", True),
            ("repetition_penalty", 1.7),
            ("temperature", 0.3),
            ("num_beams", 2),
            ("attn_implementation", "eager"),
            ("_attn_implementation", "eager"),
            ("_attn_implementation_internal", "eager"),
            ("attn_implementation", "flash_attention_2"),
            ("experts_implementation", "eager"),
            ("fusion_config", {}),
            ("fusion_config", {"patch_embeddings": True}),
            ("fusion_config", {"nothing": True}),
            ("initializer_range", 3.0),
            ("tie_word_embeddings", True),
            ("tie_word_embeddings", False),
        )
    ),
    *(
        Mutation(f"without {name}", dropped=(name,))
        for name in (
            "architectures",
            "transformers_version",
            "tie_word_embeddings",
            "use_cache",
            "bos_token_id",
            "eos_token_id",
            "pad_token_id",
            "model_type",
            "attention_dropout",
            "layer_types",
            "head_dim",
            "num_key_value_heads",
            "rope_parameters",
            "vocab_size",
            "max_position_embeddings",
        )
    ),
    *(
        Mutation(f"opened with {name}", opened={"attn_implementation": name})
        for name in ("eager", "sdpa")
    ),
)

# Settings that the model is built with, where its config has the field.
BUILT: tuple[tuple[str, tuple[Any, ...]], ...] = (
    (
        "hidden_act",
        (
            "silu",
            "gelu",
            "gelu_new",
            "gelu_pytorch_tanh",
            "relu",
            "quick_gelu",
            "tanh",
            "mish",
            "relu2",
        ),
    ),
    ("hidden_activation", ("silu", "gelu", "gelu_pytorch_tanh", "relu")),
    ("activation_function", ("gelu", "gelu_new", "relu", "silu", "tanh")),
    ("vocab_size", (32, 33)),  # 32: as wide as the hidden state
    ("num_key_value_heads", (1, 4)),
    ("head_dim", (16, None)),
    ("sliding_window", (None, 1, 3, 4096)),
    ("max_window_layers", (0, 4)),
    ("layer_types", (["full_attention"] * 4, ["sliding_attention"] * 4)),
    ("final_logit_softcapping", (None, 3.0)),
    ("attn_logit_softcapping", (None, 2.0)),
    ("query_pre_attn_scalar", (3,)),
    ("use_bidirectional_attention", (None, True)),
    ("embedding_multiplier", (2.0,)),
    ("logits_scaling", (3.0,)),
    ("residual_multiplier", (0.5,)),
    ("attention_multiplier", (0.3,)),
    ("logit_scale", (2.0,)),
    ("rms_norm_eps", (0.1,)),
    ("layer_norm_eps", (0.1,)),
    ("layer_norm_epsilon", (0.1,)),
    ("word_embed_proj_dim", (16,)),
    ("num_experts_per_tok", (1, 4)),
    ("num_local_experts", (3,)),
    ("mlp_only_layers", ([0, 2],)),
    ("decoder_sparse_step", (2,)),
    ("router_jitter_noise", (0.1,)),
    ("intermediate_size", (33,)),
    ("tie_word_embeddings", (True, False)),
)
DROPOUTS = (
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "hidden_dropout",
    "dropout",
    "layerdrop",
)
DROPOUTS += ("residual_dropout", "embedding_dropout", "router_jitter_noise")
# What is added or drawn once per micro-batch.
ALONE = frozenset({*DROPOUTS, "output_router_logits"})

STORED = (
    Mutation("without a head", stored=_without("lm_head", "embed_out")),
    Mutation("head of its own", stored=_head_of_its_own),
    Mutation(
        "head of its own, said to be tied",
        stored=_head_of_its_own,
        edited={"tie_word_embeddings": True},
    ),
    Mutation(
        "head of its own, said to be apart",
        stored=_head_of_its_own,
        edited={"tie_word_embeddings": False},
    ),
    Mutation(
        "head of its own, nothing said", stored=_head_of_its_own, dropped=("tie_word_embeddings",)
    ),
    Mutation(
        "head of its own, the whole tied",
        stored=_head_of_its_own,
        top={"tie_word_embeddings": True},
    ),
    Mutation("head like embeddings", stored=_head_like_embeddings),
    Mutation(
        "head like embeddings, tied",
        stored=_head_like_embeddings,
        edited={"tie_word_embeddings": True},
    ),
    Mutation("head alone, tied", stored=_head_alone, edited={"tie_word_embeddings": True}),
    Mutation("head alone, apart", stored=_head_alone, edited={"tie_word_embeddings": False}),
    Mutation("more rows than the vocabulary", stored=_longer_embeddings),
    Mutation("a layer more", stored=_last_layer_again),
    Mutation(
        "keys of nobody", stored=_with(("tower.weight", (3, 3)), ("model.tower.0.bias", (2,)))
    ),
    Mutation(
        "old rotary tables",
        stored=_with(
            *((f"model.layers.{layer}.self_attn.rotary_emb.inv_freq", (4,)) for layer in range(4))
        ),
    ),
    Mutation(
        "old masks", stored=_with(("h.0.attn.bias", (1, 1, 8, 8)), ("h.0.attn.masked_bias", (1,)))
    ),
    Mutation("old positions", stored=_with(("model.position_ids", (1, 8)), dtype=torch.int64)),
    Mutation("without norms", stored=_without("norm", "ln_")),
    Mutation("without a layer", stored=_without(".2.")),
    Mutation("names begin at the base", stored=_renamed(lambda name: name.removeprefix("model."))),
    Mutation("names have a prefix more", stored=_renamed(lambda name: f"model.{name}")),
    Mutation("names of data parallelism", stored=_renamed(lambda name: f"module.{name}")),
    Mutation("old names of norms", stored=_renamed(_old_norm)),
    Mutation("norms in bf16", stored=_chosen("norm", Tensor.bfloat16)),
    Mutation("all in fp16", stored=_chosen("", Tensor.half)),
    Mutation("embeddings in fp64", stored=_chosen("embed", Tensor.double)),
    Mutation(
        "bf16 with fp16",
        stored=lambda held: _chosen("norm", Tensor.half)(
            _chosen("not norm", Tensor.bfloat16)(held)
        ),
    ),
    Mutation("norms of whole numbers", stored=_chosen("norm", Tensor.int)),
    *(
        Mutation(
            f"bf16, {word} in fp32, no dtype",
            stored=_chosen(f"not {word}", Tensor.bfloat16),
            dropped=("dtype",),
            auto=True,
        )
        for word in ("norm", "embed", "head", "layers.0", "layers")
    ),
    Mutation("bf16, no dtype", stored=_chosen("", Tensor.bfloat16), dropped=("dtype",), auto=True),
    *(
        Mutation(f"dtype={name!r}", edited={"dtype": name}, top={"dtype": name}, auto=True)
        for name in ("bfloat16", "float16", "float64", "auto", "float8_e4m3fn", "int8", "nonsense")
    ),
    Mutation("torch_dtype", edited={"torch_dtype": "bfloat16"}, dropped=("dtype",), auto=True),
    Mutation("dtype of the part alone", edited={"dtype": "bfloat16"}, auto=True),
    Mutation("dtype of the whole alone", top={"dtype": "bfloat16"}, auto=True),
)


FILES = (
    Mutation("shards", files=sharded({"total_size": 1})),
    Mutation(
        "shards with a dtype", files=sharded({"dtype": "bfloat16"}), dropped=("dtype",), auto=True
    ),
    Mutation("shards, no dtype", files=sharded({}), dropped=("dtype",), auto=True),
    Mutation("shards without metadata", files=sharded(None)),
    Mutation("old shards beside it", files=_beside_old_shards),
    Mutation(
        "file of another name",
        files=_named_otherwise,
        top={"transformers_weights": "weights.safetensors"},
    ),
    Mutation("file of another name, untold", files=_named_otherwise),
    Mutation("pickled", files=_pickled),
    Mutation("file that says no format", files=_without_metadata),
    Mutation("generation: ends", files=_generation(eos_token_id=[2, 7, 9], pad_token_id=0)),
    Mutation(
        "generation: penalty", files=_generation(repetition_penalty=1.5, no_repeat_ngram_size=2)
    ),
    Mutation("generation: sampling", files=_generation(do_sample=True, temperature=0.2, top_k=3)),
    Mutation("generation: length", files=_generation(max_length=14, max_new_tokens=2)),
    Mutation(
        "generation: suppressed",
        files=_generation(suppress_tokens=[1, 2, 3], bad_words_ids=[[5], [6, 7]]),
    ),
    *(
        Mutation(
            f"generation: none, {name}={value!r} of the model",
            files=_no_generation,
            top={name: value},
        )
        for name, value in (
            ("eos_token_id", [2, 7, 9]),
            ("repetition_penalty", 1.7),
            ("no_repeat_ngram_size", 2),
            ("do_sample", True),
            ("num_beams", 2),
            ("max_length", 14),
            ("suppress_tokens", [1, 2, 3]),
            ("generation_config", {"repetition_penalty": 1.7}),
        )
    ),
    Mutation("an adapter beside it", files=_with_adapter),
    Mutation("an adapter's config beside it", files=_with_adapter_config),
    Mutation(
        "generation: static cache",
        files=_generation(cache_implementation="static"),
        generates=False,
    ),
)


ROPE_LIMIT = 16  # tokens: the original length of rotary tables
ROPES: Mapping[str, Mapping[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": ROPE_LIMIT},
    "yarn, cut": {
        "factor": 4.0,
        "original_max_position_embeddings": ROPE_LIMIT,
        "mscale": 0.7,
        "beta_fast": 8.0,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": ROPE_LIMIT,
    },
    "longrope": {"original_max_position_embeddings": ROPE_LIMIT, "factor": 4.0},
    "proportional": {"partial_rotary_factor": 0.5},
}
# Rows below, at and above the limit, in both orders.
ROPE_ROWS = (
    (ROPE_LIMIT - 1, ROPE_LIMIT + 1),
    (ROPE_LIMIT + 1, ROPE_LIMIT),
    (2 * ROPE_LIMIT + 1, ROPE_LIMIT - 4),
)


def _ropes(text: PreTrainedConfig) -> Iterator[Mutation]:
    """Yield every type of rotary table, with rows around the length from which some of them are
    others.
    """
    usual = getattr(text, "rope_parameters", None)
    if not usual:
        return
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    for name, settings in ROPES.items():
        kind = name.partition(",")[0]

        def changed(
            old: Mapping[str, Any], kind: str = kind, settings: Mapping[str, Any] = settings
        ) -> dict[str, Any]:
            made = {**old, **settings, "rope_type": kind}
            if kind == "longrope":
                pairs = int(width * old.get("partial_rotary_factor", 1.0)) // 2
                made |= {"short_factor": [1.0 + 0.1 * pair for pair in range(pairs)]}
                made |= {"long_factor": [2.0 + pair for pair in range(pairs)]}
            return made

        nested = any(isinstance(one, dict) for one in usual.values())
        tables = {layer: changed(one) for layer, one in usual.items()} if nested else changed(usual)
        built: dict[str, Any] = {"rope_parameters": tables}
        built["max_position_embeddings"] = ROPE_LIMIT if kind == "dynamic" else 4 * ROPE_LIMIT
        if hasattr(text, "original_max_position_embeddings"):
            built["original_max_position_embeddings"] = ROPE_LIMIT
        for lengths in ROPE_ROWS:
            yield Mutation(f"rope {name}, rows of {lengths}", built=built, lengths=lengths)


def mutations_of(model_type: str) -> Iterator[Mutation]:
    """Yield every mutation that a type has: the common ones, and those of the fields of its
    config.
    """
    text = tiny_config(model_type).get_text_config(decoder=True)
    fields = text.to_dict()
    yield from COMMON
    for name, values in BUILT:
        for value in values if name in fields else ():
            if value != fields[name]:
                yield Mutation(
                    f"built: {name}={value!r}",
                    built={name: value},
                    **(ONE if name in ALONE else {}),
                )
    enumerated = {one.name.partition("=")[0] for one in COMMON} | {name for name, _ in BUILT}
    for name, value in fields.items():
        if isinstance(value, bool) and name not in enumerated:
            options = ONE if name in ALONE else {}
            yield Mutation(f"built: {name}={not value!r}", built={name: not value}, **options)
            yield Mutation(f"{name}={not value!r}", edited={name: not value}, **options)
        if name in DROPOUTS:
            yield Mutation(f"built: {name}=0.2", built={name: 0.2}, **ONE)
    yield from STORED
    yield from FILES
    yield from _ropes(text)
    yield from forms_of(model_type)


# What LEMA alone refuses: a pattern of its message, and the sentence of docs/coverage.md that says
# so.
REFUSED = {
    "[0-9] missing:": "A tensor of the model that the checkpoint lacks is an error that names it; "
    "`from_pretrained` "
    "draws random values for it and logs a table.",
    "of a type that the model cannot use": "A weight that is stored as whole numbers is refused; `from_pretrained` "
    "makes fractions of them.",
    "the weights are pickled": "Pickled weights (`pytorch_model.bin`) are refused, because they can run code and "
    "cannot be read in parts.",
    "there is an adapter beside the model": "A directory that holds a model and an adapter is refused; "
    "`from_pretrained` attaches the adapter.",
    "it does not run its layers once each": "`layerdrop`, which leaves out layers at random, is refused.",
}

# What `transformers` alone refuses, likewise.
ACCEPTED = {
    "'tuple' object has no attribute": "`return_dict`, `output_hidden_states` and `output_attentions` in `config.json` "
    "are not followed, which opening the model says: of streamed layers nothing stays but "
    "their result. With "
    "`return_dict: false` most models of `transformers` cannot be run.",
    "KeyError: 'metadata'": "An index of shards may have no `metadata`, which `transformers` asks for.",
    "no file named model.safetensors": "A directory with one safetensors file of any name is opened; `transformers` "
    "wants `model.safetensors`, or the name in `transformers_weights`.",
}
