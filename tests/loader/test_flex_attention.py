"""Flex attention has no backward on a CPU: a run that needs one is refused in a sentence, and
evaluation works.
"""

from pathlib import Path

import pytest
import torch
from asloaded import edit_config, llama, opened, rows, whole, write_model
from transformers import AutoModelForCausalLM

from lema import LemaConfig
from lema.errors import ConfigError
from lema.model.state.attention import COMPILED, attention_without_values, supported_only
from lema.plan.blueprint import draw_up
from lema.plan.plan import make_plan
from lema.plan.work.workload import MicroBatch, measure

pytestmark = pytest.mark.filterwarnings("ignore")

SAID = (
    "this device cannot compute what the model asks for: FlexAttention does not support "
    "backward on CPU"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(llama(), tmp_path / "model")


def test_the_whole_model_has_no_backward(model: Path) -> None:
    refusing = AutoModelForCausalLM.from_pretrained(model, attn_implementation=COMPILED)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        refusing(**rows(9)[0])


def test_training_is_refused_in_a_sentence(model: Path) -> None:
    with (
        opened(model, attn_implementation=COMPILED) as streamed,
        pytest.raises(ConfigError, match=SAID) as refused,
    ):
        streamed.adapter.loss(rows(9))
    assert "in the forward of layer" in str(refused.value)
    assert "attn_implementation" in str(refused.value)


def test_what_a_models_config_says_is_left_to_the_library(model: Path) -> None:
    edit_config(model, attn_implementation=COMPILED)
    with (
        pytest.warns(UserWarning, match=rf"attn_implementation: {COMPILED}.* is ignored"),
        opened(model) as streamed,
    ):
        assert streamed.skeleton.config._attn_implementation == "sdpa"


def test_a_plan_is_refused_in_the_same_sentence(model: Path) -> None:
    with pytest.raises(ConfigError, match=SAID):
        make_plan(LemaConfig(str(model), device="cpu", attn_implementation=COMPILED))


def test_memory_is_that_of_attention_that_keeps_no_scores(model: Path) -> None:
    works = []
    for name in (COMPILED, "sdpa"):
        drawn = draw_up(LemaConfig(str(model), device="cpu", attn_implementation=name))
        works.append(measure(drawn.model, drawn.layers, MicroBatch(2, 16), 16))
        assert drawn.model.config._attn_implementation == name
    assert works[0] == works[1]


def test_a_model_without_other_fused_attention_has_a_stand_in(model: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, attn_implementation=COMPILED)
    for part in (base, base.model):
        part._supports_sdpa = False
    with attention_without_values(base):
        assert base.config._attn_implementation == "eager"
    assert base.config._attn_implementation == COMPILED


def test_other_errors_pass() -> None:
    with pytest.raises(RuntimeError, match="something else"), supported_only("there"):
        raise RuntimeError("something else")
    with pytest.raises(ConfigError, match="no such kernel") as refused, supported_only("there"):
        raise NotImplementedError("no such kernel")
    assert refused.value.where == "there"


@pytest.mark.exhaustive
def test_evaluation_is_that_of_the_whole_model(model: Path) -> None:
    (batch,) = rows(9)
    with opened(model, attn_implementation=COMPILED) as streamed, torch.no_grad():
        streamed.lora_manager.eval()
        logits: list[torch.Tensor] = []
        streamed.adapter.evaluate([batch], logits)
        expected = (
            whole(model, streamed, attn_implementation=COMPILED)
            .eval()(input_ids=batch["input_ids"])
            .logits
        )
    assert torch.equal(logits[0], expected)
