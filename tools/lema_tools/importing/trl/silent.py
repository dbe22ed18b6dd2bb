"""TRL's keys that change no number of the training, each with what LEMA does in their place."""

from collections.abc import Mapping

__all__ = ["SILENT"]

_STREAMS = "LEMA streams layers, and decides by the memory how they are computed"
_LOADS = "LEMA tokenises rows once, before the first step, with a process for each core"
_PROCESSES = "LEMA has its own exchange between processes"
_LOGS = "LEMA writes each step to metrics.jsonl, and prints as `lema train --help` says"
_REPORTS = "the tracker's own settings are in its environment variables"
_EVALUATES = "LEMA evaluates every row with the memory of training"
_KERNELS = "LEMA computes with the device's kernels (`arithmetic`), equal except for rounding"
_HUB = "LEMA uploads the adapter once, when the run has ended"
_SCRIPTS = "a switch of the script that changes nothing in TRL's trainers"
_CHECKPOINTS = "LEMA's checkpoints hold all that a run resumes from"

SILENT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "gradient_checkpointing",
            "gradient_checkpointing_kwargs",
            "activation_checkpointing",
            "activation_checkpointing_kwargs",
            "activation_offloading",
            "torch_empty_cache_steps",
            "deepspeed",
            "fsdp",
            "fsdp_config",
            "auto_find_batch_size",
            "use_cpu",
            "use_cache",
            "padding_free",
        ),
        _STREAMS,
    ),
    **dict.fromkeys(
        (
            "dataloader_num_workers",
            "dataloader_pin_memory",
            "dataloader_persistent_workers",
            "dataloader_prefetch_factor",
            "dataloader_multiprocessing_context",
            "dataloader_in_order",
            "dataset_num_proc",
            "remove_unused_columns",
            "label_names",
            "length_column_name",
        ),
        _LOADS,
    ),
    **dict.fromkeys(
        (
            "ddp_backend",
            "ddp_broadcast_buffers",
            "ddp_bucket_cap_mb",
            "ddp_find_unused_parameters",
            "ddp_static_graph",
            "ddp_timeout",
            "local_rank",
            "parallelism_config",
            "average_tokens_across_devices",
            "ignore_bias_buffers",
            "accelerate_config",
            "config_file",
            "save_on_each_node",
            "main_process_port",
            "mixed_precision",
        ),
        _PROCESSES,
    ),
    **dict.fromkeys(
        (
            "logging_strategy",
            "logging_first_step",
            "logging_nan_inf_filter",
            "log_level",
            "log_level_replica",
            "log_on_each_node",
            "include_num_input_tokens_seen",
            "skip_memory_metrics",
            "debug",
            "disable_tqdm",
        ),
        _LOGS,
    ),
    **dict.fromkeys(
        (
            "project",
            "trackio_space_id",
            "trackio_bucket_id",
            "trackio_static_space_id",
        ),
        _REPORTS,
    ),
    **dict.fromkeys(
        (
            "per_device_eval_batch_size",
            "eval_accumulation_steps",
            "eval_delay",
            "eval_do_concat_batches",
            "eval_use_gather_object",
            "batch_eval_metrics",
            "bf16_full_eval",
            "fp16_full_eval",
            "include_for_metrics",
            "prediction_loss_only",
            "precompute_ref_log_probs",
            "precompute_ref_batch_size",
        ),
        _EVALUATES,
    ),
    **dict.fromkeys(("use_liger_kernel", "liger_kernel_config"), _KERNELS),
    **dict.fromkeys(("hub_always_push", "hub_revision", "hub_strategy", "hub_token"), _HUB),
    **dict.fromkeys(("do_train", "do_eval", "do_predict"), _SCRIPTS),
    **dict.fromkeys(
        (
            "enable_jit_checkpoint",
            "ignore_data_skip",
            "restore_callback_states_from_checkpoint",
            "save_only_model",
        ),
        _CHECKPOINTS,
    ),
    "bnb_4bit_quant_storage": "it says how the same 4-bit numbers lie in memory",
    "env": "set these variables where you start `lema train`",
    "pad_token": "padding is masked, so its token changes nothing",
    "torch_compile_backend": "LEMA compiles with torch's default",
    "torch_compile_mode": "LEMA compiles with torch's default",
    "trust_remote_code": "a file cannot allow code to run: use --trust-remote-code",
    "dataset_kwargs": "LEMA reads rows of token ids, and any other rows, as they are",
}
