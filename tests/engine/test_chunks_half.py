"""Sequences in chunks that are computed in bfloat16 are as near to float32 as whole ones are."""

import math
from pathlib import Path

import pytest
import torch
from everytype import opened, write_model
from parity import Outcome, all_gradients, draw_b, relative_difference, streamed_step
from tiny import micro_batches
from tinyconfig import tiny_config
from torch import Tensor

from lema.model.sequence.states import ChunkStates, Span

# Where a rounding sends a token to other experts, one batch tells little: these are taken together.
LENGTHS = ((48, 37), (48, 30), (40, 41))
WITHIN = 1.25  # times the error of whole sequences, of all gradients of all batches together
OF_ONE = 2.0  # times the larger of that and its own, of one matrix
ULP = 2.0**-8  # of bfloat16, relative


def step(
    directory: Path, batches: list[dict[str, Tensor]], dtype: str, chunk: int | None
) -> Outcome:
    with opened(directory, dtype=dtype, sequence_chunk=chunk) as model:
        draw_b(model.lora_manager)
        return streamed_step(model, batches)


@pytest.mark.filterwarnings("ignore:PEFT does not adapt these:UserWarning")
@pytest.mark.parametrize("padding", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("model_type", ["llama", "mistral", "gemma3_text", "qwen3_next"])
def test_half_precision_in_chunks_errs_no_more_than_at_once(
    model_type: str, padding: bool, tmp_path: Path
) -> None:
    """Weights are those of bfloat16 in all three, so what differs is how a step is computed."""
    directory = write_model(tiny_config(model_type), tmp_path / "model", torch.bfloat16)
    of_whole = list[float]()
    of_chunks: dict[int, list[float]] = {2: [], 5: [], 16: []}
    for lengths in LENGTHS:
        batches = micro_batches(2, padding=padding, lengths=lengths)
        exact = step(directory, batches, "float32", None)
        whole = step(directory, batches, "bfloat16", None)
        error = relative_difference(all_gradients(whole), all_gradients(exact))
        assert error > ULP / 4, "nothing was computed in bfloat16"
        of_whole.append(error)
        for chunk, errors in of_chunks.items():
            found = step(directory, batches, "bfloat16", chunk)
            assert relative_difference(found.loss, exact.loss) < ULP / 2
            errors.append(relative_difference(all_gradients(found), all_gradients(exact)))
            for name, gradient in found.gradients.items():
                expected = exact.gradients[name]
                at_once = relative_difference(whole.gradients[name], expected)
                assert relative_difference(gradient, expected) < OF_ONE * max(at_once, error), name
    for errors in of_chunks.values():
        assert math.hypot(*errors) < WITHIN * math.hypot(*of_whole)


def test_gradients_of_keys_are_summed_in_float32_over_many_chunks() -> None:
    """In bfloat16 a sum of ones stays at 256."""
    length = 600
    states = ChunkStates(length)
    spans = [Span(token, token + 1) for token in range(length)]
    for span in spans:
        key = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)
        states.extended(key, key, span, 0)
    for span in reversed(spans):
        key = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16, requires_grad=True)
        keys, _ = states.extended(key, key.detach(), span, 0)
        keys.sum().backward()
        expected = torch.full_like(key, length - span.start)  # the chunks that see it
        assert torch.equal(key.grad, expected)
