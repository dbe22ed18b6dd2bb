"""An adapter says which model it belongs to and is put on no other; one that PEFT has made can
begin a run.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from parity import trained
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import Checkpoint, micro_batches
from transformers import AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.config.lemaconfig import CONFIG_NAME
from lema.convert import merge_adapter
from lema.errors import AdapterError, ConfigError, WeightsError
from lema.lora.base import BASE_NAME
from lema.lora.files import CONFIG, WEIGHTS
from lema.storage.verify import base_fingerprint

OPTIONS = {"r": 3, "lora_alpha": 7, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}


@pytest.fixture
def base(tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]) -> Path:
    """A model of one's own, to be changed."""
    return shutil.copytree(checkpoint_of("llama").streamed, tmp_path / "base")


def change(model: Path) -> None:
    """Train the model on, as someone might who owns the path."""
    for file in model.glob("*.safetensors"):
        tensors = {name: tensor + 1e-3 for name, tensor in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})


def opened(model: Path, output: Path) -> LemaModel:
    return LemaModel(
        LemaConfig(str(model), device="cpu", output_dir=str(output), save_steps=0, lora_rank=2)
    )


def of_peft(model: Path, directory: Path) -> Path:
    """Make an adapter by PEFT alone, whose every number differs from its first value."""
    torch.manual_seed(5)
    made = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(**OPTIONS, task_type="CAUSAL_LM")
    )
    with torch.no_grad():
        for parameter in trained(made).values():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    made.save_pretrained(directory)
    return directory


@pytest.mark.slow
def test_it_is_written_beside_every_adapter_and_checkpoint_and_holds_on_the_same_files(
    base: Path, tmp_path: Path
) -> None:
    with closing(opened(base, tmp_path / "out")) as model:
        model.initialize_lora()
        trainer = model.get_trainer()
        trainer.train_step(micro_batches(1)[0])
        model.save_pretrained(tmp_path / "adapter")
        trainer.save_checkpoint(tmp_path / "checkpoint")
        expected = base_fingerprint(model.gbi)
    for place in (tmp_path / "adapter", tmp_path / "checkpoint"):
        about = json.loads((place / BASE_NAME).read_text())
        assert about["fingerprint"] == expected and about["config"]["rms_norm_eps"] == 1e-6
        assert not {"_name_or_path", "transformers_version", "dtype"} & about["config"].keys()
        assert about["compute_dtype"] == "float32"
        LemaModel.from_pretrained(place).close()
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), place)


@pytest.mark.slow
def test_a_model_that_has_changed_is_refused_wherever_they_meet(base: Path, tmp_path: Path) -> None:
    with closing(opened(base, tmp_path / "out")) as model:
        model.initialize_lora()
        trainer = model.get_trainer()
        trainer.train_step(micro_batches(1)[0])
        trainer.save_checkpoint(tmp_path / "checkpoint")
    kept = shutil.copytree(base, tmp_path / "kept")
    change(base)
    with pytest.raises(AdapterError, match="has changed since the adapter was trained") as raised:
        LemaModel.from_pretrained(tmp_path / "checkpoint")
    assert str(base) in raised.value.where and "model_name_or_path" in raised.value.how
    with pytest.raises(AdapterError, match="has changed"):
        merge_adapter(tmp_path / "checkpoint", tmp_path / "merged")
    with closing(opened(base, tmp_path / "out")) as model:
        model.initialize_lora()
        with pytest.raises(AdapterError, match="has changed"):
            model.get_trainer().load_checkpoint(tmp_path / "checkpoint")
    # The model as it was, elsewhere; or another one that is named.
    for other in (kept, base):
        LemaModel.from_pretrained(tmp_path / "checkpoint", model_name_or_path=str(other)).close()
    (tmp_path / "checkpoint" / BASE_NAME).write_text("{}")
    with pytest.raises(AdapterError, match="does not name"):
        merge_adapter(tmp_path / "checkpoint", tmp_path / "merged")
    (tmp_path / "checkpoint" / BASE_NAME).unlink()
    merge_adapter(tmp_path / "checkpoint", tmp_path / "merged")


def test_an_adapter_of_pefts_begins_a_run_and_comes_back_to_peft(
    base: Path, tmp_path: Path
) -> None:
    foreign = of_peft(base, tmp_path / "foreign")
    with closing(opened(base, tmp_path / "out")) as model:
        model.begin_with_adapter(foreign)
        assert model.lora_manager is not None
        found = {
            name: parameter.detach().clone()
            for name, parameter in trained(model.lora_manager).items()
        }
        whole = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), foreign, is_trainable=True
        )
        expected = trained(whole)
        assert found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in found
        )
        logits: list[torch.Tensor] = []
        batch = micro_batches(1)[0]
        model.adapter.loss([batch], logits=logits)
        with torch.no_grad():
            assert torch.equal(
                logits[0], whole.train()(input_ids=batch["input_ids"], use_cache=False).logits
            )
        model.get_trainer().train_step(batch)
        model.save_pretrained(tmp_path / "back")
        with pytest.raises(ConfigError, match="has an adapter already"):
            model.begin_with_adapter(foreign)
    back = load_file(tmp_path / "back" / WEIGHTS)
    before = load_file(foreign / WEIGHTS)
    assert back.keys() == before.keys() and any(
        not torch.equal(back[name], before[name]) for name in back
    )
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "back")
    config = again.peft_config["default"]
    assert (config.r, config.lora_alpha, config.use_rslora) == (3, 7, True)


def test_it_begins_no_run_on_another_model(base: Path, tmp_path: Path) -> None:
    foreign = of_peft(base, tmp_path / "foreign")
    moved = shutil.copytree(base, tmp_path / "moved")
    with closing(opened(moved, tmp_path / "out")) as model:  # the same files elsewhere
        model.begin_with_adapter(foreign)
    change(moved)
    with closing(opened(moved, tmp_path / "out")) as model:
        with pytest.raises(AdapterError, match="whose files are others") as raised:
            model.begin_with_adapter(foreign)
        assert model.lora_manager is None and str(moved) in raised.value.where
    shutil.rmtree(base)
    with closing(opened(moved, tmp_path / "out")) as model:
        with pytest.raises(AdapterError, match="not here to be compared"):
            model.begin_with_adapter(foreign)
        config = json.loads((foreign / "adapter_config.json").read_text())
        (foreign / "adapter_config.json").write_text(
            json.dumps(config | {"base_model_name_or_path": None})
        )
        with pytest.warns(UserWarning, match="does not name"):
            model.begin_with_adapter(foreign)
    with (
        closing(opened(moved, tmp_path / "out")) as model,
        pytest.raises(AdapterError, match="no adapter in PEFT's format"),
    ):
        model.begin_with_adapter(moved)


@pytest.mark.parametrize("name", [CONFIG_NAME, CONFIG])
def test_what_is_wrong_with_the_model_that_an_adapter_names_is_said_of_the_file_that_names_it(
    name: str, base: Path, tmp_path: Path
) -> None:
    adapter = of_peft(base, tmp_path / "adapter")
    content = json.loads((adapter / CONFIG).read_text())
    if name == CONFIG_NAME:
        LemaConfig(str(tmp_path / "gone"), device="cpu").save_pretrained(adapter)
    else:
        (adapter / CONFIG).write_text(
            json.dumps(content | {"base_model_name_or_path": str(tmp_path / "gone")})
        )
    for use in (
        lambda: LemaModel.from_pretrained(
            adapter, **({} if name == CONFIG_NAME else {"device": "cpu"})
        ),
        lambda: merge_adapter(adapter, tmp_path / "merged"),
    ):
        with pytest.raises(WeightsError) as caught:
            use()
        assert str(adapter / name) in caught.value.where
    with pytest.raises(WeightsError) as caught:
        LemaModel.from_pretrained(adapter, device="cpu", model_name_or_path=str(tmp_path / "mine"))
    assert str(adapter) not in caught.value.where
