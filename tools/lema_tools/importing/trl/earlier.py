"""Keys of earlier releases of TRL and `transformers`, which TRL 1.16 does not have.

TRL's scripts read a file with `fail_with_unknown_args=False`, which passes over such keys, and its
command line hands them to `accelerate launch`, which refuses them. So none of them has an effect.
"""

from lema_tools.importing.trl.kind import DEFAULTS
from lema_tools.importing.trl.ledger import Ledger

__all__ = ["EARLIER", "WITHOUT_EFFECT", "earlier"]

EARLIER = {
    "max_seq_length": "max_length",
    "torch_dtype": "dtype",
    "warmup_ratio": "warmup_steps",
    "evaluation_strategy": "eval_strategy",
    "max_prompt_length": "max_length",
    "max_completion_length": "max_length",
}
"""Keys by the names that TRL 1.16 has for them, or for what has taken their place."""

OF_EVALUATION = ("evaluation_strategy",)
WITHOUT_EFFECT = frozenset(
    {
        "overwrite_output_dir",
        "save_safetensors",
        "logging_dir",
        "jit_mode_eval",
        "use_ipex",
        "tpu_num_cores",
        "tpu_metrics_debug",
        "past_index",
        "ray_scope",
        "no_cuda",
        "use_mps_device",
        "fp16_opt_level",
        "fp16_backend",
        "half_precision_backend",
        "include_tokens_per_second",
        "include_inputs_for_metrics",
        "mp_parameters",
        "push_to_hub_model_id",
        "push_to_hub_organization",
        "push_to_hub_token",
        "torchdynamo",
        "fsdp_min_num_params",
        "fsdp_transformer_layer_cls_to_wrap",
        "use_legacy_prediction_loop",
        "per_gpu_eval_batch_size",
        "use_liger",
        "dataset_batch_size",
        "generate_during_eval",
        "model_adapter_name",
        "ref_adapter_name",
        "is_encoder_decoder",
    }
)
"""Keys that changed no number of the training in the releases that had them, either."""


def earlier(ledger: Ledger) -> None:
    """Note the keys of earlier releases that the run has; the run is that of TRL 1.16, which has
    its own value in their place.
    """
    version = DEFAULTS.contents["version"]
    for key in sorted(ledger.written - ledger.settled() - ledger.defaults.keys()):
        if key in WITHOUT_EFFECT:
            what = f"TRL {version} has no such key, and the training has no number of it"
            ledger.lost(key, what, changes_numbers=False)
        elif name := EARLIER.get(key):
            what = (
                f"TRL {version} has no such key: its scripts pass over it, and `trl` refuses it. "
                f"Write {name} if you mean it; here {name} is {ledger[name]}"
            )
            changes = key not in OF_EVALUATION and ledger[key] != ledger[name]
            ledger.lost(key, what, changes_numbers=changes)
