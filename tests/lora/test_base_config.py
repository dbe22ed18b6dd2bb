"""An adapter is put on no model whose config says other numbers than when it was trained,
whatever the weights are.
"""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tiny import Checkpoint, micro_batches

from lema import LemaConfig, LemaModel
from lema.convert import merge_adapter
from lema.convert.prepare import prepare
from lema.errors import AdapterError
from lema.lora.base import BASE_NAME
from lema.lora.baseconfig import OF_PREPARED, differences, of_numbers


def set_in(model: Path, **changes: Any) -> None:
    """Change keys of a model's config; None takes one away."""
    file = model / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.fixture
def base(tmp_path: Path, checkpoint_of: Callable[..., Checkpoint]) -> Path:
    """A model of one's own, to be changed."""
    return shutil.copytree(checkpoint_of("llama").streamed, tmp_path / "base")


def opened(model: Path, output: Path) -> LemaModel:
    return LemaModel(
        LemaConfig(str(model), device="cpu", output_dir=str(output), save_steps=0, lora_rank=2)
    )


@pytest.fixture
def checkpoint(base: Path, tmp_path: Path) -> Path:
    """What a step on the model leaves."""
    with closing(opened(base, tmp_path / "out")) as model:
        model.initialize_lora()
        trainer = model.get_trainer()
        trainer.train_step(micro_batches(1)[0])
        trainer.save_checkpoint(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


CHANGES: dict[str, dict[str, Any]] = {
    "norms": {"rms_norm_eps": 0.1},
    "rope": {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
    "activation": {"hidden_act": "gelu"},
    "window": {"max_position_embeddings": 96},
}


@pytest.mark.parametrize("changes", CHANGES.values(), ids=CHANGES)
def test_a_config_that_was_edited_is_refused_wherever_they_meet(
    changes: dict[str, Any], base: Path, checkpoint: Path, tmp_path: Path
) -> None:
    kept = shutil.copytree(base, tmp_path / "kept")
    set_in(base, **changes)
    (name,) = changes
    said = rf"config has changed since the adapter was trained: {name}"
    with pytest.raises(AdapterError, match=said) as raised:
        LemaModel.from_pretrained(checkpoint)
    assert str(base / "config.json") in raised.value.where and BASE_NAME in raised.value.how
    with pytest.raises(AdapterError, match=said):
        merge_adapter(checkpoint, tmp_path / "merged")
    with closing(opened(base, tmp_path / "out")) as model:
        model.initialize_lora()
        with pytest.raises(AdapterError, match=said):
            model.get_trainer().load_checkpoint(checkpoint)
    # The config as it was, elsewhere; or the other one, by name.
    for other in (kept, base):
        LemaModel.from_pretrained(checkpoint, model_name_or_path=str(other)).close()


def test_that_routers_have_a_loss_is_told() -> None:
    about = {"model_type": "mixtral", "router_aux_loss_coef": 0.02}
    said = [
        of_numbers(json.dumps(about | {"output_router_logits": value}).encode())
        for value in (False, True)
    ]
    assert said[0] is not None and said[1] is not None
    assert differences(said[0], said[1]) == ["output_router_logits is True, and it was False"]


def test_what_changes_no_number_may_change(base: Path, checkpoint: Path) -> None:
    changes = {
        "transformers_version": "5.0",
        "use_cache": False,
        "_name_or_path": "elsewhere",
        "eos_token_id": [1, 3],
    }
    set_in(base, **changes, dtype=None, torch_dtype="float32", bos_token_id=7)
    LemaModel.from_pretrained(checkpoint).close()


def test_nor_is_what_another_version_writes_otherwise_a_change(
    base: Path, checkpoint: Path
) -> None:
    config = json.loads((base / "config.json").read_text())
    theta = config["rope_parameters"]["rope_theta"]
    set_in(
        base,
        rope_parameters=None,
        rope_scaling=None,
        rope_theta=theta,
        attention_bias=None,
        mlp_bias=None,
    )
    LemaModel.from_pretrained(checkpoint).close()
    set_in(base, rope_theta=theta * 2)
    with pytest.raises(AdapterError, match=r"rope_parameters\.rope_theta is"):
        LemaModel.from_pretrained(checkpoint)


def test_a_prepared_model_is_compared_but_for_how_it_is_stored(
    base: Path, checkpoint: Path, tmp_path: Path
) -> None:
    prepare(str(base), tmp_path / "prepared", quantize="int8")
    about = json.loads((checkpoint / BASE_NAME).read_text())["config"]
    now = of_numbers((tmp_path / "prepared" / "config.json").read_bytes())
    assert now is not None and differences(about, now) and not differences(about, now, OF_PREPARED)
    settings_file = checkpoint / "lema_config.json"
    saved = json.loads(settings_file.read_text()) | {
        "model_name_or_path": str(tmp_path / "prepared")
    }
    settings_file.write_text(json.dumps(saved))
    LemaModel.from_pretrained(checkpoint).close()
    set_in(tmp_path / "prepared", rms_norm_eps=0.1)
    with pytest.raises(AdapterError, match=r"rms_norm_eps is 0\.1"):
        LemaModel.from_pretrained(checkpoint)


@pytest.mark.parametrize("damaged", [[], "text", {"model_type": "llama", "hidden_size": "x"}])
def test_a_record_that_is_none_is_refused(damaged: Any, checkpoint: Path) -> None:
    file = checkpoint / BASE_NAME
    file.write_text(json.dumps(json.loads(file.read_text()) | {"config": damaged}))
    with pytest.raises(AdapterError):
        LemaModel.from_pretrained(checkpoint)


def test_many_changes_are_counted() -> None:
    before = {"a": 1, "b": {"c": 2, "d": 3}, "e": 4}
    said = differences(before, {"a": 2, "b": {"c": 3, "d": 4}})
    assert said == [
        "a is 2, and it was 1",
        "b.c is 3, and it was 2",
        "b.d is 4, and it was 3",
        "and 1 more",
    ]
    assert not differences(before, dict(before))
    assert of_numbers(b"[1]") is None and of_numbers(b"\xff") is None
