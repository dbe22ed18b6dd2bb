"""Which of PEFT's LoRA tests are not run here, and which end in a sentence on a streamed model:
by name.
"""

# Not run, neither on streamed models nor on whole ones: a part of the name, and why.
NOT_HERE = {
    "test_from_pretrained_config_construction": "gives PeftModel.from_pretrained a config, which lema.streamed reads",
    "test_merge_and_unload_fixes_tie_word_embeddings_config": "waits for a warning of merging, which is refused",
    "test_lora_embed_scale_is_applied_mixed_batch": "changes the model that get_peft_model was given",
    "test_disable_adapter.*config_kwargs19": "looks for trained rows in the model that get_peft_model was given",
}

MERGING = (
    "this is refused for a streamed model: (merging|copying|removing|moving)",
    "docs/trainers.md: What LEMA refuses",
)
ALORA = (
    "alora_invocation_tokens, which needs the input's tokens in every layer",
    "docs/adapters.md: options refused",
)
HIDDEN = "output_hidden_states is asked for", "docs/trainers.md: What LEMA refuses"

# Part of a name -> the error on a streamed model, and the page that documents it. The first that
# fits.
LIMITS = {
    r"config_kwargs1[78]-": ALORA,
    "test_merge_layers": MERGING,
    "test_unload_adapter": MERGING,
    "test_lora_conversion.*config_kwargs16": HIDDEN,
    r"test_lora_embed_scale_is_applied\[": MERGING,
    "test_lora_layer_replication": ("layer_replication", "docs/adapters.md: options refused"),
    "test_add_adapter_no_autocast_adapter_dtype": (
        "^",
        "docs/trainers.md: Precision. Adapters are in fp32",
    ),
    "test_get_base_model_state_dict": (
        "(?i)meta",
        "docs/trainers.md: the layers' weights are in no state dict",
    ),
    "test_targeting_module_and_targeting_param_equivalent": HIDDEN,
    "test_target_multiple_parameters_on_same_module": HIDDEN,
    "test_target_parameter_result_caching_works": HIDDEN,
}
