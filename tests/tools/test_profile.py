"""`lema profile`: what a step is spent on, counted against torch's own counter, and what a user
gets of it.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import assert_refused, lema
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, AutoModelForCausalLM

from lema import LemaConfig, LemaModel
from lema.train.plain.stage import plain_data
from lema.train.run import load_data
from lema_tools.demo.run import write_files
from lema_tools.profile.stepparts import PARTS, Spans, StepProfile, profile_steps

# of no matrix of the model is a side 5 long
CHANGES: dict[str, Any] = {
    "lora_rank": 5,
    "max_length": 32,
}


class Counted(TorchDispatchMode):
    """Counts the arithmetic of matrix products as torch's table of formulas does."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_files(tmp_path_factory.mktemp("demo")).config


@pytest.fixture(scope="module")
def found(config: Path) -> StepProfile:
    spans = Spans()
    model = LemaModel(LemaConfig.from_yaml(config, **CHANGES), trace=spans)
    try:
        return profile_steps(model, spans, 1)
    finally:
        model.close()


def test_the_parts_add_up_to_the_step(found: StepProfile) -> None:
    assert set(found.parts) == set(PARTS)
    assert sum(part.seconds for part in found.parts.values()) == pytest.approx(found.step_seconds)
    assert all(part.seconds >= 0 for part in found.parts.values())
    assert sum(one["share"] for one in found.to_dict()["parts"].values()) == pytest.approx(1)


def test_the_arithmetic_is_what_torch_counts(found: StepProfile, config: Path) -> None:
    model = LemaModel(LemaConfig.from_yaml(config, **CHANGES))
    model.initialize_lora()
    trainer = model.get_trainer()
    data = plain_data(trainer, load_data(model)[0])
    trainer.accumulate(data.draw(0).micro_batches)
    with Counted() as counted:
        trainer.accumulate(data.draw(1).micro_batches)
    model.close()
    assert counted.flops > 0
    parts = found.parts
    assert (
        parts["base matmuls"].flops + parts["adapter matmuls"].flops + parts["loss"].flops
        == counted.flops
    )
    assert found.flops == counted.flops + parts["attention"].flops


def test_fast_arithmetic_has_the_same_products(found: StepProfile, config: Path) -> None:
    """Though some are added to what is there, and others written to where their result belongs."""
    spans = Spans()
    model = LemaModel(LemaConfig.from_yaml(config, **CHANGES, arithmetic="fast"), trace=spans)
    try:
        fast = profile_steps(model, spans, 1)
    finally:
        model.close()
    assert fast.parts["base matmuls"].flops == found.parts["base matmuls"].flops
    assert fast.parts["adapter matmuls"].flops == pytest.approx(
        found.parts["adapter matmuls"].flops, rel=0.2
    )


def test_adapters_products_are_told_from_those_of_the_base(
    found: StepProfile, config: Path
) -> None:
    """Each adapted linear multiplies by A and B where the base multiplies by its weight, forward
    and backward.
    """
    model = LemaModel(LemaConfig.from_yaml(config, **CHANGES))
    model.initialize_lora()
    layer = model.split.layers[0]
    sides = [one.base_layer.weight.shape for one in layer.modules() if hasattr(one, "base_layer")]
    model.close()
    assert len(sides) == 7
    # Of the base's three passes (forward, again, and for the input's gradient) the top layer has
    # two, and one product is left out of each other layer's second. Adapters have four, of which
    # the top layer has three; the gradient of nothing is formed below the lowest layer.
    base = sum(rows * columns for rows, columns in sides)
    adapter = 5 * sum(sum(side) for side in sides)
    ratio = found.parts["adapter matmuls"].flops / found.parts["base matmuls"].flops
    assert adapter / base < ratio < 2 * adapter / base


def test_what_a_user_gets(config: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = Path(LemaConfig.from_yaml(config).output_dir)
    capfd.readouterr()
    assert lema("profile", config, "--steps", "1", "--json", "--max-length", "32") == 0
    told = json.loads(capfd.readouterr().out)
    assert {
        "device",
        "steps",
        "tokens",
        "step_seconds",
        "watched_seconds",
        "parts",
        "limit_seconds",
        "flops",
    } < set(told)
    assert {"bytes_read", "disk_speed", "memory_speed", "flops_per_second"} < set(told)
    assert set(told["parts"]) == set(PARTS)
    keys = {"seconds", "share", "flops", "bytes", "limit_seconds", "of_limit"}
    assert all(set(part) == keys for part in told["parts"].values())
    assert told["steps"] == 1
    assert told["parts"]["Python"]["limit_seconds"] is None
    assert not output.exists()


def test_what_cannot_be_profiled_is_refused(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("model_name_or_path: nowhere\nlora_rnak: 4\n")
    assert_refused(capfd, 2, ["lora_rnak", "lora_rank"], "profile", wrong)
    assert_refused(capfd, 2, ["torch_compile"], "profile", config, "--torch-compile", "true")
    assert_refused(capfd, 2, ["no phases"], "profile", config, "--phase", "few")


PHASES = """
model_name_or_path: {model}
device: cpu
output_dir: {output}
gradient_checkpointing: true
batch_size: 2
micro_batch_size: 1
max_length: 16
save_steps: 0
train_data: {{rows: {rows}}}
phases:
  - {{name: whole, trains: full, tokens: 64, mixture: {{rows: 1.0}}}}
  - {{name: few, trains: lora, lora_rank: 5, tokens: 64, mixture: {{rows: 1.0}}}}
"""


def test_a_phase_is_profiled_by_its_name(
    config: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The phase that trains adapters, with its own settings and rows; the phase before it is not
    run.
    """
    given = LemaConfig.from_yaml(config)
    phased = tmp_path / "phases.yaml"
    rows = (
        given.train_data
        if isinstance(given.train_data, str)
        else next(iter(given.train_data or ()))
    )
    phased.write_text(
        PHASES.format(model=given.model_name_or_path, rows=rows, output=tmp_path / "out")
    )
    assert_refused(capfd, 2, ["several kinds", "--phase few"], "profile", phased)
    assert_refused(
        capfd, 2, ["no phase whole trains", "--phase few"], "profile", phased, "--phase", "whole"
    )
    assert lema("profile", phased, "--phase", "few", "--steps", "1", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert set(told["parts"]) == set(PARTS)
    assert told["tokens"] == 2 * 16
    assert told["parts"]["adapter matmuls"]["flops"] > 0
    assert not (tmp_path / "out").exists()


def test_products_of_experts_are_those_of_the_base_and_of_adapters(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a mixture of experts: nothing of theirs is counted as attention, which has its own
    arithmetic and no more.
    """
    hidden = 32
    inner = 64
    experts = 8
    chosen = 4
    layers = 4
    length = 16
    rows = 2
    settings: dict[str, Any] = {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "vocab_size": 64,
    }
    settings |= {"hidden_size": hidden, "moe_intermediate_size": inner, "num_experts": experts}
    settings |= {
        "num_experts_per_tok": chosen,
        "num_hidden_layers": layers,
        "decoder_sparse_step": 1,
    }
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **settings)).save_pretrained(
        tmp_path / "model"
    )
    ids = torch.randint(0, 64, (8, length), generator=torch.Generator().manual_seed(0)).tolist()
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"input_ids": row}) + "\n" for row in ids)
    )
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model_name_or_path: {tmp_path / 'model'}\ntrain_data: "
        f"{tmp_path / 'rows.jsonl'}\ndevice: cpu\n"
        f"output_dir: {tmp_path / 'out'}\nbatch_size: {rows}\nmicro_batch_size: "
        "1\ngradient_checkpointing: true\n"
        "max_steps: 4\nlora_rank: 5\n"
    )
    capfd.readouterr()
    assert lema("profile", config, "--steps", "1", "--json") == 0
    parts = json.loads(capfd.readouterr().out)["parts"]
    tokens = rows * length
    once = tokens * layers * chosen * 3 * 2 * hidden * inner  # of the experts, forward
    # with their gradients, and most of it recomputed
    assert parts["base matmuls"]["flops"] > 2 * once
    assert parts["adapter matmuls"]["flops"] > once * 5 / (hidden + inner)
    # Two products forward and five backward, recomputed at most once more, of all tokens of a row
    # with each other.
    assert parts["attention"]["flops"] <= 9 * 2 * layers * rows * length * length * hidden
