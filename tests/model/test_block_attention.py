"""Attention of a chunk over blocks of keys is, to rounding, attention over all of them, and nothing
of it grows with the keys but their gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from lema.model.sequence import attention
from lema.model.sequence.attention import Handed, attention_in_blocks
from lema.model.sequence.blockmask import BlockMask, block_masks
from lema.model.sequence.states import ChunkStates, Span
from lema.plan.work.meter import Tally

ROWS, HEADS, GROUPS, WIDTH = 2, 2, 3, 8
CHUNK, LENGTH = 40, 700  # more than two blocks, and no multiple of one


class Module(torch.nn.Module):
    num_key_value_groups = GROUPS


def mask_of(**options: Any) -> Tensor:
    causal = masking_utils.causal_mask_function
    shape: dict[str, Any] = {"batch_size": ROWS, "q_length": CHUNK, "kv_length": LENGTH}
    shape |= {"q_offset": LENGTH - CHUNK, "mask_function": causal}
    with block_masks():
        mask = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](**(shape | options))
    assert isinstance(mask, BlockMask)
    return mask


def padded() -> Tensor:
    tokens = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    tokens[1, :300] = False
    tokens[0, LENGTH - CHUNK + 5] = False
    return mask_of(attention_mask=tokens)


def rows_that_see_nothing() -> Tensor:
    tokens = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    tokens[1, : LENGTH - 3] = False
    return mask_of(attention_mask=tokens)


MASKS: dict[str, Callable[[], Tensor]] = {
    "causal": mask_of,
    "window": lambda: mask_of(mask_function=masking_utils.sliding_window_causal_mask_function(90)),
    "padding": padded,
    "blind": rows_that_see_nothing,
}


def tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(HEADS * GROUPS, CHUNK, WIDTH), (HEADS, LENGTH, WIDTH), (HEADS, LENGTH, 2 * WIDTH)]
    drawn = [torch.randn(ROWS, *shape, generator=generator) for shape in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in drawn]


def result(attend: Callable[..., Any], given: list[Tensor], mask: Tensor) -> list[Tensor]:
    output, _ = attend(Module(), *given, mask)
    weight = torch.linspace(-1, 1, output.numel()).view(output.shape)
    gradients = torch.autograd.grad((output.float() * weight).sum(), given)
    return [output.detach(), *gradients]


def attend_in_blocks(*args: Any) -> Any:
    with attention_in_blocks(lambda: None):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args)


@pytest.mark.parametrize("kernel", [False, True], ids=["blocks", "kernel"])
@pytest.mark.parametrize("kind", MASKS)
def test_it_is_attention_to_all(kind: str, kernel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_has_kernel", lambda *_: kernel)
    mask = MASKS[kind]()
    found = result(attend_in_blocks, tensors(), mask)
    expected = result(sdpa_attention_forward, tensors(), mask.full())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MASKS)
def test_half_precision_loses_no_more_than_a_kernel_does(kind: str) -> None:
    mask = MASKS[kind]()
    exact = result(sdpa_attention_forward, tensors(), mask.full())
    distances = []
    for attend, given in ((attend_in_blocks, mask), (sdpa_attention_forward, mask.full())):
        half = result(attend, tensors(torch.bfloat16), given)
        errors = [
            (one - other).norm() / other.norm() for one, other in zip(half, exact, strict=True)
        ]
        distances.append(torch.stack(errors))
    assert bool((distances[0] <= 1.25 * distances[1]).all())


def test_what_stands_for_a_mask_is_the_mask_in_all_else() -> None:
    mask = padded()
    assert torch.equal(mask & True, mask.full())
    assert torch.equal(mask[:, :, :, 5:], mask.full()[..., 5:])
    assert mask.shape == mask.full().shape
    assert mask.untyped_storage().nbytes() == 1


def test_gradients_of_keys_go_where_they_are_summed_and_nothing_is_as_large() -> None:
    """Whole keys are made once, with their gradients; a step of many chunks adds to these."""
    length, width = 16384, 32
    chunk = Span(length - CHUNK, length)
    states = ChunkStates(length)
    past = torch.randn(1, HEADS, chunk.start, width)
    with torch.no_grad():
        states.extended(past, past, Span(0, chunk.start), 0)
    own = torch.randn(1, HEADS, CHUNK, width, requires_grad=True)
    query = torch.randn(1, HEADS * GROUPS, CHUNK, width, requires_grad=True)
    mask = mask_of(batch_size=1, kv_length=length, q_offset=chunk.start)
    keys, values = states.extended(own, own, chunk, 0)
    handed = Handed(keys, values, (own, own), states.attended(chunk, 0))
    with Tally() as tally, attention_in_blocks(lambda: handed):
        tally.leave_out([keys, values])
        output, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](Module(), query, keys, values, mask)
        output.sum().backward()
        sums = states.attended(chunk, 0).sums()
    gradients = 2 * HEADS * length * width * 4
    assert gradients < tally.peak < 1.5 * gradients
    assert own.grad is not None
    # of earlier tokens, because a chunk's own are handed out once
    whole = [part.detach().requires_grad_() for part in (query, keys, values)]
    expected = result_of_sum(whole, mask)
    torch.testing.assert_close(own.grad, sum(part[:, :, -CHUNK:] for part in expected[1:]))
    for found, other in zip(sums, expected[1:], strict=True):
        torch.testing.assert_close(found[:, :, :-CHUNK], other[:, :, :-CHUNK])
        assert not found[:, :, -CHUNK:].any()


def result_of_sum(given: list[Tensor], mask: Tensor) -> list[Tensor]:
    output, _ = sdpa_attention_forward(Module(), *given, mask.full())
    return [*torch.autograd.grad(output.sum(), given)]


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"position_bias": torch.zeros(1, 6, 1, 1)}])
def test_what_is_not_known_here_is_left_to_transformers(options: dict[str, Any]) -> None:
    mask = mask_of()
    given = tensors()
    torch.manual_seed(1)
    found = result(partial(attend_with, options), given, mask)
    torch.manual_seed(1)
    expected = result(
        lambda *args: sdpa_attention_forward(*args, **options), tensors(), mask.full()
    )
    assert all(map(torch.equal, found, expected))


def attend_with(options: dict[str, Any], *args: Any) -> Any:
    with attention_in_blocks(lambda: None):
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args, **options)
