"""A tiny configuration of any model type that `transformers` knows: one general rule, and a
table of exceptions.
"""

from collections.abc import Mapping
from typing import Any

from libraryversions import skip_unknown
from transformers import CONFIG_MAPPING, PreTrainedConfig

__all__ = ["NUM_LAYERS", "tiny_config"]

NUM_LAYERS = 4
VOCABULARY = 96

# What a setting of any of these names is made, wherever a config has it; never more than its
# default.
SIZES: Mapping[str, int] = {
    name: size
    for size, names in (
        (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size shape_vocab_size"),
        (VOCABULARY, "pronunciation_vocab_size encoder_hash_byte_group_vocab"),
        (
            32,
            (
                "hidden_size d_model n_embd embedding_size emb_dim word_embed_proj_dim "
                "hidden_size_global mamba_d_ssm"
            ),
        ),
        (
            32,
            "out_hidden_size text_hidden_size embed_dim patch_embed_hidden_size vision_hidden_size",
        ),
        (32, "projector_hidden_size merged_hidden_size moe_hidden_size downsample_hidden_size"),
        (
            32,
            (
                "projection_dim projection_intermediate_size alignment_intermediate_size "
                "mlp_dim output_dim"
            ),
        ),
        (32, "base_channels latent_channels output_channels latent_query_num nemo_conv_channels"),
        (32, "ext_pw_out_channel depthwise_separable_out_channel num_embeddings"),
        (
            32,
            (
                "input_embedding_size output_embedding_size adapter_in_dim adapter_input_size "
                "adapter_out_dim"
            ),
        ),
        (16, "shape_embed_dim pronunciation_embed_dim rel_extent block_multiple_of hc_lowrank"),
        (2, "encoder_layers num_encoder_layers depth max_window_layers num_kv_shared_layers"),
        (2, "n_layers_per_attn_res_block"),
        (
            4,
            (
                "num_attention_heads n_head n_heads num_heads swa_num_attention_heads "
                "num_attention_heads_per_layer"
            ),
        ),
        (4, "encoder_attention_heads num_encoder_attention_heads attention_heads"),
        (4, "decoder_attention_heads num_decoder_attention_heads"),
        (2, "num_key_value_heads swa_num_key_value_heads kv_n_heads"),
        (
            8,
            (
                "head_dim swa_head_dim dim_head attention_head_size kv_channels "
                "qk_nope_head_dim qk_rope_head_dim"
            ),
        ),
        (8, "v_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim"),
        (8, "query_pre_attn_scalar hidden_size_per_layer_input adapter_rank"),
        (4, "rotary_dim"),
        (
            48,
            (
                "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size dff "
                "dim_ff n_inner d_inner"
            ),
        ),
        (48, "dense_intermediate_size intermediate_size_mlp"),
        (24, "moe_intermediate_size expert_ffn_hidden_size feed_forward_size router_hidden_size"),
        (
            24,
            (
                "shared_intermediate_size shared_expert_intermediate_size "
                "shared_experts_intermediate_size"
            ),
        ),
        (24, "moe_shared_expert_intermediate_size"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
        (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
        (2, "n_shared_experts zero_expert_num n_group num_expert_group"),
        (1, "topk_group first_k_dense_replace num_dense_layers"),
        (16, "kv_lora_rank q_lora_rank o_lora_rank"),
        (2, "linear_num_heads linear_num_key_heads linear_num_value_heads"),
        (
            5,
            "sliding_window sliding_window_size window_size attention_window_size keep_window_size",
        ),
        (5, "local_attention_window_len attention_chunk_size"),
        (4, "attn_layer_period"),
        (2, "attn_layer_offset"),
        (5, "index_topk"),
        (4, "index_block_size indexer_budget block_size"),
        (2, "index_n_heads indexer_n_heads index_topk_blocks indexer_compress_ratio"),
        (1, "indexer_kv_heads"),
        (8, "index_head_dim indexer_head_dim"),
        (64, "max_position_embeddings n_positions n_ctx max_seq_len seq_length model_max_length"),
        (64, "max_target_positions context_length"),
        (8, "mamba_d_state state_size ssm_state_size"),
        (4, "chunk_size mamba_chunk_size mamba_n_heads mamba_num_heads"),
        (3, "local_attn_chunk_length lsh_attn_chunk_length"),
        (16, "mamba_d_head mamba_head_dim"),
        (2, "n_groups mamba_n_groups time_step_rank mamba_dt_rank"),
        (0, "pad_token_id"),
        (1, "bos_token_id decoder_start_token_id"),
        (2, "eos_token_id forced_eos_token_id"),
    )
    for name in names.split()
}

# The number of decoder layers, under all its names.
DEPTHS = frozenset(
    {"num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "layers"}
    | {"decoder_layers", "num_decoder_layers"}
)

# Settings that are None by default and that a type needs nevertheless.
NEEDED = frozenset(
    {
        "head_dim",
        "num_key_value_heads",
        "pad_token_id",
        "num_experts_per_tok",
        "n_routed_experts",
        "n_shared_experts",
    }
    | {name for name in SIZES if name.startswith("indexer_")}
)

# Encoders are causal language models only if told so.
FLAGS: Mapping[str, bool] = {"is_decoder": True, "causal": True, "use_cache": False}

ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = ROPE | {"mrope_section": [2, 1, 1]}
SECTIONED = (
    "glm4v",
    "glm_ocr",
    "hunyuan_vl",
    "paddleocr_vl",
    "qwen2_5_omni",
    "qwen2_5_vl",
    "qwen2_vl",
)

# By model type, also of a part of a model: what the rule gets wrong, or where the default has less
# than real models.
EXCEPTIONS: Mapping[str, Mapping[str, Any]] = {
    **{f"{name}_text": {"rope_parameters": MROPE} for name in SECTIONED},
    "glm4v_moe_text": {"rope_parameters": MROPE | {"mrope_section": [1, 1, 0]}},
    "apertus1p5": {
        "image_token_offset": 40,
        "audio_token_offset": 56,
        "image_token_id": 94,
        "audio_token_id": 95,
    },
    "apertus1p5_vision_tokenizer": {"codebook_size": 16},
    "chameleon": {"vocabulary_map": {"<image>": 9}},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": ROPE | {"mrope_section": [2, 1, 1]},
            "full_attention": ROPE,
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}
    },
    "dots3_note_text": {"head_dim": 20},
    "dots3_note_vision_encoder": {"per_layer_config": {"1": {"num_local_experts": 2}}},
    "deepseek_ocr2_sam_vision_model": {"downsample_channels": [32, 32]},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "electra": {"embedding_size": 16},
    "emu3": {"vocabulary_map": {"<image>": 9, "<|extra_200|>": 10}},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": MROPE | {"mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [24, 16],
    },
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoeshared": {"shared_intermediate_size": 24},
    "inkling2_loop_text": {"loop_layer_index_start": 2, "loop_layer_index_end": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "mistral4": {"qk_rope_head_dim": 4},
    "molmo2_adapter": {"vision_feature_layer": [3, 2]},
    "muse_spark_audio": {"hidden_sizes": [32] * 4, "depths": [1] * 4},
    # published ones have it; the default has not
    "qwen2_5_omni_thinker": {"vision_start_token_id": 151652},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 151652},
    "reformer": {"axial_pos_embds": False},
    "unlimited_ocr_sam_vision_model": {"downsample_channels": [32, 32]},
    "step3p5": {"sliding_window": 5},
    "wavtokenizer_encoder": {"codebook_dim": 32, "codebook_size": 16},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """Return a config of `model_type` with at least four layers, small enough for a test."""
    skip_unknown(model_type, CONFIG_MAPPING)
    kind = CONFIG_MAPPING[model_type]
    return kind(**_settings(kind()))


def _settings(default: PreTrainedConfig) -> dict[str, Any]:
    """Return what to make a config of, or a part of one, given the default one."""
    mapped = set(type(default).attribute_map)
    layers = _layers(default)
    chosen: dict[str, Any] = {}
    for name, value in vars(default).items():
        if name in mapped:
            continue
        if isinstance(value, PreTrainedConfig):
            chosen[name] = _changed(value) | _settings(value) | {"model_type": value.model_type}
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            chosen[name] = (
                # draws come in another order when layers are visited micro-batch by micro-batch
                0.0
            )
        elif isinstance(value, dict) and "mrope_section" in value:
            chosen[name] = value | {"mrope_section": [2, 1, 1]}
        elif name in FLAGS:
            chosen[name] = FLAGS[name]
        elif name in DEPTHS:
            chosen[name] = len(layers)
        elif _per_layer(default, value):
            chosen[name] = [_tiny(name, value[layer]) for layer in layers]
        elif (
            name in SIZES
            and not isinstance(value, list | tuple | dict)
            and (value is not None or name in NEEDED)
        ):
            chosen[name] = _tiny(name, value)
    if vars(default).get("num_key_value_heads", 0) == vars(default).get("num_attention_heads"):
        chosen["num_key_value_heads"] = chosen["num_attention_heads"]
    if default.is_heterogeneous:
        chosen["per_layer_config"] = {
            place: {
                name: chosen[name] * value // vars(default)[name]
                for name, value in _overrides(default, layer).items()
            }
            for place, layer in enumerate(layers)
        }
    return chosen | dict(EXCEPTIONS.get(default.model_type, {}))


def _tiny(name: str, value: Any) -> Any:
    size = SIZES.get(name)
    return value if size is None else size if value is None else min(value, size)


def _depth(default: PreTrainedConfig) -> int:
    return getattr(default, "num_hidden_layers", None) or 0


def _per_layer(default: PreTrainedConfig, value: Any) -> bool:
    """Say whether `value` has an entry for every layer; a list of all layers' numbers has not."""
    depth = _depth(default)
    return (
        isinstance(value, list | tuple)
        and len(value) == depth
        and list(value) != list(range(depth))
    )


def _layers(default: PreTrainedConfig) -> list[int]:
    """Return the layers to keep: the first of every kind in turn, until there are enough."""
    lists = [value for value in vars(default).values() if _per_layer(default, value)]
    kinds: dict[str, int] = {}
    for layer in range(_depth(default)):
        kinds.setdefault(
            repr([value[layer] for value in lists] + list(_overrides(default, layer))), layer
        )
    first = list(kinds.values()) or [0]
    return [first[place % len(first)] for place in range(max(NUM_LAYERS, len(first)))]


def _overrides(default: PreTrainedConfig, layer: int) -> dict[str, int]:
    """Return the settings that this layer has to itself."""
    if not default.is_heterogeneous:
        return {}
    every: dict[int, dict[str, int]] = vars(default)["_heterogeneity_spec"].per_layer_overrides
    return every.get(layer, {})


def _changed(part: PreTrainedConfig) -> dict[str, Any]:
    """Return the settings of a part that the whole gives another default than the part alone
    has.
    """
    alone = vars(type(part)())
    return {
        name: value
        for name, value in vars(part).items()
        if name[0] != "_" and alone.get(name, value) != value
    }
