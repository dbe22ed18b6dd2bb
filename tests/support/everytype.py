"""One step of any model type, streamed and on the whole model: what differs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aligned import aligned
from parity import DRAWS, draw_b, trained
from peft import PeftModel, get_peft_model
from tinyconfig import VOCABULARY, tiny_config
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig

from lema import LemaConfig, LemaModel
from lema.engine.head.loss import targets_of, trained_tokens
from lema.model.inputs import model_inputs
from lema.model.skeleton import auto_class
from lema_cpu import CpuBackend
from lema_tools.survey.attempt import model_types

SEVERAL_STACKS = "its layers form more than one stack"
LOOPED = "it does not run its layers once each, in their order"
HEAD = "its head needs more than the last layer's output"

# Refused: the sentence the user reads.
REFUSED = {
    "blt": SEVERAL_STACKS,
    "dory": LOOPED,
    "gemma4_unified_assistant": "inputs_embeds and shared_kv_states cannot be None",
    "hrm_text": SEVERAL_STACKS,
    "inkling2_loop": LOOPED,
    "inkling2_loop_text": LOOPED,
    "mllama": LOOPED,  # text alone leaves some out
    "prophetnet": HEAD,  # it makes more logits than it returns
    "reformer": "sequence length",
    "xlm": SEVERAL_STACKS,
}

PIXELS = "missing 1 required positional argument: 'pixel_values'"

# Refused of the types that see images: they do not run on text alone, or not as one stack of
# layers.
REFUSED |= {
    "blip": PIXELS,
    "blip-2": PIXELS,
    "florence2": SEVERAL_STACKS,
    "idefics": SEVERAL_STACKS,
    "instructblip": "missing 2 required positional arguments",
    "instructblipvideo": "missing 2 required positional arguments",
    "kosmos-2": "You have to specify either `pixel_values` or `image_embeds`",
    "molmo2": "`mm_token_type_ids` is required as a model input when training",
    "pi0": SEVERAL_STACKS,
    "pix2struct": "You have to specify flattened_patches",
    "t5gemma2": "You must specify exactly one of input_ids or inputs_embeds",
    "udop": "Bbox is required",
    "vision-encoder-decoder": "You have to specify pixel_values",
}

# `transformers` itself cannot make one here.
NOT_BUILT = {
    "diffusion_gemma": "found element of type NoneType",
    "evolla": "Unrecognized configuration class",
    "fast_vlm": "requires the timm library",
    "gemma3n": "requires the timm library",
    "gemma4_assistant": "hidden_size_per_layer_input must be 0",
    "granite4_vision": "has no len",
    "inkling_mm_model": "No module named 'scipy'",
    "musicgen": "no attribute 'dropout'",
    "musicgen_melody": "no attribute 'dropout'",
    "perception_lm": "requires the timm library",
    "pp_formulanet": "not auto.handled",
    # transformers does not read what it writes either
    "shieldgemma2": "the checkpoint does not fit the model",
}

# Equal to 1e-6 relative only, and why.
CLOSE = {
    "longcat_flash": "a product with one column, whose last bit depends on the address of the weight",
}

# Ways to lay out rows that `transformers` itself does not take.
UNTAKEN = {
    "git": ("plain", "padded", "packed"),  # with labels it looks for an image
    # "output with shape [12, 12, 1, 1] doesn't match the broadcast shape [12, 12, 2, 1]"
    "xlnet": ("padded",),
}

MODEL_TYPES = model_types()

STREAMED = [kind for kind in MODEL_TYPES if kind not in REFUSED and kind not in NOT_BUILT]


SEED = 7


@dataclass(frozen=True)
class Comparison:
    """How far a streamed step is from the whole model's, each as the largest relative difference.

    Attributes:
        logits: of every micro-batch.
        loss: of the step.
        gradients: adapter parameter -> difference; every one of them is compared.
        idle_layers: those of which no gradient is there and not zero.
        bytes_offloaded: of activations that left the device.
    """

    logits: float
    loss: float
    gradients: dict[str, float] = field(repr=False)
    idle_layers: list[int]
    bytes_offloaded: int

    @property
    def worst(self) -> float:
        """The largest difference of all."""
        return max(self.logits, self.loss, *self.gradients.values())


def micro_batches() -> list[dict[str, Tensor]]:
    """Two micro-batches of two rows, of different lengths, every token a trained one but the
    first ones.
    """
    generator = torch.Generator().manual_seed(2)
    batches = []
    for length in (12, 9):
        ids = torch.randint(3, VOCABULARY, (2, length), generator=generator)
        labels = ids.clone()
        labels[1, :3] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def write_model(
    config: PreTrainedConfig, directory: Path, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a random model of `config`; norms and biases random too, or they tell no layers
    apart.
    """
    torch.manual_seed(1)
    model = auto_class(config).from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                # some types' from_pretrained zeroes it, whatever is stored
                module.weight[module.padding_idx] = 0.0
    model.save_pretrained(directory)
    # some types save only the part they were built from, which no auto class knows
    config.save_pretrained(directory)
    return directory


@contextmanager
def opened(directory: Path, **changes: Any) -> Iterator[LemaModel]:
    """Open a model for streaming with an adapter on every linear, in training mode. Stacked experts
    have none unless `changes` say so, because products with adapted ones round in another way than
    PEFT's."""
    drawn = {"lora_rank": 2, "lora_alpha": 4, "seed": SEED, "lora_target_parameters": []}
    settings = drawn | {"gradient_checkpointing": True, "save_steps": 0} | changes
    config = LemaConfig(str(directory), device="cpu", device_memory=None, **settings)
    model = LemaModel(config, backend=CpuBackend(poison=True))
    try:
        model.initialize_lora()
        model.lora_manager.train()
        yield model
    finally:
        model.close()


def compare(model: str | PreTrainedConfig, directory: Path, **changes: Any) -> Comparison:
    """Stream one step of a model, or of a tiny one of a type, take it on the whole model too, and
    compare them.

    `changes` are settings of the streamed one.
    """
    published = write_model(
        tiny_config(model) if isinstance(model, str) else model, directory / "published"
    )
    batches = micro_batches()
    with opened(published, **changes) as model:
        draw_b(model.lora_manager)
        torch.manual_seed(DRAWS)
        logits: list[Tensor] = []
        loss = model.adapter.loss(batches, logits=logits)
        loss.backward()
        streamed = {name: parameter.grad for name, parameter in trained(model.lora_manager).items()}
        adapter = model.lora_manager.peft_config["default"]
        bytes_offloaded = model.adapter.counters.bytes_offloaded
        layers_name = model.split.layers_name
        num_layers = model.split.num_layers
        shifted = model.adapter.shifts_labels
    base = aligned(
        auto_class(AutoConfig.from_pretrained(published)).from_pretrained(
            published, dtype=torch.float32
        )
    )
    base.config.use_cache = False
    torch.manual_seed(SEED)
    whole = get_peft_model(base, adapter).train()
    draw_b(whole)
    torch.manual_seed(DRAWS)
    expected, outputs = whole_loss(whole, batches, shifted=shifted)
    gradients = {name: parameter.grad for name, parameter in trained(whole).items()}
    assert streamed.keys() == gradients.keys()
    active = {name for name, found in gradients.items() if found is not None and bool(found.any())}
    return Comparison(
        max(difference(one, other) for one, other in zip(logits, outputs, strict=True)),
        difference(loss.detach(), expected),
        {name: difference(streamed[name], gradients[name]) for name in gradients},
        [
            layer
            for layer in range(num_layers)
            if not any(f".{layers_name}.{layer}." in name for name in active)
        ],
        bytes_offloaded,
    )


def whole_loss(
    model: torch.nn.Module, batches: list[dict[str, Tensor]], *, shifted: bool
) -> tuple[Tensor, list[Tensor]]:
    """Accumulate gradients over micro-batches on the whole model; return the loss of the step,
    and the logits.
    """
    tokens = trained_tokens(batches, shifted=shifted)
    total = torch.zeros(())
    outputs = []
    for batch in batches:
        logits = model(**model_inputs(batch), use_cache=False).logits
        targets = targets_of(batch["labels"], shifted=shifted)
        summed = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets.flatten(), reduction="sum"
        )
        (summed / tokens).backward()
        total = total + summed.detach() / tokens
        outputs.append(logits.detach())
    return total, outputs


def ways() -> dict[str, dict[str, Tensor]]:
    """One micro-batch of two rows in each of the ways in which rows are laid out."""
    plain = micro_batches()[0]
    ids = plain["input_ids"]
    labels = plain["labels"]
    length = plain["input_ids"].shape[1]
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    padding = {
        "input_ids": ids * mask,
        "labels": labels.masked_fill(mask == 0, -100),
        "attention_mask": mask,
    }
    begins = torch.cat([torch.arange(7), torch.arange(length - 7)]).repeat(2, 1)
    several = {
        "input_ids": ids,
        "labels": labels.masked_fill(begins == 0, -100),
        "position_ids": begins,
    }
    return {"plain": plain, "padded": padding, "packed": several}


Step = tuple[Tensor, list[Tensor], dict[str, Tensor | None]]
"""The loss of a step, the logits of its micro-batches, and the gradient of every adapter."""


def compare_ways(model_type: str, directory: Path, dtype: torch.dtype) -> dict[str, float]:
    """Train one micro-batch in each way, streamed and on the whole model, which is given the
    labels.

    Returns:
        The largest difference of loss, logits and gradients, by dtype and way; those ways that
        `transformers` takes, and in fp32 a step of two micro-batches of different lengths.
    """
    published = write_model(tiny_config(model_type), directory / "published")
    found = {}
    name = str(dtype).removeprefix("torch.")
    with opened(published, dtype=name) as model:
        whole = whole_in(published, dtype, model.lora_manager)
        if dtype is torch.float32:
            found["two micro-batches"] = farthest(
                _streamed_step(model, *micro_batches()), _two(whole, model)
            )
        for way, batch in ways().items():
            if way not in UNTAKEN.get(model_type, ()):
                streamed = _streamed_step(model, batch)
                expected = _whole_step(whole, batch, dtype)
                found[f"{name} {way}"] = farthest(streamed, expected)
    return found


def farthest(one: Step, other: Step) -> float:
    """Return the largest difference of two steps."""
    assert one[2].keys() == other[2].keys()
    assert any(gradient is not None and bool(gradient.any()) for gradient in other[2].values())
    gradients = (difference(one[2][name], gradient) for name, gradient in other[2].items())
    logits = (difference(mine, theirs) for mine, theirs in zip(one[1], other[1], strict=True))
    return max(difference(one[0], other[0]), *logits, *gradients)


def whole_in(published: Path, dtype: torch.dtype, streamed: PeftModel) -> PeftModel:
    base = aligned(
        auto_class(AutoConfig.from_pretrained(published)).from_pretrained(published, dtype=dtype)
    )
    torch.manual_seed(SEED)
    whole = get_peft_model(base, streamed.peft_config["default"]).train()
    for model in (streamed, whole):
        draw_b(model)
    return whole


def _streamed_step(model: LemaModel, *batches: dict[str, Tensor]) -> Step:
    torch.manual_seed(DRAWS)
    logits: list[Tensor] = []
    loss = model.adapter.loss(batches, logits=logits)
    loss.backward()
    return loss.detach(), logits, _taken(model.lora_manager)


def _two(whole: PeftModel, streamed: LemaModel) -> Step:
    torch.manual_seed(DRAWS)
    loss, logits = whole_loss(whole, micro_batches(), shifted=streamed.adapter.shifts_labels)
    name = streamed.split.layers_name
    gradients = _taken(whole)
    for layer in range(streamed.split.num_layers):
        inside = [one for key, one in gradients.items() if f".{name}.{layer}." in key]
        assert any(one is not None and bool(one.any()) for one in inside), (
            f"layer {layer} has no gradient"
        )
    return loss, logits, gradients


def _whole_step(whole: PeftModel, batch: dict[str, Tensor], dtype: torch.dtype) -> Step:
    torch.manual_seed(DRAWS)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype is torch.bfloat16):
        output = whole(**batch, use_cache=False)
    output.loss.backward()
    return output.loss.detach(), [output.logits.detach()], _taken(whole)


def _taken(model: PeftModel) -> dict[str, Tensor | None]:
    gradients = {name: parameter.grad for name, parameter in trained(model).items()}
    model.zero_grad(set_to_none=True)
    return gradients


def difference(one: Tensor | None, other: Tensor | None) -> float:
    """Return how far two tensors are apart, relative to the other's length; 0 only where they
    are bitwise equal.
    """
    if one is None or other is None:
        present = one if other is None else other
        return 0.0 if present is None or not present.any() else float("inf")
    if one.shape != other.shape or not bool(one.isfinite().all()):
        return float("inf")
    if torch.equal(one, other):
        return 0.0
    return float((one - other).double().norm() / other.double().norm().clamp_min(1e-30))
