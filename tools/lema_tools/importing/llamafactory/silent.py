"""LLaMA-Factory's keys that change no number of the training, each with what LEMA does in their
place.
"""

from collections.abc import Mapping

__all__ = ["SILENT"]

_STREAMS = "LEMA streams layers, and decides by the memory how they are computed"
_LOADS = "LEMA tokenises rows once, before the first step, with a process for each core"
_PROCESSES = "LEMA has its own exchange between processes"
_LOGS = "LEMA writes each step to metrics.jsonl, and prints as `lema train --help` says"
_REPORTS = "reports go to report_to; a tracker's own settings are in its environment variables"
_EVALUATES = "LEMA evaluates every row with the memory of training"
_KERNELS = "LEMA computes with the device's kernels (`arithmetic`), equal except for rounding"
_HUB = "LEMA uploads the adapter once, when the run has ended, with the token of `hf auth login`"
_GENERATES = "`lema generate` and `lema chat` have these settings of writing answers"
_EXPORTS = "`lema merge` writes models"
_IMAGES = "`lema train` trains on text"
_SERVES = "of inference, which changes no training"
_MODEL = "LEMA reads the model's files as they are"

GROUPS: Mapping[str, str] = {
    _STREAMS: (
        "activation_checkpointing activation_checkpointing_kwargs auto_find_batch_size deepspeed "
        "disable_gradient_checkpointing fsdp fsdp_config fsdp_min_num_params "
        "fsdp_transformer_layer_cls_to_wrap gradient_checkpointing gradient_checkpointing_kwargs "
        "low_cpu_mem_usage no_cuda offload_folder quantization_device_map torch_empty_cache_steps "
        "use_cache use_cpu use_kv_cache use_mps_device use_reentrant_gc use_unsloth_gc device_map "
        "print_param_status"
    ),
    _LOADS: (
        "data_shared_file_system dataloader_in_order dataloader_multiprocessing_context "
        "dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory "
        "dataloader_prefetch_factor label_names length_column_name overwrite_cache "
        "preprocessing_batch_size preprocessing_num_workers remove_unused_columns tokenized_path "
        "use_fast_tokenizer sortish_sampler"
    ),
    _PROCESSES: (
        "average_tokens_across_devices ddp_backend ddp_broadcast_buffers "
        "ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout local_rank "
        "master_addr master_port parallelism_config ray_init_kwargs ray_num_workers ray_scope "
        "ray_run_name ray_storage_path resources_per_worker placement_strategy save_on_each_node "
        "tpu_num_cores tpu_metrics_debug mp_parameters"
    ),
    _LOGS: (
        "debug disable_tqdm include_effective_tokens_per_second include_num_input_tokens_seen "
        "include_tokens_per_second log_level log_level_replica log_on_each_node logging_dir "
        "logging_first_step logging_nan_inf_filter logging_strategy plot_loss skip_memory_metrics "
        "enable_torch_profiler profile_modules profiler_active_steps profiler_output_dir "
        "profiler_profile_memory profiler_record_shapes profiler_repeat profiler_wait_steps "
        "profiler_warmup_steps profiler_with_stack"
    ),
    _REPORTS: (
        "project trackio_bucket_id trackio_space_id trackio_static_space_id use_swanlab "
        "swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url swanlab_logdir swanlab_mode "
        "swanlab_project swanlab_run_name swanlab_workspace"
    ),
    _EVALUATES: (
        "batch_eval_metrics bf16_full_eval compute_accuracy do_eval do_predict "
        "eval_accumulation_steps eval_delay eval_do_concat_batches eval_num_beams "
        "eval_use_gather_object fp16_full_eval include_for_metrics "
        "include_inputs_for_metrics per_device_eval_batch_size prediction_loss_only"
    ),
    _KERNELS: (
        "enable_liger_kernel liger_kernel_config torch_compile_backend torch_compile_mode "
        "use_liger_kernel use_unsloth use_v1_kernels"
    ),
    _HUB: (
        "hf_hub_token hub_always_push hub_revision hub_strategy hub_token ms_hub_token "
        "om_hub_token push_to_hub_model_id push_to_hub_organization push_to_hub_token"
    ),
    _GENERATES: (
        "do_sample generation_config generation_max_length generation_num_beams length_penalty "
        "max_length max_new_tokens num_beams predict_with_generate repetition_penalty "
        "skip_special_tokens temperature top_k top_p"
    ),
    _EXPORTS: (
        "export_device export_dir export_hub_model_id export_legacy_format export_quantization_bit "
        "export_quantization_dataset export_quantization_maxlen export_quantization_nsamples "
        "export_size"
    ),
    _IMAGES: (
        "audio_sampling_rate crop_to_patches freeze_multi_modal_projector freeze_vision_tower "
        "image_do_pan_and_scan image_max_pixels image_min_pixels media_dir use_audio_in_video "
        "video_fps video_max_pixels video_maxlen video_min_pixels"
    ),
    _SERVES: (
        "infer_backend infer_dtype sglang_config sglang_lora_backend sglang_maxlen "
        "sglang_mem_fraction sglang_tp_size vllm_config vllm_enforce_eager vllm_gpu_util "
        "vllm_max_lora_rank vllm_maxlen"
    ),
    _MODEL: "cache_dir init_special_tokens",
    "LEMA's checkpoints hold all that a run resumes from": (
        "enable_jit_checkpoint ignore_data_skip restore_callback_states_from_checkpoint "
        "save_only_model save_safetensors"
    ),
    "a switch of the command: LEMA trains": "do_train",
    "a file cannot allow code to run: use --trust-remote-code": "trust_remote_code",
}

SILENT: Mapping[str, str] = {key: why for why, keys in GROUPS.items() for key in keys.split()}
