"""Settings: what is accepted, what is refused and in which words, and that none of it waits for
torch.
"""

import json
import math
import re
import subprocess
import sys
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lema.config import LemaConfig, MemoryStrategy
from lema.config.backendsettings import backend_settings
from lema.config.lemaconfig import CONFIG_NAME
from lema.config.problems import SettingsError
from lema.config.types import Scheduler
from lema.config.units import parse_memory
from lema.config.yaml import parse_value
from lema.errors import ConfigError, DiskError, listed

# Run in a fresh process: every field misspelt in many ways, every field given every wrong type.
# Prints what was wrong with the refusals, and whether torch had been imported by then.
EVERY_SLIP = """
import json, random, sys
from lema.config import LemaConfig
from lema.config.problems import SettingsError

fields = list(LemaConfig.model_fields)
letters = "abcdefghijklmnopqrstuvwxyz_"
random.seed(0)

def slip(word):
    at = random.randrange(len(word))
    kind = random.choice(["delete", "insert", "replace", "swap"])
    if kind == "delete":
        return word[:at] + word[at + 1:]
    if kind == "insert":
        return word[:at] + random.choice(letters) + word[at:]
    if kind == "replace":
        return word[:at] + random.choice(letters) + word[at + 1:]
    return word[:at] + word[at + 1:at + 2] + word[at:at + 1] + word[at + 2:]

def problems(**settings):
    try:
        LemaConfig("model", **settings)
    except SettingsError as error:
        return error.problems
    return ()

faults, misspelt = [], 0
for field in fields:
    wrong = set()
    for _ in range(2):
        wrong |= {once := slip(field), slip(once) if len(field) > 4 else once}  # `need` is nearer to seed than to head
    for name in wrong - set(fields):
        misspelt += 1
        found = problems(**{name: 1})
        if len(found) != 1 or found[0].key != name or field not in found[0].how or found[0].how.count(" or ") > 2:
            faults.append(["misspelt", field, name, [str(one) for one in found]])

wrong_types = 0
for field in fields[1:]:
    # names with texts are right in these
    named = {"a": "x"} if field not in ("train_data", "eval_data", "roles") else {"a": 1}
    if field == "row_format":  # whose own settings are named
        named = [1]
    if field.endswith("_kwargs"):
        named = "x=1"
    for value in [named, [[1]], object(), 1 + 2j, b"x", float("nan"), float("inf"), "", -1.5]:
        wrong_types += 1
        found = problems(**{field: value})
        if [one.key for one in found] != [field] or field not in found[0].what:
            faults.append(["type", field, repr(value), [str(one) for one in found]])
print(json.dumps({"faults": faults, "misspelt": misspelt, "types": wrong_types,
                  "heavy": sorted({"torch", "transformers", "peft", "datasets"} & sys.modules.keys())}))
"""


def run_python(code: str) -> Any:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
def test_every_misspelt_name_and_wrong_type_is_refused_before_torch_is_imported() -> None:
    outcome = run_python(EVERY_SLIP)
    assert outcome["faults"] == []
    assert outcome["heavy"] == []
    assert outcome["misspelt"] > 2 * len(LemaConfig.model_fields)
    assert outcome["types"] > 5 * len(LemaConfig.model_fields)


def test_defaults_are_the_documented_ones() -> None:
    config = LemaConfig("model")
    documented = {
        "model_name_or_path": "model",
        "model_type": None,
        "gbi_path": None,
        "device": "auto",
        "strategy": "streaming",
        "save_steps": 500,
        "output_dir": "output",
        "lora_rank": 16,
        "lora_alpha": 32,
        "learning_rate": 1e-4,
        "gradient_checkpointing": "auto",
    }
    assert config.device_memory == "auto"
    assert list(config.to_dict().items())[: len(documented)] == list(documented.items())


def test_settings_by_position_follow_the_order_of_the_fields() -> None:
    config = LemaConfig("model", None, "weights.safetensors", "cpu", "RESIDENT", 7)
    assert (config.gbi_path, config.device, config.save_steps) == ("weights.safetensors", "cpu", 7)
    assert config.strategy is MemoryStrategy.RESIDENT
    with pytest.raises(ConfigError, match="device is given by position and by name"):
        LemaConfig("model", None, None, "cpu", device="cpu")
    with pytest.raises(ConfigError, match="by position; there are"):
        LemaConfig(*["x"] * (len(LemaConfig.model_fields) + 1))


def test_every_problem_is_listed_at_once() -> None:
    with pytest.raises(SettingsError) as caught:
        LemaConfig(
            lora_rnak=8, batch_size=0, overlong="trunc", learning_rate="1e-4", lora_rank=None
        )
    by_key = {problem.key: problem for problem in caught.value.problems}
    assert set(by_key) == {
        "model_name_or_path",
        "lora_rnak",
        "batch_size",
        "overlong",
        "learning_rate",
        "lora_rank",
    }
    assert by_key["lora_rnak"].how == "did you mean lora_rank?"
    assert by_key["batch_size"].what == "batch_size must be at least 1, not 0"
    assert by_key["overlong"].how == "did you mean truncate?"
    assert by_key["learning_rate"].what == "learning_rate must be a number, not '1e-4'"
    assert by_key["lora_rank"].how == "leave it out for the default, 16"
    for problem in caught.value.problems:
        assert problem.what in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("lora_r", "lora_rank"),
        ("base_model", "model_name_or_path"),
        ("lr", "learning_rate"),
        ("epochs", "num_train_epochs"),
        ("r", "lora_rank"),
        ("init_lora_weights", "lora_init"),
        ("use_rslora", "lora_use_rslora"),
        ("bias", "lora_bias"),
        ("target_parameters", "lora_target_parameters"),
    ],
)
def test_names_of_other_trainers_lead_to_ours(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LemaConfig("model", **{theirs: 1})
    assert caught.value.how == f"did you mean {ours}?"


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("dataset_text_field", "columns: {text: NAME}"),
        ("assistant_only_loss", "train_on: assistant"),
        ("completion_only_loss", "train_on: assistant"),
        ("train_on_inputs", "train_on: all"),
        ("roles_to_train", "train_on:"),
        ("mask_history", "train_on: last"),
        ("chat_template_jinja", "chat_template:"),
        ("field_messages", "columns: {messages: NAME}"),
        ("message_property_mappings", "columns: {role: NAME, content: NAME}"),
        ("message_field_training", "of a message already works"),
        ("excess_length_strategy", "overlong:"),
        ("adapter", "quantize_base: nf4"),
        ("use_peft", "not needed"),
        ("peft_config", "lora_rank, lora_alpha, lora_target_modules"),
        ("dataset_name", "train_data: {path: org/name"),
        ("dataset_config", "name: subset"),
        ("dataset_train_split", "split: train"),
        ("dataset_num_proc", "not needed"),
        ("dataset_prepared_path", "data_cache: "),
        ("dataloader_num_workers", "not needed"),
        ("wandb_project", "WANDB_PROJECT"),
        ("logging_dir", "TENSORBOARD_LOGGING_DIR"),
        ("eos_token", "the tokenizer's own"),
        ("strict", "not needed"),
        ("eval_strategy", "eval_steps"),
        ("save_strategy", "save_steps: "),
        ("do_train", "`lema train`"),
        ("do_eval", "eval_data"),
        ("bf16", "dtype: bfloat16"),
        ("fp16", "dtype: float16"),
        ("load_in_4bit", "quantize_base: nf4"),
        ("load_in_8bit", "quantize_base: int8"),
    ],
)
def test_names_of_other_trainers_are_answered(theirs: str, ours: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LemaConfig("m", **{theirs: "x"})
    assert ours in caught.value.how and "did you mean" not in caught.value.how


def test_every_setting_that_an_answer_names_is_there() -> None:
    from lema.config.foreign import FOREIGN_HINTS

    assert not FOREIGN_HINTS.keys() & LemaConfig.model_fields.keys()
    named = {
        setting
        for how in FOREIGN_HINTS.values()
        for setting in re.findall(r"(?:here: |; )([a-z_]+): ", how)
    }
    assert (
        named <= LemaConfig.model_fields.keys()
        and {"columns", "train_on", "chat_template", "overlong"} <= named
    )


@pytest.mark.parametrize("share", [0.0, 0.1, 0.99])
def test_warmup_steps_below_one_are_a_share_of_the_steps_as_in_transformers(share: float) -> None:
    taken = LemaConfig("m", warmup_steps=share)
    assert (taken.warmup_steps, taken.warmup_ratio) == (None if share else 0, share)
    assert taken == LemaConfig("m", warmup_ratio=share)


@pytest.mark.parametrize(
    "given", [{"warmup_steps": 1.5}, {"warmup_steps": 0.1, "warmup_ratio": 0.2}]
)
def test_other_broken_numbers_of_warmup_steps_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="warmup_steps must be a whole number"):
        LemaConfig("m", **given)
    with pytest.raises(ConfigError, match=r"warmup_steps must be a whole number, not -0\.1"):
        LemaConfig("m", warmup_steps=-0.1)


def test_columns_are_ours_to_theirs() -> None:
    assert LemaConfig("m", columns={"prompt": "question", "role": "who"}).columns == {
        "prompt": "question",
        "role": "who",
    }
    with pytest.raises(ConfigError, match=r"not 'question'; write \{prompt: question\}"):
        LemaConfig("m", columns={"question": "prompt"})
    with pytest.raises(ConfigError, match="must name each of your columns once"):
        LemaConfig("m", columns={"prompt": "a", "completion": "a"})


def test_a_column_can_be_left_unread() -> None:
    columns = LemaConfig("m", columns={"images": "NONE", "input": None, "prompt": "q"}).columns
    assert columns == {"images": None, "input": None, "prompt": "q"}
    with pytest.raises(ConfigError, match="must name a field for 'role'"):
        LemaConfig("m", columns={"role": "NONE"})


def test_bytes_of_an_image_may_have_units() -> None:
    sizes = {"1MB": 10**6, "2 MiB": 2 * 1024**2, "512": 512, 4e6: 4_000_000, 77: 77}
    for size, expected in sizes.items():
        assert LemaConfig("m", max_image_bytes=size).max_image_bytes == expected
    for wrong in ("auto", 0.5, 1.0, "0.5", "many", 0, -1, True):
        with pytest.raises(ConfigError, match="max_image_bytes"):
            LemaConfig("m", max_image_bytes=wrong)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("save_steps", [0, 1], [-1, 1.5, True]),
        ("lora_rank", [1, 256], [0, 8.0]),
        ("lora_alpha", [0.5, 16], [0, -1]),
        ("learning_rate", [0, 1e-4, 1], [-1e-9]),
        ("gradient_checkpointing", [True, False], [1, "yes"]),
        (
            "lora_target_modules",
            ["q_proj", ["q_proj", "v_proj"], ("c_attn",), r".*\.[kv]_proj", "all-linear", None],
            [[], "", [1], ["q_proj", ""], "*_proj", "(q_proj"],
        ),
        ("lora_exclude_modules", ["q_proj", ["q_proj"], None], ["", [1], "(q_proj", 3]),
        (
            "lora_rank_pattern",
            [{}, {"q_proj": 2, r"layers\.\d\..*v_proj": 3}],
            [
                None,
                [],
                {"q_proj": 0},
                {"q_proj": 2.0},
                {"q_proj": "2"},
                {"(q_proj": 2},
                {"": 2},
                {3: 2},
            ],
        ),
        (
            "lora_alpha_pattern",
            [{}, {"q_proj": 2, "v_proj": 0.5}],
            [{"q_proj": 0}, {"q_proj": True}, {"[": 1}],
        ),
        ("lora_use_rslora", [True, False], [1, "yes", None]),
        (
            "lora_layers_to_transform",
            [0, 7, [3, 0], (1,), None],
            [-1, [], [-1], [1, -1], 1.0, "1", [True]],
        ),
        (
            "lora_init",
            [True, False, "gaussian", "orthogonal"],
            ["pissa", "guassian", "", 1, None, "True"],
        ),
        ("lora_lora_bias", [True, False], ["all", 1]),
        ("lora_bias", ["none", "all", "lora_only"], [True, False, "some", None]),
        (
            "lora_modules_to_save",
            [["lm_head"], ("embed_tokens",), None],
            [[], "lm_head", [""], [3]],
        ),
        ("lora_use_dora", [True, False], [1, "yes"]),
        ("lora_target_parameters", [["experts.down_proj"], [], None], ["experts.down_proj", [""]]),
        (
            "lora_trainable_token_indices",
            [[3, 0], {"wte": [1]}, None],
            [[], [-1], 3, {"wte": []}, {"": [1]}, ["a"]],
        ),
        ("lora_ensure_weight_tying", [True, False], [1, "yes"]),
        ("lora_dropout", [0.0, 0.999], [1.0, -0.1]),
        ("dtype", ["float32", "bfloat16", "float16", None], ["fp32", "int8"]),
        ("max_grad_norm", [1.0, None], [0, -1.0]),
        (
            "device_memory",
            ["4GB", "auto", 0.5, 1000, None],
            ["4 apples", "4G", 0, -1, True, 1.5, "0GB", "", [1]],
        ),
        ("host_memory", ["512MiB", 1.0], [math.inf, 0.0]),
        ("seed", [0, 2**32 - 1], [-1, 2**32]),
        ("num_train_epochs", [0.5, 3], [0]),
        ("adam_beta1", [0, 0.9], [1.0]),
        ("adam_epsilon", [1e-12], [0.0]),
        ("lr_scheduler_type", ["cosine"], ["sine"]),
        ("warmup_ratio", [0.0, 0.5], [1.0]),
        ("train_data", ["a.jsonl", ["a.jsonl", Path("b.csv")]], [[], [""], 3]),
        ("eval_split", [0.1, 5, None], [0, 0.0, 1.0, 1.5, -1, True]),
        ("report_to", ["wandb", [], ["wandb", "tensorboard"]], [None, 3]),
        (
            "activation_offloading",
            [True, False, "legacy", "disk"],
            [1, "True", "Disk", "offload_disk", "", None, []],
        ),
        ("output_dir", ["out", Path("out")], ["", 3]),
    ],
)
def test_values_at_the_edge(field: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        LemaConfig("model", **{field: value})
    for value in bad:
        with pytest.raises(SettingsError) as caught:
            LemaConfig("model", **{field: value})
        assert [problem.key for problem in caught.value.problems] == [field]


@pytest.mark.parametrize(
    "settings",
    [
        {"eval_data": "e.jsonl", "eval_split": 0.1},
        {"warmup_steps": 10, "warmup_ratio": 0.1},
        {"warmup_steps": 10, "max_steps": 9},
        {"lora_target_modules": "all-linear", "lora_layers_to_transform": [1]},
        {"lora_target_modules": r".*q_proj", "lora_layers_to_transform": 1},
        {"lora_init": "gaussian", "lora_lora_bias": True},
        {"lora_init": "orthogonal", "lora_rank": 3},
        {"lora_init": "orthogonal", "lora_rank_pattern": {"q_proj": 3}},
        {"lora_init": "orthogonal", "lora_target_parameters": ["experts.down_proj"]},
        {"lora_use_dora": True, "lora_lora_bias": True},
        {"lora_target_parameters": ["experts.down_proj"], "lora_dropout": 0.1},
        {"lora_target_parameters": ["experts.down_proj"], "lora_use_dora": True},
        {"lora_target_parameters": ["experts.down_proj"], "lora_lora_bias": True},
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        LemaConfig("model", **settings)
    for name in settings:
        assert name in str(caught.value)
        LemaConfig("model", **{name: settings[name]})


def test_layers_inputs_wait_in_one_place() -> None:
    options = {"gradient_checkpointing": True}
    for mode, place in (
        (True, "host"),
        ("legacy", "host"),
        ("hidden_states", "host"),
        ("disk", "disk"),
    ):
        for agreed in ("auto", place):
            config = LemaConfig(
                "model", activation_offloading=mode, boundary_activations=agreed, **options
            )
            assert config.offloading_tier == place
        for other in {"device", "host", "disk"} - {place}:
            with pytest.raises(ConfigError, match="boundary_activations") as caught:
                LemaConfig(
                    "model", activation_offloading=mode, boundary_activations=other, **options
                )
            assert "activation_offloading" in str(caught.value)
    assert LemaConfig("model", boundary_activations="host", **options).offloading_tier is None


def test_hidden_states_alone_wait_only_where_the_rest_is_recomputed() -> None:
    with pytest.raises(
        ConfigError, match="without gradient_checkpointing layers keep more"
    ) as caught:
        LemaConfig("model", activation_offloading="hidden_states", gradient_checkpointing=False)
    assert [problem.key for problem in caught.value.problems] == ["activation_offloading"]  # type: ignore[attr-defined]
    config = LemaConfig("model", activation_offloading="hidden_states", gradient_checkpointing=True)
    with pytest.raises(ConfigError, match="activation_offloading"):
        config.gradient_checkpointing = False


def test_a_list_of_layers_needs_numbers_to_count_in_it() -> None:
    with pytest.raises(
        ConfigError, match="lora_layers_pattern names the list in which lora_layers_to_transform"
    ):
        LemaConfig("model", lora_layers_pattern="layers")
    LemaConfig("model", lora_layers_pattern="layers", lora_layers_to_transform=1)


def test_no_modules_at_all_are_wanted_only_where_parameters_are() -> None:
    with pytest.raises(ConfigError, match="lora_target_modules is empty; name modules"):
        LemaConfig("model", lora_target_modules=[])
    LemaConfig("model", lora_target_modules=[], lora_target_parameters=["experts.down_proj"])


def test_a_contradiction_is_said_of_the_line_it_is_on(tmp_path: Path) -> None:
    text = "model_name_or_path: m\nlora_init: orthogonal\nlora_rank: 3\n"
    with pytest.raises(ConfigError, match="even rank") as caught:
        LemaConfig.from_yaml(write(tmp_path / "c.yaml", text))
    assert caught.value.where == f"{tmp_path / 'c.yaml'}:2"


def test_a_refused_assignment_leaves_the_config_as_it_was() -> None:
    config = LemaConfig("model", warmup_steps=3)
    before = config.model_copy()
    for name, value in [
        ("warmup_ratio", 0.5),
        ("lora_rank", 0),
        ("lora_rnak", 8),
        ("strategy", "disk"),
    ]:
        with pytest.raises(ConfigError, match=name):
            setattr(config, name, value)
    assert config == before
    assert config.model_fields_set == {"model_name_or_path", "warmup_steps"}
    config.strategy = "resident"  # type: ignore[assignment]
    assert config.strategy is MemoryStrategy.RESIDENT


def test_defaults_are_not_shared_between_configs() -> None:
    one = LemaConfig("model")
    other = LemaConfig("model")
    assert isinstance(one.report_to, list)
    one.report_to.append("wandb")
    assert other.report_to == []


def test_a_torch_dtype_means_its_name() -> None:
    import torch

    assert LemaConfig("model", dtype=torch.bfloat16).dtype == "bfloat16"
    with pytest.raises(ConfigError, match="int8"):
        LemaConfig("model", dtype=torch.int8)


def test_schedules_are_those_of_transformers_and_three_of_our_own() -> None:
    from typing import get_args

    from transformers import SchedulerType

    assert set(get_args(Scheduler)) == {kind.value for kind in SchedulerType} | {
        "wsd",
        "wsds",
        "cosine_rewarm",
    }


# What a YAML file may hold


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def laughs(form: str) -> str:
    """Ten lines, each with ten aliases of the one before: as values, or as mappings that are
    merged.
    """
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {form.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 11)]
    return "\n".join(lines)


def test_yaml_values_are_yaml_1_2(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: on\nlearning_rate: 1e-4\nlora_target_modules: [q_proj, "
        "v_proj]\ndevice_memory: 4e9\n"
    )
    config = LemaConfig.from_yaml(write(tmp_path / "c.yaml", text))
    assert (config.model_name_or_path, config.learning_rate) == ("on", 0.0001)
    assert config.lora_target_modules == ["q_proj", "v_proj"]
    assert parse_memory(config.device_memory or 0, 1) == 4_000_000_000


def test_a_date_is_text(tmp_path: Path) -> None:
    text = "model_name_or_path: m\noutput_dir: 2024-05-17\ntemplate_date: 2024-05-17\n"
    config = LemaConfig.from_yaml(write(tmp_path / "c.yaml", text))
    assert (config.output_dir, config.template_date) == ("2024-05-17", "2024-05-17")
    assert parse_value("2024-05-17", "--set") == "2024-05-17"
    assert LemaConfig("m", template_date=date(2024, 5, 17)).template_date == "2024-05-17"  # type: ignore[arg-type]
    for moment in ("2024-05-17T10:00:00", datetime(2024, 5, 17, 10)):
        with pytest.raises(ConfigError, match="must be a date such as 2026-03-31"):
            LemaConfig("m", template_date=moment)  # type: ignore[arg-type]


def test_characters_that_json_writes_as_two_escapes_are_whole(tmp_path: Path) -> None:
    text = json.dumps(
        {"model_name_or_path": "m", "train_data": ["\U0001f600.jsonl"], "run_name": "\U0001f600"}
    )
    config = LemaConfig.from_yaml(write(tmp_path / "c.json", text))
    assert (config.train_data, config.run_name) == (["\U0001f600.jsonl"], "\U0001f600")
    with pytest.raises(ConfigError, match="half of a character"):
        LemaConfig.from_yaml(write(tmp_path / "c.json", '{"model_name_or_path": "\\ud83d"}'))


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    assert (
        LemaConfig.from_yaml(
            write(tmp_path / "c.yaml", "\ufeffmodel_name_or_path: m\n")
        ).model_name_or_path
        == "m"
    )


def test_paths_in_yaml_stay_as_the_shell_sees_them(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "model_name_or_path: models/tiny\ntrain_data: data/*.jsonl\n")
    config = LemaConfig.from_yaml(path)
    assert (config.model_name_or_path, config.train_data) == ("models/tiny", "data/*.jsonl")


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("", "", "empty"),
        ("# only a comment\n", "", "empty"),
        ("- model_name_or_path: m\n", ":1", "key: value"),
        ("model_name_or_path\n", ":1", "key: value"),
        (
            "model_name_or_path: m\nseed: 1\n# no\nseed: 2\n",
            ":4",
            'duplicate key "seed" is given twice',
        ),
        ("model_name_or_path: m\n\nlora_rnak: 8\n", ":3", "did you mean lora_rank?"),
        ("model_name_or_path: m\nlora_rank: '8'\n", ":2", "whole number"),
        ("model_name_or_path: m\nlora_rank:\n", ":2", "lora_rank is empty"),
        ("model_name_or_path: m\nlora:\n  rank: 8\n", ":2", "unknown setting 'lora'"),
        ("model_name_or_path: m\n\tlora_rank: 8\n", ":2", "tab"),
        ("model_name_or_path: m\nseed: [1\n", ":3", "not YAML"),
        ("model_name_or_path: m\nseed: !!python/object:os.system x\n", ":2", "tags"),
        ("model_name_or_path: m\n---\nseed: 1\n", ":2", "more than one document"),
        ("model_name_or_path: m\nseed: *other\n", ":2", "undefined alias"),
        ("model_name_or_path: m\nseed: \x00\n", ":2", "control character"),
        ("model_name_or_path: m\n1: 2\n", ":2", "a key must be a name, not 1"),
        (b"model_name_or_path: m\nrun_name: caf\xe9\n", ":2", "not UTF-8"),
        ("model_name_or_path: m\nseed: " + "[" * 5000, ":2", "nested too deeply"),
        ("model_name_or_path: m\nseed: " + "[" * 201 + "]" * 201, ":2", "nested too deeply"),
        pytest.param(
            f"model_name_or_path: {'m' * 300_000}\n", "", "more than 262,144 bytes", id="long"
        ),
        pytest.param(
            "".join(f"key{number}: 1\n" for number in range(12_000)),
            "",
            "more than 20,000 values",
            id="many keys",
        ),
        pytest.param(laughs("[{}]"), "", "more than 20,000 values", id="aliases"),
        pytest.param(laughs("{{<<: [{}]}}"), "", "more than 20,000 values", id="merges"),
        ("a: &a [*a]\n", "", "more than 20,000 values"),
        ("seed: 1\n", "", "model_name_or_path is not given"),
        ("model_name_or_path: m\nseed: !!int abc\n", "", "not YAML"),
        (
            "model_name_or_path: m\nseed: 2024-13-45\n",
            ":2",
            "seed must be a whole number, not '2024-13-45'",
        ),
        ("model_name_or_path: m\neval_split: 0.1\neval_data: e\n", "", "exclude each other"),
    ],
)
def test_a_yaml_error_says_file_and_line(
    tmp_path: Path, text: str | bytes, place: str, words: str
) -> None:
    path = write(tmp_path / "c.yaml", text)
    with pytest.raises(ConfigError) as caught:
        LemaConfig.from_yaml(path)
    message = str(caught.value)
    assert words in message
    if words != "model_name_or_path is not given":
        assert f"{path}{place}" in message


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_a_yaml_file_that_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot read the config file") as caught:
        LemaConfig.from_yaml(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_several_yaml_problems_each_carry_their_line(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "lora_rnak: 8\nmodel_name_or_path: m\nbatch_size: 0\n")
    with pytest.raises(SettingsError) as caught:
        LemaConfig.from_yaml(path, seed="x")
    assert {problem.key: problem.location for problem in caught.value.problems} == {
        "lora_rnak": f"{path}:1",
        "batch_size": f"{path}:3",
        "seed": "",
    }


def test_overrides_replace_what_the_file_says_even_where_that_was_wrong(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", "model_name_or_path: m\nlora_rank: none\n")
    assert LemaConfig.from_yaml(path, lora_rank=4).lora_rank == 4


@pytest.mark.slow
@settings(deadline=None)  # how long it takes says nothing where others compute as well
@given(st.text(max_size=60) | st.binary(max_size=60))
def test_any_text_is_a_config_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, text: str | bytes
) -> None:
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(b"model_name_or_path: m\n" + data)
    try:
        config = LemaConfig.from_yaml(path)
    except ConfigError as error:
        assert str(path) in str(error)
    else:
        assert config.model_name_or_path


# What is written and read back


ANY_SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "strategy": st.sampled_from(["streaming", "Resident", MemoryStrategy.STREAMING]),
        "lora_rank": st.integers(1, 512),
        "lora_alpha": st.integers(1, 64) | st.floats(0.1, 64),
        "learning_rate": st.floats(0, 1, width=32, allow_subnormal=False),
        "lora_target_modules": st.none()
        | st.just("q_proj")
        | st.lists(st.just("c_attn"), min_size=1, max_size=3),
        "lora_rank_pattern": st.dictionaries(
            st.sampled_from(["q_proj", r"\\d"]), st.integers(1, 64)
        ),
        "lora_alpha_pattern": st.dictionaries(
            st.just("v_proj"), st.integers(1, 64) | st.floats(0.1, 64)
        ),
        "lora_init": st.sampled_from([True, False, "gaussian"]),
        "lora_trainable_token_indices": st.none()
        | st.lists(st.integers(0, 9), min_size=1, max_size=3),
        "device_memory": st.sampled_from([None, "4GB", "auto", 0.25, 10**9]),
        "eval_split": st.sampled_from([None, 0.1, 3]),
        "activation_offloading": st.sampled_from([True, False, "legacy", "disk"]),
        "run_name": st.none()
        | st.text(min_size=1, max_size=10).filter(lambda text: text.isprintable()),
    },
)


@settings(deadline=None)
@given(ANY_SETTINGS)
def test_what_is_saved_is_what_is_read(
    tmp_path_factory: pytest.TempPathFactory, given_: dict[str, Any]
) -> None:
    config = LemaConfig("model", **given_)
    assert LemaConfig(**json.loads(json.dumps(config.to_dict()))) == config
    directory = tmp_path_factory.getbasetemp() / "saved"
    config.save_pretrained(directory)
    assert LemaConfig.from_pretrained(directory) == config
    assert [file.name for file in directory.iterdir()] == [CONFIG_NAME]
    assert LemaConfig.from_pretrained(directory, seed=7).seed == 7


def test_a_saved_config_with_an_unknown_setting_is_refused_by_file(tmp_path: Path) -> None:
    write(tmp_path / CONFIG_NAME, '{"model_name_or_path": "m", "lora_rnak": 8}')
    with pytest.raises(ConfigError, match="did you mean lora_rank") as caught:
        LemaConfig.from_pretrained(tmp_path)
    assert caught.value.where == str(tmp_path / CONFIG_NAME)


@pytest.mark.parametrize("text", [None, "", "[]", '{"model_name_or_path": ', b"\xff"])
def test_a_saved_config_that_cannot_be_read_is_named(
    tmp_path: Path, text: str | bytes | None
) -> None:
    if text is not None:
        write(tmp_path / CONFIG_NAME, text)
    with pytest.raises(ConfigError) as caught:
        LemaConfig.from_pretrained(tmp_path)
    assert caught.value.where == str(tmp_path / CONFIG_NAME)


def test_a_config_that_cannot_be_saved_is_a_disk_error(tmp_path: Path) -> None:
    blocked = write(tmp_path / "file", "")
    with pytest.raises(DiskError, match="cannot write the config"):
        LemaConfig("model").save_pretrained(blocked / "inside")


def test_the_schema_describes_every_setting_and_forbids_others() -> None:
    schema = LemaConfig.json_schema()
    assert list(schema["properties"]) == [*LemaConfig.model_fields, *backend_settings()]
    assert all(setting.get("description") for setting in schema["properties"].values())
    assert schema["additionalProperties"] is False
    json.dumps(schema, allow_nan=False)


# Amounts of memory


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("4GB", 4_000_000_000),
        ("4 gb", 4_000_000_000),
        ("1.5KiB", 1536),
        ("512MiB", 512 * 2**20),
        ("2TB", 2 * 10**12),
        ("100B", 100),
        ("12345", 12345),
        (12345, 12345),
        (1, 1),
        (1.0, 1000),
        (0.25, 250),
        ("0.25", 250),
        ("auto", 900),
        ("AUTO", 900),
    ],
)
def test_amounts_of_memory(value: int | float | str, expected: int) -> None:
    assert parse_memory(value, 1000) == expected


@settings(deadline=None)
@given(st.floats(min_value=0, max_value=1, exclude_min=True), st.integers(1, 2**45))
def test_a_fraction_is_at_least_a_byte_and_at_most_the_whole(fraction: float, total: int) -> None:
    assert 1 <= parse_memory(fraction, total) <= total


@pytest.mark.parametrize(
    "value",
    ["4G", "GB", "-1GB", "0", "1e400GB", "9" * 30, math.nan, math.inf, 2.5, 0, -3, False, "٤GB"],
)
def test_what_is_no_amount_of_memory(value: Any) -> None:
    with pytest.raises(ConfigError, match="not an amount of memory"):
        parse_memory(value, 1000)


def test_an_error_that_lists_millions_tells_of_the_first_and_how_much_more() -> None:
    error = ConfigError(", ".join(map(str, range(1_000_000))), where="here", how="mend it")
    assert str(error).startswith("0, 1, 2")
    assert "characters more" in str(error)
    assert len(str(error)) < 3000


def test_a_message_has_twenty_lines_at_most_and_says_how_many_items_it_leaves_out() -> None:
    whole = listed([*map(str, range(1000))])
    error = ConfigError(f"so many:{whole}", where="a\nb\nc\nd", how="e\nf\ng\nh")
    assert whole.splitlines()[1:] == [*(f"  - {number}" for number in range(14)), "  and 986 more"]
    assert len(str(error).splitlines()) == 20
    assert len(str(ConfigError("\n" * 1000))) < 100
    assert listed(["a " * 1000] * 10).endswith("\n  and 6 more")
    with pytest.raises(ConfigError, match="200 settings are wrong") as caught:
        LemaConfig("model", **{f"lora_ranc_{number}": 1 for number in range(200)})
    assert len(str(caught.value).splitlines()) <= 20
    assert "and 186 more" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"learning_rate": 1e300}, "learning_rate must be at most 1,000,000,000,000,000,000"),
        (
            {"gradient_accumulation_steps": 10**5000},
            "gradient_accumulation_steps must be at most 1,000,000,000,",
        ),
        ({"batch_size": 2**64}, "batch_size must be at most 1,000,000,000,000,000,000"),
        ({"batch_size": -(2**64)}, "batch_size must be at least -1,000,000,000,000,000,000"),
        ({"adam_epsilon": 1e-300}, "adam_epsilon must be 0 or at least 1.17549e-38 in size"),
        ({"adam_epsilon": 5e-324}, "adam_epsilon must be 0 or at least 1.17549e-38 in size"),
        ({"num_train_epochs": 1e-39}, "num_train_epochs must be 0 or at least 1.17549e-38 in size"),
        (
            {"gradient_accumulation_steps": 10**8},
            "gradient_accumulation_steps must be at most 100000",
        ),
        ({"output_dir": "a\0b"}, "output_dir must not contain a NUL character"),
        (
            {"train_data": {"one": ["a", "b\0"]}},
            r"train_data\.one\[1\] must not contain a NUL character",
        ),
        ({"train_data": {"one\0": "a"}}, "train_data must not contain a NUL character"),
    ],
    ids=lambda one: "-".join(one) if isinstance(one, dict) else "",
)
def test_a_value_that_no_setting_has_is_refused_by_name(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        LemaConfig("m", **settings)


def test_a_setting_named_by_half_a_character_is_refused_by_its_file(tmp_path):
    (tmp_path / CONFIG_NAME).write_text(
        '{"model_name_or_path": "m", "\\ud800": 1}', encoding="utf-8"
    )
    with pytest.raises(ConfigError) as caught:
        LemaConfig.from_pretrained(tmp_path)
    assert str(tmp_path / CONFIG_NAME) in str(caught.value)


@pytest.mark.parametrize(
    "text", ['{"a":' * 100_000, "[" * 100_000, "[1]", "{", "\ud800"], ids=range(5)
)
def test_a_config_beside_an_adapter_that_is_none_is_refused_by_file(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / CONFIG_NAME).write_text(text, encoding="utf-8", errors="surrogatepass")
    with pytest.raises(ConfigError) as caught:
        LemaConfig.from_pretrained(tmp_path)
    assert caught.value.where == str(tmp_path / CONFIG_NAME)


def test_settings_of_backends_that_are_no_mapping_are_named_also_beside_one_of_a_backend() -> None:
    with pytest.raises(ConfigError, match="backend_settings") as error:
        LemaConfig("m", train_data="x.txt", backend_settings=[1], neuron_runtime="emulated")
    assert "neuron_runtime" not in str(error.value)
