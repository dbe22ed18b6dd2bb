"""Keys of axolotl that change no number of a run, and why LEMA does not need them."""

__all__ = ["SILENT", "SILENT_PREFIXES"]

_WORDS = {
    "LEMA streams layers, so it needs no other way to share or save memory": (
        "deepspeed deepcompile fsdp fsdp_config fsdp_version fsdp_final_state_dict_type "
        "dp_shard_size dp_replicate_size sequence_parallel_degree context_parallel_size "
        "heads_k_stride ring_attn_func tensor_parallel_size expert_parallel_size device "
        "device_map world_size local_rank ddp ddp_timeout ddp_bucket_cap_mb "
        "ddp_broadcast_buffers ddp_find_unused_parameters use_ray ray_run_name "
        "ray_num_workers resources_per_worker max_memory gpu_memory_limit low_cpu_mem_usage "
        "lora_on_cpu qlora_sharded_model_loading gc_steps gc_collect_steps "
        "torch_empty_cache_steps gradient_checkpointing gradient_checkpointing_kwargs "
        "selective_checkpointing activation_offloading layer_offloading "
        "experimental_skip_move_to_device"
    ),
    "mlp_tile_tokens runs MLPs in tiles, where a step does not fit otherwise": (
        "tiled_mlp tiled_mlp_num_shards tiled_mlp_use_original_mlp"
    ),
    "it chooses kernels, which change results by rounding alone": (
        "attn_implementation xformers_attention sdp_attention flex_attention "
        "flex_attn_compile_kwargs flash_attention flash_attn_cross_entropy "
        "flash_attn_fuse_mlp flash_optimum sage_attention eager_attention sdpa_varlen "
        "gemma4_hybrid_attn_impl large_head_attention flash_attn_d512 fused_attn_kernel "
        "experts_implementation use_kernels lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
        "lora_embedding_kernel chunked_cross_entropy chunked_cross_entropy_num_chunks "
        "cut_cross_entropy use_scattermoe use_sonicmoe torch_compile_backend "
        "torch_compile_mode torch_compile_options dpo_use_liger_kernel dpo_padding_free "
        "precompute_ref_log_probs pad_to_sequence_len pad_to_multiple_of batch_flattening"
    ),
    "it is about preparing and loading rows, which gives the same rows": (
        "dataset_prepared_path dataset_processes dataset_num_proc dataset_keep_in_memory "
        "num_dataset_shards_to_save push_dataset_to_hub hf_use_auth_token skip_prepare_dataset "
        "dataloader_pin_memory dataloader_num_workers dataloader_prefetch_factor "
        "remove_unused_columns is_preprocess preprocess_iterable total_num_tokens "
        "total_supervised_tokens sample_packing_eff_est sample_packing_mp_start_method "
        "sample_packing_group_size sample_packing_bin_size eval_sample_packing "
        "streaming_multipack_buffer_size strict debug"
    ),
    "it is about files and reports": (
        "save_only_model save_safetensors save_first_step hub_strategy "
        "hub_revision tokenizer_save_jinja_files profiler_steps profiler_steps_start "
        "include_tokens_per_second include_tkps axolotl_config_path dynamic_checkpoint "
        "generate_samples num_generation_samples generation_max_new_tokens "
        "generation_temperature generation_top_p generation_top_k generation_prompt_ratio "
        "generation_do_sample do_causal_lm_eval eval_causal_lm_metrics do_bench_eval "
        "bench_dataset bench_split eval_table_size eval_max_new_tokens eval_batch_size "
        "auto_resume_from_checkpoints"
    ),
    "transformers chooses the class by the model's config": (
        "type_of_model model_type tokenizer_type tokenizer_use_fast tokenizer_legacy "
        "base_model_config base_model_ignore_patterns is_falcon_derived_model "
        "is_llama_derived_model is_mistral_derived_model is_qwen_derived_model"
    ),
    "axolotl no longer reads it": (
        "dpo_beta max_packed_sequence_len gptq_groupsize gptq_model_v1 gptq_disable_exllama"
    ),
    "`lema merge ADAPTER OUT` merges an adapter": "merge_lora merge_method",
    "it ends runs whose loss is high; LEMA ends those that learn nothing (stop_when_dead)": (
        "loss_watchdog_threshold loss_watchdog_patience"
    ),
    "it loads code with a model; LEMA reads the classes that transformers has": (
        "trust_remote_code"
    ),
}

SILENT = {key: why for why, keys in _WORDS.items() for key in keys.split()}
"""Why each key has no effect on numbers."""

SILENT_PREFIXES = (
    "wandb_",
    "use_wandb",
    "mlflow_",
    "use_mlflow",
    "hf_mlflow_",
    "comet_",
    "use_comet",
    "trackio_",
    "use_trackio",
    "swanlab_",
    "use_swanlab",
    "otel_",
    "use_otel",
    "gradio_",
    "liger_",
    "torchdistx_",
    "vllm",
)
"""How keys of reports, demos and kernels begin."""
