"""RoundPipe (arXiv:2604.27085) over the decoder of `transformers`, for the arm of that name.

Its own presets call `transformers` as it was in version 4, so the sequence of layers is made here.
Layers hand on what `transformers` gives them: hidden state, rotary tables, labels. The model is
planned for the cap, which RoundPipe does not see by itself: it asks the card. Its optimizer steps
on the host, and weights of a step may be one step old: that is its default, and its fastest way.
Its optimizer still steps while PEFT has its turn: that time is not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, pad

if TYPE_CHECKING:
    from gpu_arms import Job, Prepared

__all__ = ["build"]

PART = 0.6  # of the memory, for weights and gradients: RoundPipe's own default
State = tuple[Tensor, Tensor, Tensor, Tensor]


class First(nn.Module):
    """Embeds tokens and makes the rotary tables."""

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        self.embeddings = decoder.embed_tokens
        self.rotary = decoder.rotary_emb

    def forward(self, input_ids: Tensor) -> State:
        hidden = self.embeddings(input_ids)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        cosine, sine = self.rotary(hidden, positions)
        return hidden, cosine, sine, positions


class Middle(nn.Module):
    """One decoder layer; without a mask its attention is causal."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: State) -> State:
        hidden, cosine, sine, positions = state
        tables = (cosine, sine)
        hidden = self.layer(
            hidden, attention_mask=None, position_ids=positions, position_embeddings=tables
        )
        return hidden, cosine, sine, positions


class Last(nn.Module):
    """Final norm and head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.norm = model.model.norm
        self.head = model.lm_head

    def forward(self, state: State) -> Tensor:
        return self.head(self.norm(state[0]))


def _loss_of(total: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss of one micro-batch, of `total` trained tokens in all."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        targets = pad(labels, (0, 1), value=-100)[..., 1:].reshape(-1)
        return (
            cross_entropy(logits.float().flatten(0, 1), targets.to(logits.device), reduction="sum")
            / total
        )

    return loss


def build(job: Job, model: Any) -> Callable[[Tensor], Prepared]:
    """Wrap a model as `plainloop.peft_model` returns it."""
    from gpu_arms import RATE, Prepared

    roundpipe: Any = import_module("roundpipe")
    optimizers: Any = import_module("roundpipe.optim")
    base = model.get_base_model()
    base.gradient_checkpointing_disable()  # RoundPipe recomputes by itself
    base.disable_input_require_grads()
    for parameter in base.parameters():
        parameter.data = parameter.data.clone()  # maps of files cannot be locked
    stack = nn.Sequential(
        First(base.model), *(Middle(layer) for layer in base.model.layers), Last(base)
    )
    # A layer at a time is recomputed: a stage of several would keep the graphs of all.
    options = roundpipe.RoundPipeRunConfig(recompute_grain="layer")
    piped = roundpipe.RoundPipe(
        stack, optim_dtype=torch.float32, model_run_config=options, pin_model="register"
    )
    optimizer = optimizers.Adam(
        piped.optim_parameters(), lr=RATE, weight_decay=0.0, decoupled_weight_decay=True
    )
    dtype = getattr(torch, job.shape.dtype)
    memory = job.cap or torch.cuda.get_device_properties(0).total_memory

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def prepare(ids: Tensor) -> Prepared:
        loss_fn = _loss_of(ids[:, 1:].numel())

        def step() -> float:
            plan = roundpipe.ModelExecutePlan.auto(
                "fused", piped, model_memory_limit=PART * memory / 1e9
            )
            run = roundpipe.RoundPipeRunConfig(num_microbatch=len(ids), execute_plan=plan)
            with torch.autocast("cuda", dtype=dtype, enabled=dtype != torch.float32):
                loss = piped.forward_backward(
                    input_args=(ids,), label=ids, loss_fn=loss_fn, run_config=run
                )
            piped.step(update)
            return float(loss)

        about = {"settings": {"pin_model": "register", "recompute_grain": "layer"}}
        return Prepared(step, about, warm_up=3)  # its plan follows from the times of earlier steps

    return prepare
