"""Every option of PEFT's LoRA is a setting, changes no number, or is refused by name: none is
skipped in silence.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from peft import EvaConfig, LoraConfig, TaskType
from peft.tuners.lora.config import (
    ArrowConfig,
    BdLoraConfig,
    CordaConfig,
    KasaConfig,
    LoraGAConfig,
    MontecloraConfig,
    VeloraConfig,
)
from smallrun import adapter_of, peft_adapter, same, write_model

from lema import LemaConfig, LemaModel
from lema.config.peft import CARRIED, INITIAL_VALUES, REFUSED, REFUSED_INITIAL_VALUES, SETTING_OF
from lema.config.problems import SettingsError
from lema.errors import AdapterError
from lema.lora.files import read_lora_config

# A value of each refused option, as PEFT takes it.
EXAMPLES: dict[str, Any] = {
    "megatron_config": {"tensor_model_parallel_size": 1},
    "velora_config": VeloraConfig(),
    "alora_invocation_tokens": [1, 2],
    "use_qalora": True,
    "monteclora_config": MontecloraConfig(),
    "layer_replication": [[0, 4], [2, 5]],
    "use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"]),
    "arrow_config": ArrowConfig(),
    "kasa_config": KasaConfig(),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def fields() -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(LoraConfig)}


def test_every_option_is_a_setting_or_carried_or_refused() -> None:
    kinds = [set(SETTING_OF), set(CARRIED), set(REFUSED)]
    assert set().union(*kinds) == set(fields())
    assert sum(map(len, kinds)) == len(fields())
    assert set(SETTING_OF.values()) <= set(LemaConfig.model_fields)
    assert len(set(SETTING_OF.values())) == len(SETTING_OF)


def test_every_setting_of_the_adapter_is_an_option() -> None:
    named = {name for name in LemaConfig.model_fields if name.startswith("lora_")}
    assert named - {"lora_serving"} == set(SETTING_OF.values())  # which is of a server


def test_every_initial_value_is_drawn_or_refused() -> None:
    known = str(fields()["init_lora_weights"].type).partition("Literal[")[2].rstrip("]").split(", ")
    named = {name.strip("'").partition("_niter_")[0] for name in known}
    assert "gaussian" in named
    drawn = {name for name in INITIAL_VALUES if isinstance(name, str)}
    # PEFT takes that one without listing it
    assert named | {"lora_ga"} == drawn | REFUSED_INITIAL_VALUES.keys()


@pytest.mark.parametrize("name", [*REFUSED_INITIAL_VALUES, "pissa_niter_16", "PiSSA"])
def test_initial_values_that_need_the_base_weights_are_refused_by_name(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        LemaConfig("model", lora_init=name)
    (problem,) = caught.value.problems
    assert problem.key == "lora_init"
    assert f'"{name}"' in problem.what
    assert "gaussian" in problem.what  # what there is instead


def saved(directory: Path, base: Path, **options: Any) -> Path:
    """Save the config of an adapter, as PEFT writes it."""
    config = LoraConfig(
        target_modules=["q_proj"], task_type="CAUSAL_LM", base_model_name_or_path=str(base)
    )
    # PEFT checks some combinations, which is not the point here
    for (
        name,
        value,
    ) in options.items():
        setattr(config, name, value)
    config.save_pretrained(str(directory))
    return directory


def test_there_is_an_example_of_every_refused_option() -> None:
    assert EXAMPLES.keys() == REFUSED.keys()


@pytest.mark.filterwarnings("ignore:aLoRA is currently only supported")
@pytest.mark.parametrize("name", REFUSED)
def test_a_saved_adapter_with_a_refused_option_is_refused_by_name(
    name: str, llama: Path, tmp_path: Path
) -> None:
    saved(tmp_path, llama, **{name: EXAMPLES[name]})
    with pytest.raises(AdapterError) as caught:
        LemaModel.from_pretrained(tmp_path, device="cpu")
    assert f"{name}, which {REFUSED[name]}" in str(caught.value)
    assert caught.value.where == str(tmp_path / "adapter_config.json")


@pytest.mark.parametrize(
    "name", [*sorted(REFUSED_INITIAL_VALUES.keys() - {"eva"}), "pissa_niter_4", "no_such"]
)
def test_a_saved_adapter_with_refused_initial_values_is_refused_by_name(
    name: str, llama: Path, tmp_path: Path
) -> None:
    saved(tmp_path, llama, init_lora_weights=name)
    with pytest.raises(AdapterError, match=f'init_lora_weights "{name}", which'):
        read_lora_config(tmp_path)


def test_an_adapter_of_another_task_is_refused(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="task_type SEQ_CLS"):
        read_lora_config(saved(tmp_path, llama, task_type=TaskType.SEQ_CLS))
    assert read_lora_config(saved(tmp_path, llama, task_type=None)) is not None


def test_an_option_of_a_newer_peft_is_refused_where_it_is_used(llama: Path, tmp_path: Path) -> None:
    file = saved(tmp_path, llama) / "adapter_config.json"
    written = json.loads(file.read_text())
    # of which PEFT's warning, an error here, is not printed
    for unused in (
        "use_newest",
        "\ufeff" * 6000,
    ):
        file.write_text(json.dumps({**written, unused: False}))
        assert read_lora_config(tmp_path) is not None
    file.write_text(json.dumps({**written, "use_newest": True}))
    with pytest.raises(
        AdapterError, match="use_newest, which this version of PEFT does not know"
    ) as caught:
        read_lora_config(tmp_path)
    assert caught.value.how == "upgrade peft"


def test_how_an_adapter_on_disk_began_is_no_matter_where_the_base_weights_stayed(
    llama: Path, tmp_path: Path
) -> None:
    plain = peft_adapter(llama, tmp_path / "adapter")
    model = LemaModel.from_pretrained(plain, device="cpu")
    expected = adapter_of(model.skeleton)
    model.close()
    file = plain / "adapter_config.json"
    eva = dataclasses.asdict(EvaConfig(rho=1.0))
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "init_lora_weights": "eva", "eva_config": eva})
    )
    model = LemaModel.from_pretrained(plain, device="cpu")
    assert same(adapter_of(model.skeleton), expected)
    model.close()


@pytest.mark.filterwarnings("ignore:`(corda|eva)_config` specified but will be ignored")
@pytest.mark.parametrize(
    "ignored",
    [{"corda_config": CordaConfig()}, {"lora_ga_config": LoraGAConfig()}, {"qalora_group_size": 8}],
)
def test_what_says_nothing_by_itself_is_no_reason_to_refuse(
    ignored: dict[str, Any], llama: Path, tmp_path: Path
) -> None:
    assert read_lora_config(saved(tmp_path, llama, **ignored)) is not None
