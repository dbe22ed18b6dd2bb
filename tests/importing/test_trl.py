"""TRL's files and command lines as settings of LEMA: every key is the same, differs, or is lost.

`tests/peers_trl/test_trl_imports.py` runs such files by TRL and by LEMA.
"""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from lema import LemaConfig
from lema.cli.app import app
from lema.cli.exitcodes import run
from lema.errors import ConfigError
from lema_tools.demo import run_demo
from lema_tools.importing.checking import checked
from lema_tools.importing.command import translated
from lema_tools.importing.commandline import foreign_run
from lema_tools.importing.recognition import peer_named, peer_of
from lema_tools.importing.translation import ForeignRun, Translation
from lema_tools.importing.trl import PEER
from lema_tools.importing.trl.kind import DEFAULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from-trl.md").read_text(encoding="utf-8")
LEAST = {"model_name_or_path": "org/model", "dataset_name": "org/data", "output_dir": "out"}
TRAINED = ("sft", "dpo", "kto")


def translation_of(kind: str = "sft", **values: Any) -> Translation:
    """Return a run of TRL with an adapter, translated and checked."""
    keys = {**LEAST, "use_peft": True, **values}
    return checked(PEER.translate(ForeignRun(keys, objective=kind)))


def lists_of(translation: Translation) -> list[str]:
    """Return the keys of all three lists, those that are in two of them twice."""
    notes = (*translation.differs, *translation.lost)
    return [*translation.same, *(note.key for note in notes)]


def changed_by(translation: Translation) -> set[str]:
    return {note.key for note in translation.changes}


# Values that are not TRL's defaults, where the default does not tell what another one is like.
OTHERS: dict[str, Any] = {
    "accelerator_config": {"split_batches": True},
    "attn_implementation": "eager",
    "bf16": False,
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "fp4",
    "center_rewards_coefficient": 0.1,
    "chat_template_path": "template.jinja",
    "completion_only_loss": False,
    "data_seed": 3,
    "dataset_kwargs": {"skip_prepare_dataset": True},
    "datasets": [{"path": "org/data"}],
    "dtype": "bfloat16",
    "eval_packing": True,
    "eval_steps": 10,
    "eval_strategy": "epoch",
    "fsdp_config": {"fsdp": True},
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "ld_alpha": 0.5,
    "loss_weights": [0.5],
    "lora_modules_to_save": ["lm_head"],
    "lora_target_modules": ["q_proj"],
    "lora_target_parameters": ["experts.down_proj"],
    "lora_task_type": "SEQ_CLS",
    "lr_scheduler_kwargs": {"num_cycles": 2},
    "lr_scheduler_type": "cosine",
    "max_length": None,
    "model_init_kwargs": {"rope_scaling": {}},
    "neftune_noise_alpha": 5.0,
    "optim": "sgd",
    "packing_strategy": "wrapped",
    "pad_to_multiple_of": 8,
    "report_to": "wandb",
    "router_aux_loss_coef": 0.01,
    "save_strategy": "epoch",
    "save_total_limit": 1,
    "test_split_size": 0.1,
    "tf32": True,
    "train_sampling_strategy": "group_by_length",
    "truncation_mode": "keep_end",
    "warmup_steps": 0.1,
}
LOSSES = {"sft": "dft", "dpo": ["sigmoid", "sft"], "kto": "apo_zero_unpaired"}


def another(kind: str, key: str, default: Any) -> Any:
    """Return a value of a key that is not its default."""
    if key == "loss_type":
        return LOSSES[kind]
    if key in OTHERS:
        return OTHERS[key]
    if isinstance(default, bool):
        return not default
    if isinstance(default, int | float):
        return default + 1 if default >= 1 or default < 0 else default + 0.25
    return [default] if isinstance(default, list) else "something"


@pytest.mark.parametrize("kind", TRAINED)
def test_every_key_of_trl_is_in_one_list_whatever_its_value(kind: str) -> None:
    defaults = DEFAULTS.of(kind)
    assert len(defaults) > 150
    silent = []
    for key, default in defaults.items():
        value = another(kind, key, default)
        assert value != default, key
        keys = {**LEAST, "use_peft": key != "use_peft", key: value}
        lists = lists_of(PEER.translate(ForeignRun(keys, objective=kind)))
        if lists.count(key) != 1 or len(lists) != len(set(lists)):
            silent.append((key, lists.count(key)))
    assert silent == []


@pytest.mark.parametrize("kind", TRAINED)
def test_every_key_with_its_default_is_in_one_list_and_changes_nothing(kind: str) -> None:
    values = {**DEFAULTS.of(kind), **LEAST, "use_peft": True}
    translation = PEER.translate(ForeignRun(values, objective=kind))
    assert sorted(lists_of(translation)) == sorted(values)
    assert translation.changes == []


def test_a_key_that_trl_does_not_have_may_change_numbers() -> None:
    translation = translation_of(learning_rat=1.0)
    assert changed_by(translation) == {"learning_rat"}


# The examples of `trl sft` and `trl dpo` that leave most to TRL, and the values that LEMA must not
# take from its own defaults.
RESOLVED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sft": (
        "sft",
        {},
        {
            "learning_rate": 2e-5,
            "num_train_epochs": 3.0,
            "max_grad_norm": 1.0,
            "max_length": 1024,
            "batch_size": 8,
            "gradient_accumulation_steps": 1,
            "lora_rank": 16,
            "lora_alpha": 32,
            "lora_dropout": 0.05,
            "lora_target_modules": "peft",
            "train_on": "all_but_prompts",
            "packing": False,
            "shuffle": "transformers",
            "dtype": "float32",
            "autocast": "bfloat16",
            "optim": "adamw_torch_fused",
            "lr_scheduler_type": "linear",
            "warmup_steps": 0,
            "warmup_ratio": 0.0,
            "weight_decay": 0.0,
            "seed": 42,
            "loss_type": "nll",
            "objective": "sft",
            "save_steps": 500,
            "save_total_limit": None,
            "train_data": {"path": "org/data", "split": "train"},
            "truncation_side": "right",
        },
    ),
    "sft with options": (
        "sft",
        {
            "learning_rate": 2e-4,
            "num_train_epochs": 1,
            "packing": True,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "lora_r": 32,
            "lora_alpha": 16,
        },
        {
            "learning_rate": 2e-4,
            "num_train_epochs": 1.0,
            "packing": "bfd",
            "batch_size": 2,
            "gradient_accumulation_steps": 8,
            "lora_rank": 32,
            "lora_alpha": 16,
            "lora_dropout": 0.05,
            "max_grad_norm": 1.0,
            "max_length": 1024,
        },
    ),
    "dpo": (
        "dpo",
        {},
        {
            "objective": "dpo",
            "learning_rate": 1e-6,
            "beta": 0.1,
            "loss_type": "sigmoid",
            "lora_dropout": 0.0,  # which TRL's disable_dropout takes out
            "num_train_epochs": 3.0,
            "max_grad_norm": 1.0,
            "max_length": 1024,
            "shuffle": "transformers",
        },
    ),
    "kto": (
        "kto",
        {},
        {
            "objective": "kto",
            "learning_rate": 1e-6,
            "shuffle": "sequential",
            "loss_type": "kto",
            "desirable_weight": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", RESOLVED)
def test_what_a_file_leaves_out_is_trl_s_default(name: str) -> None:
    kind, values, expected = RESOLVED[name]
    translation = translation_of(kind, **values)
    assert translation.settings == {**translation.settings, **expected}
    assert translation.changes == []


CASES: list[tuple[str, dict[str, Any], dict[str, Any], set[str]]] = [
    # the kind, what its file has, what LEMA has, and the keys that change numbers
    ("sft", {"max_grad_norm": 0.0}, {"max_grad_norm": None}, set()),
    ("sft", {"max_steps": 20}, {"max_steps": 20}, set()),
    ("sft", {"warmup_steps": 0.1}, {"warmup_ratio": 0.1, "warmup_steps": 0}, set()),
    ("sft", {"warmup_steps": 20}, {"warmup_steps": 20, "warmup_ratio": 0.0}, set()),
    # of earlier releases, which TRL 1.16 passes over
    ("sft", {"warmup_ratio": 0.1}, {"warmup_ratio": 0.0, "warmup_steps": 0}, {"warmup_ratio"}),
    ("sft", {"max_seq_length": 64}, {"max_length": 1024}, {"max_seq_length"}),
    ("sft", {"max_seq_length": 64, "max_length": 64}, {"max_length": 64}, set()),
    ("sft", {"torch_dtype": "bfloat16"}, {"dtype": "float32"}, {"torch_dtype"}),
    ("sft", {"torch_dtype": "float32", "evaluation_strategy": "steps"}, {"eval_data": None}, set()),
    ("sft", {"save_safetensors": True, "overwrite_output_dir": True}, {}, set()),
    ("dpo", {"max_prompt_length": 512}, {"max_length": 1024}, {"max_prompt_length"}),
    ("sft", {"completion_only_loss": False}, {"train_on": "all"}, set()),
    ("sft", {"completion_only_loss": True}, {"train_on": "all_but_prompts"}, set()),
    ("sft", {"assistant_only_loss": True}, {"train_on": "assistant"}, {"assistant_only_loss"}),
    ("sft", {"truncation_mode": "keep_end"}, {"truncation_side": "left"}, set()),
    ("sft", {"dataset_text_field": "story"}, {"columns": {"text": "story"}}, set()),
    (
        "sft",
        {"packing": True, "packing_strategy": "wrapped"},
        {"packing": "wrapped"},
        {"packing_strategy"},
    ),
    ("sft", {"eos_token": "<|im_end|>"}, {}, {"eos_token"}),
    ("sft", {"shuffle_dataset": True}, {}, {"shuffle_dataset"}),
    ("sft", {"bf16": False}, {"dtype": "float32", "autocast": None}, set()),
    ("sft", {"dtype": "bfloat16"}, {"dtype": "bfloat16", "autocast": None}, set()),
    ("sft", {"fp16": True}, {"autocast": None}, {"fp16"}),
    ("sft", {"model_init_kwargs": {"dtype": "bfloat16"}}, {"dtype": "bfloat16"}, set()),
    ("sft", {"model_init_kwargs": {"rope_theta": 9}}, {}, {"model_init_kwargs"}),
    (
        "sft",
        {"load_in_4bit": True},
        {"quantize_base": "nf4"},
        {"load_in_4bit", "use_bnb_nested_quant"},
    ),
    (
        "sft",
        {"load_in_4bit": True, "use_bnb_nested_quant": True},
        {"quantize_base": "nf4"},
        {"load_in_4bit"},
    ),
    ("sft", {"use_bnb_nested_quant": True, "bnb_4bit_quant_type": "fp4"}, {}, set()),
    ("sft", {"lora_target_modules": "all-linear"}, {"lora_target_modules": "all-linear"}, set()),
    ("sft", {"lora_target_modules": ["q_proj"]}, {"lora_target_modules": "q_proj"}, set()),
    ("sft", {"use_peft": False}, {"trains": "full"}, set()),
    ("sft", {"use_peft": False, "dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"dtype"}),
    ("sft", {"use_peft": False, "model_init_kwargs": {"dtype": "float16"}}, {}, {"dtype", "bf16"}),
    ("sft", {"use_peft": False, "dtype": "auto", "bf16": False}, {"dtype": None}, {"dtype"}),
    (
        "sft",
        {"use_peft": False, "neftune_noise_alpha": 5.0, "push_to_hub": True},
        {"trains": "full", "optim": "adamw_torch", "push_to_hub": None, "neftune_noise_alpha": 5.0},
        set(),
    ),
    ("sft", {"use_peft": False, "optim": "sgd"}, {"optim": "adamw_torch"}, {"optim"}),
    ("sft", {"use_peft": False, "loss_type": "dft"}, {"loss_type": None}, {"loss_type"}),
    ("sft", {"loss_type": "chunked_nll"}, {"loss_type": "nll"}, set()),
    ("sft", {"train_sampling_strategy": "sequential"}, {"shuffle": "sequential"}, set()),
    (
        "sft",
        {"train_sampling_strategy": "group_by_length"},
        {"group_by_length": True},
        {"train_sampling_strategy"},
    ),
    ("sft", {"data_seed": 3, "seed": 1}, {"data_seed": 3, "seed": 1}, set()),
    ("sft", {"num_processes": 1}, {"batch_size": 8, "micro_batch_size": None}, set()),
    # where rows do not fill the last step of an epoch, accelerate repeats its first ones
    ("sft", {"num_processes": 4}, {"batch_size": 32, "micro_batch_size": 8}, {"num_processes"}),
    (
        "sft",
        {"accelerate_config": "zero3"},
        {"batch_size": 64, "micro_batch_size": 8},
        {"accelerate_config"},
    ),
    (
        "sft",
        {"num_processes": 4, "accelerator_config": {"split_batches": True}},
        {"batch_size": 8, "micro_batch_size": 2},
        {"num_processes"},
    ),
    (
        "sft",
        {"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 4}}},
        {"gradient_accumulation_steps": 4},
        set(),
    ),
    (
        "sft",
        {"accelerate_config": "zero3", "dtype": "bfloat16"},
        {"batch_size": 64},
        {"accelerate_config", "dtype"},
    ),
    ("dpo", {"config_file": "x/multi_gpu.yaml"}, {"batch_size": 64}, {"config_file"}),
    ("sft", {"config_file": "absent.yaml"}, {"batch_size": 8}, {"config_file"}),
    ("dpo", {"use_peft": False}, {}, {"use_peft"}),
    ("sft", {"datasets": [{"path": "a/b", "columns": ["messages"]}]}, {}, set()),
    ("sft", {"datasets": [{"path": "a/b", "columns": ["text"]}]}, {}, {"datasets"}),
    (
        "sft",
        {"accelerator_config": {"use_seedable_sampler": False}},
        {},
        {"accelerator_config"},
    ),
    ("sft", {"dataloader_drop_last": True}, {}, {"dataloader_drop_last"}),
    (
        "sft",
        {"eval_strategy": "steps", "eval_steps": 50},
        {"eval_steps": 50, "eval_data": {"path": "org/data", "split": "test"}},
        set(),
    ),
    ("sft", {"eval_strategy": False}, {"eval_data": None}, set()),
    (
        "sft",
        {"dataset_config": "fr", "dataset_train_split": "all"},
        {"train_data": {"path": "org/data", "name": "fr", "split": "all"}},
        set(),
    ),
    (
        "sft",
        {"dataset_streaming": True, "max_steps": 9},
        {
            "train_data": {"path": "org/data", "split": "train", "streaming": True},
            "shuffle": "sequential",
        },
        set(),
    ),
    (
        "sft",
        {
            "datasets": [
                {"path": "a/b", "split": "train[:20%]"},
                {"path": "json", "data_files": "c.jsonl"},
            ]
        },
        {"train_data": [{"path": "a/b", "split": "train[:20%]"}, "c.jsonl"]},
        set(),
    ),
    (
        "sft",
        {"datasets": [{"path": "a/b", "fraction": 1}, {"path": "c/d", "fraction": 2}]},
        {},
        {"datasets"},
    ),
    (
        "sft",
        {"datasets": [{"path": "a/b"}], "test_split_size": 0.1},
        {"train_data": {"path": "a/b", "split": "train"}, "eval_split": 0.1},
        set(),
    ),
    ("dpo", {"loss_type": "ipo"}, {"objective": "dpo", "loss_type": "ipo"}, set()),
    (
        "dpo",
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1, 1]},
        {},
        {"loss_type", "loss_weights"},
    ),
    ("dpo", {"loss_type": "robust", "label_smoothing": 0.2}, {"label_smoothing": 0.2}, set()),
    ("dpo", {"label_smoothing": 0.2}, {"label_smoothing": None}, set()),
    ("dpo", {"ld_alpha": 0.5, "use_weighting": True}, {}, {"ld_alpha", "use_weighting"}),
    ("dpo", {"f_divergence_type": "js_divergence"}, {}, {"f_divergence_type"}),
    ("dpo", {"discopop_tau": 0.1}, {}, set()),
    ("dpo", {"disable_dropout": False}, {}, {"disable_dropout"}),
    ("dpo", {"sync_ref_model": True}, {}, {"sync_ref_model"}),
    ("dpo", {"precompute_ref_log_probs": True}, {}, set()),
    ("kto", {"undesirable_weight": 1.5}, {"undesirable_weight": 1.5}, set()),
    ("kto", {"train_sampling_strategy": "random"}, {"shuffle": "transformers"}, set()),
]


@pytest.mark.parametrize(
    ("kind", "values", "expected", "changes"),
    CASES,
    ids=lambda case: json.dumps(case, default=sorted),
)
def test_a_value_becomes_its_setting_or_a_note_that_it_changes_numbers(
    kind: str, values: dict[str, Any], expected: dict[str, Any], changes: set[str]
) -> None:
    translation = translation_of(kind, **values)
    settings = {name: translation.settings.get(name) for name in expected}
    assert settings == expected
    assert changed_by(translation) == changes


def test_a_model_that_is_here_tells_lengths_and_coefficients(tmp_path: Path) -> None:
    config = {"max_position_embeddings": 512, "router_aux_loss_coef": 0.02, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    translation = translation_of(model_name_or_path=str(tmp_path), dtype="auto")
    settings = translation.settings
    assert settings["max_length"] == 512 and changed_by(translation) == {"max_length"}
    fits = translation_of(model_name_or_path=str(tmp_path), max_length=512)
    assert fits.settings["max_length"] == 512 and not fits.changes
    assert settings["router_aux_loss_coef"] == 0.02
    assert (settings["dtype"], settings["autocast"]) == (None, None)


def test_folders_of_data_sets_are_their_files() -> None:
    sets = [{"path": "json", "data_dir": "chats"}, {"path": "org/data", "data_dir": "more"}]
    run = ForeignRun({**LEAST, "use_peft": True, "datasets": sets}, objective="sft")
    other = {"path": "org/data", "split": "train", "data_files": "more/**"}
    assert PEER.translate(run).settings["train_data"] == ["chats", other]


def test_answers_that_a_template_marks_are_trained_alone_as_there(tmp_path: Path) -> None:
    file = tmp_path / "marked.jinja"
    file.write_text("{%- generation %}{{ m.content }}{% endgeneration %}")
    translation = translation_of(assistant_only_loss=True, chat_template_path=str(file))
    assert translation.settings["chat_template"] == str(file)
    assert translation.changes == []


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        (["trl", "dpo", "--beta", "0.2"], "dpo"),
        (["trl", "kto", "--learning_rate=1e-5"], "kto"),
        (["python", "trl/scripts/sft.py", "--packing"], "sft"),
    ],
)
def test_a_command_line_says_its_kind(words: list[str], kind: str) -> None:
    least = [f"--{key}={value}" for key, value in LEAST.items()]
    run = foreign_run([*words, *least, "--no_remove_unused_columns"], objective=None, options={})
    assert PEER.recognises(run)
    translation = PEER.translate(run)
    assert translation.settings.get("objective", "sft") == kind
    assert lists_of(translation).count("remove_unused_columns") == 1


def test_the_file_of_a_launcher_says_how_many_processes_there_are(tmp_path: Path) -> None:
    file = tmp_path / "multi.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 3\n")
    words = ["accelerate", "launch", "--config_file", str(file), "trl/scripts/sft.py"]
    least = [f"--{key}={value}" for key, value in LEAST.items()]
    settings = translated([*words, *least], tool="trl")[1].settings
    assert (settings["batch_size"], settings["micro_batch_size"]) == (24, 8)


def test_values_of_a_command_line_replace_those_of_its_file(tmp_path: Path) -> None:
    file = tmp_path / "dpo.yaml"
    file.write_text(json.dumps({**LEAST, "beta": 0.5, "learning_rate": 1e-5}))
    words = ["trl", "dpo", "--config", str(file), "--beta", "0.2", "--use_peft"]
    settings = translated(words, tool="trl")[1].settings
    assert (settings["beta"], settings["learning_rate"]) == (0.2, 1e-5)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({"packing": True}, "sft"),
        ({"completion_only_loss": True}, "sft"),
        ({"f_divergence_type": "reverse_kl"}, "dpo"),
        ({"beta": 0.1, "loss_type": "sigmoid"}, "dpo"),
        ({"beta": 0.1, "loss_type": "kto"}, "kto"),
        ({"desirable_weight": 1.0}, "kto"),
    ],
)
def test_keys_of_a_single_trainer_say_the_kind(values: dict[str, Any], kind: str) -> None:
    translation = PEER.translate(ForeignRun({**LEAST, "use_peft": True, **values}))
    assert translation.settings["objective"] == kind


@pytest.mark.parametrize("values", [{}, {"packing": True, "desirable_weight": 1.0}])
def test_a_file_for_no_trainer_or_for_two_asks_for_the_objective(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        PEER.translate(ForeignRun({**LEAST, **values}))
    assert caught.value.where == "--objective"
    assert "--objective sft, dpo, kto" in str(caught.value.how)


@pytest.mark.parametrize(
    ("kind", "trainer"), [("reward", "RewardTrainer"), ("grpo", "GRPOTrainer")]
)
def test_rewards_and_grpo_are_refused_with_the_way(kind: str, trainer: str) -> None:
    with pytest.raises(ConfigError) as caught:
        PEER.translate(ForeignRun(LEAST, objective=kind))
    assert trainer in str(caught.value.how) and "docs/trainers.md" in str(caught.value.how)


@pytest.mark.parametrize("missing", ["model_name_or_path", "dataset_name"])
def test_a_run_without_model_or_data_is_refused(missing: str) -> None:
    values = {key: value for key, value in LEAST.items() if key != missing}
    with pytest.raises(ConfigError) as caught:
        PEER.translate(ForeignRun(values, objective="sft"))
    assert caught.value.where == missing


def test_the_file_of_the_page_is_recognised() -> None:
    """It has `datasets` and `lora_r`, which axolotl has, too."""
    values = {"datasets": [{"path": "a/b"}], "lora_r": 8, "max_length": 64, "use_peft": True}
    assert peer_of(ForeignRun({"model_name_or_path": "m", **values}), "sft.yaml") is PEER
    del values["use_peft"]
    assert peer_of(ForeignRun({"model_name_or_path": "m", **values}), "sft.yaml") is PEER


def test_files_of_other_trainers_are_not_recognised() -> None:
    axolotl = {"base_model": "m", "sequence_len": 64, "datasets": [], "lora_r": 8}
    factory = {"model_name_or_path": "m", "stage": "sft", "finetuning_type": "lora"}
    for values in (axolotl, factory):
        assert peer_of(ForeignRun(values), "their.yaml") is not PEER
    assert peer_of(ForeignRun(LEAST), "sft.yaml") is PEER
    assert peer_named("trl") is PEER


def test_a_file_that_would_change_the_run_ends_with_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text(json.dumps({**LEAST, "use_peft": True, "shuffle_dataset": True}))
    command = ["config", "import", str(file), "--from", "trl"]
    command += ["--objective", "sft"]
    assert run(app, command) == 3
    captured = capsys.readouterr()
    assert "shuffle_dataset" in captured.err and not captured.out
    assert run(app, [*command, "--accept-differences"]) == 0
    assert "shuffle_dataset" in capsys.readouterr().out


def block(name: str, language: str) -> str:
    pattern = rf"<!-- {name} -->\n```{language}\n(.*?)```\n<!-- end -->"
    (text,) = re.findall(pattern, PAGE, re.DOTALL)
    return str(text)


def test_the_run_of_the_page_is_the_same_in_python(tmp_path: Path) -> None:
    """The `trl yaml` of the page, imported, and its `settings example`."""
    file = tmp_path / "sft.yaml"
    file.write_text(block("trl yaml", "yaml"))
    _, translation = translated([str(file)], tool="trl", objective="sft")
    assert translation.changes == []
    known = LemaConfig.defaults()
    settings = {name: value for name, value in translation.settings.items() if name in known}
    tree = ast.parse(block("settings example", "python"))
    (call,) = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "LemaConfig"
    ]
    scope: dict[str, Any] = {}
    exec("from lema import LemaConfig", scope)
    expected = eval(compile(ast.Expression(call), "page", "eval"), scope)
    assert LemaConfig(**settings).to_dict() == expected.to_dict()


@pytest.mark.slow
def test_the_run_of_the_page_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The block `trl yaml`, with the demo's model and data."""
    monkeypatch.chdir(tmp_path)
    run_demo(Path("lema-demo"), max_steps=2)
    text = block("trl yaml", "yaml").replace("Qwen/Qwen2.5-0.5B", "lema-demo/model", 1)
    text = text.replace("data/chats.jsonl", "lema-demo/data/chat.jsonl")
    assert text.count("lema-demo") == 2
    Path("sft.yaml").write_text(text, encoding="utf-8")
    _, translation = translated(["sft.yaml"], tool="trl", objective="sft")
    settings = {
        name: value for name, value in translation.settings.items() if name in LemaConfig.defaults()
    }
    with Path("my.yaml").open("w") as file:
        YAML(typ="safe", pure=True).dump(settings, file)
    capsys.readouterr()
    options = ["--set", "device=cpu", "--set", "max_steps=2"]
    assert run(app, ["train", "my.yaml", *options]) == 0
    assert Path(settings["output_dir"], "adapter_model.safetensors").is_file()
