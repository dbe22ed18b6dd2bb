"""In every type that streams, what PEFT trains beside LoRA's matrices has the gradients of the
whole model, bitwise.

All at once: embeddings and head whole, all biases, DoRA on every linear.
"""

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from aligned import aligned
from everytype import CLOSE, STREAMED, difference, micro_batches, whole_loss, write_model
from parity import DRAWS, SEED, trained
from peft import get_peft_model
from tinyconfig import tiny_config
from torch import nn
from trainedways import disturb, unwarned
from transformers import AutoConfig

from lema import LemaConfig, LemaModel
from lema.model.skeleton import auto_class
from lema_cpu import CpuBackend

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.covered(8)
@pytest.mark.parametrize("model_type", STREAMED)
def test_a_streamed_step_is_that_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    published = write_model(tiny_config(model_type), tmp_path / "published")
    batches = micro_batches()
    settings = {
        "lora_rank": 2,
        "lora_alpha": 4,
        "lora_bias": "all",
        "lora_use_dora": True,
        "seed": SEED,
    }
    # a plan of a recurrence that transformers unrolls takes longer than the step
    settings |= {"device_memory": None}
    model = LemaModel(
        LemaConfig(str(published), device="cpu", **settings), backend=CpuBackend(poison=True)
    )
    model.config.lora_modules_to_save = ends_of(model.skeleton)
    with unwarned():
        model.initialize_lora()
    model.lora_manager.train()
    begun = {name: parameter.clone() for name, parameter in trained(model.lora_manager).items()}
    disturb(model.lora_manager)
    torch.manual_seed(DRAWS)
    loss = model.adapter.loss(batches)
    loss.backward()
    found = {name: parameter.grad for name, parameter in trained(model.lora_manager).items()}
    shifted = model.adapter.shifts_labels
    adapter = deepcopy(model.lora_manager.peft_config["default"])
    model.close()

    base = aligned(
        auto_class(AutoConfig.from_pretrained(published)).from_pretrained(
            published, dtype=torch.float32
        )
    )
    base.config.use_cache = False
    torch.manual_seed(SEED)
    with unwarned():
        whole = get_peft_model(base, adapter).train()
    assert all(torch.equal(begun[name], parameter) for name, parameter in trained(whole).items())
    disturb(whole)
    torch.manual_seed(DRAWS)
    expected, _ = whole_loss(whole, batches, shifted=shifted)
    gradients = {name: parameter.grad for name, parameter in trained(whole).items()}
    assert found.keys() == gradients.keys()
    ends = [
        name
        for name, gradient in gradients.items()
        if "modules_to_save" in name and gradient is not None
    ]
    assert ends, "neither the embeddings nor the head have a gradient"
    differences = {name: difference(found[name], gradient) for name, gradient in gradients.items()}
    worst = max(difference(loss.detach(), expected), *differences.values())
    assert worst < 1e-6 if model_type in CLOSE else worst == 0, max(
        differences.items(), key=lambda item: item[1]
    )


def ends_of(model: nn.Module) -> list[str]:
    """Name the embeddings, and the head where the model has one of its own."""
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name for name, module in model.named_modules() if any(module is end for end in ends)]
