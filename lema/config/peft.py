"""What becomes of each option of PEFT's `LoraConfig`: the setting that stands for it, or the reason
it is refused.

An option is supported where loss, gradients and initial values are bitwise those of PEFT on the
whole model. An option that would read, change or replace the frozen weights, or that needs more of
the model than one layer at a time, is refused by name. `peft` is not imported here; a test compares
this list with its fields.
"""

from collections.abc import Iterator, Mapping
from typing import Any

SETTING_OF: Mapping[str, str] = {
    "r": "lora_rank",
    "init_lora_weights": "lora_init",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    **{
        option: f"lora_{option}"
        for option in (
            *(
                "target_modules",
                "exclude_modules",
                "modules_to_save",
                "target_parameters",
                "trainable_token_indices",
            ),
            *(
                "rank_pattern",
                "alpha_pattern",
                "layers_pattern",
                "layers_to_transform",
                "lora_bias",
                "bias",
            ),
            *("use_rslora", "use_dora", "ensure_weight_tying"),
        )
    },
}
"""PEFT's option -> the setting that says the same."""

# Options that change no number, or follow from the model or from another option.
CARRIED = frozenset(
    [
        *("task_type", "peft_type"),  # LoRA of a causal language model; others are refused
        *("auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        "fan_in_fan_out",  # follows from the modules
        # say nothing without megatron_config and use_qalora
        *(
            "megatron_core",
            "qalora_group_size",
        ),
        # nothing without their initial values
        *(
            "eva_config",
            "corda_config",
            "lora_ga_config",
            "loftq_config",
        ),
        "runtime_config",  # is not saved, and only says where initial values are computed
    ]
)

REFUSED: Mapping[str, str] = {
    "megatron_config": (
        "adapts the parallel layers of another library, which the model does not have"
    ),
    "velora_config": (
        "replaces the gradient of A by an approximation that depends on earlier batches"
    ),
    "alora_invocation_tokens": (
        "needs the input's tokens in every layer, but layers see only hidden states"
    ),
    "use_qalora": "adapts quantized weights, but streamed weights are not quantized",
    "monteclora_config": "adds its own loss, summed over all layers",
    "layer_replication": "runs layers more than once, but each layer is leased once in a pass",
    "use_bdlora": "makes the adapter's matrices block-diagonal",
    "arrow_config": "mixes several adapters, but there is only one",
    "kasa_config": "changes the frozen weights, but streamed weights are the checkpoint's",
}
"""Options that cannot be used, each with the reason, to follow its name."""

INITIAL_VALUES = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that are drawn from nothing but shapes."""

_TAKEN_OUT = "derives its values from the frozen weights, but streamed weights are the checkpoint's"

REFUSED_INITIAL_VALUES: Mapping[str, str] = {
    **dict.fromkeys(("pissa", "olora", "corda", "lora_ga"), _TAKEN_OUT),
    "loftq": "quantizes the frozen weights, but streamed weights are the checkpoint's",
    "mica": "decomposes every frozen weight, but only a layer is in memory at a time",
    "eva": "runs data through the whole model beforehand",
}
"""Values that cannot be used, each with the reason, to follow its name."""


def why_not_initial(value: str) -> str | None:
    """Return why initial values of this name cannot be used; None: PEFT has none of the name
    that are refused.
    """
    return REFUSED_INITIAL_VALUES.get(value.lower().partition("_niter_")[0])


# Settings that PEFT does not allow with each other, whatever their values.
EXCLUSIVE = (
    ("lora_use_dora", "lora_lora_bias"),
    ("lora_target_parameters", "lora_dropout"),
    ("lora_target_parameters", "lora_lora_bias"),
    ("lora_target_parameters", "lora_use_dora"),
)


def refusals(config: Mapping[str, Any], task: str = "CAUSAL_LM") -> Iterator[str]:
    """Yield a phrase for each thing in the config of a saved adapter that cannot be used for a
    model of this task. EVA leaves the frozen weights as they are, so an adapter that began with it
    is one like any other by now."""
    for name, reason in REFUSED.items():
        # PEFT takes an empty one for one with its defaults
        if config.get(name) not in (
            None,
            False,
        ):
            yield f"{name}, which {reason}"
    if (task_type := config.get("task_type")) not in (None, task):
        model = "causal language model" if task == "CAUSAL_LM" else "model that scores texts"
        yield f"task_type {task_type}, which is not that of a {model}"
    initial = config.get("init_lora_weights")
    if isinstance(initial, str) and initial.lower() not in (*INITIAL_VALUES, "eva"):
        yield (
            f'init_lora_weights "{initial}", which '
            f"{why_not_initial(initial) or 'PEFT does not have'}"
        )


def contradictions(settings: Any) -> Iterator[tuple[str, str]]:
    """Yield what PEFT does not allow together, of the settings of an adapter: a setting, and
    what is wrong with it.
    """
    targets = settings.lora_target_modules
    initial = settings.lora_init
    parameters = settings.lora_target_parameters
    if targets == [] and not parameters:
        what = "is empty; name modules, or leave it out for every linear of the decoder layers"
        yield "lora_target_modules", f"lora_target_modules {what}"
    if settings.lora_layers_pattern is not None and settings.lora_layers_to_transform is None:
        what = "names the list in which lora_layers_to_transform counts; give both, or neither"
        yield "lora_layers_pattern", f"lora_layers_pattern {what}"
    if isinstance(targets, str) and settings.lora_layers_to_transform is not None:
        what = (
            "needs lora_target_modules to be a list of names; name modules, or write the "
            "layers into the expression"
        )
        yield "lora_layers_to_transform", f"lora_layers_to_transform {what}"
    ranks = [settings.lora_rank, *settings.lora_rank_pattern.values()]
    if initial == "orthogonal" and (odd := [rank for rank in ranks if rank % 2]):
        what = f"orthogonal values need even ranks, and lora_rank or lora_rank_pattern has {odd[0]}"
        yield "lora_init", f"lora_init: {what}"
    if isinstance(initial, str) and settings.lora_lora_bias:
        yield (
            "lora_init",
            f'lora_init: "{initial}" and lora_lora_bias exclude each other; leave one of them out',
        )
    if initial == "orthogonal" and parameters:
        what = (
            'lora_target_parameters and lora_init: "orthogonal" exclude each other; leave one '
            "of them out"
        )
        yield "lora_init", what
    for setting, conflict in EXCLUSIVE:
        if getattr(settings, setting) and getattr(settings, conflict):
            yield conflict, f"{setting} and {conflict} exclude each other; leave one of them out"
