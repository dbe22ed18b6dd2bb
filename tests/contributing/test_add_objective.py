"""How to add an objective: a loss of log-probabilities, and what the settings say of it.

The one here, `margin`, wants the tokens of a chosen completion to be likelier, on average, than
those of the rejected one by a margin. It knows nothing of the model: LEMA differentiates it by the
log-probabilities alone.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from parity import Outcome, all_gradients, draw_b, relative_difference, streamed_model, whole_model
from preferences import batch_of, examples, parts_of, sums
from tiny import Checkpoint
from torch import Tensor

from lema.engine.head.objectives import Measured, Objective, Scored

TIGHT = 2e-6  # products round otherwise than where the loss is differentiated through them
MARGIN = 0.5


def margin_loss(rows: Scored, *, margin: float) -> tuple[Tensor, Measured]:
    """Return a process's share of the batch's mean loss, and what is measured: sums and counts."""
    chosen, rejected = rows.completions(rows.logps)
    of_chosen, of_rejected = rows.lengths()
    ahead = chosen / of_chosen - rejected / of_rejected
    losses = torch.relu(margin - ahead)
    measured = {"ahead": (ahead.detach().sum(), float(len(ahead)))}
    return losses.sum() / rows.num_examples, measured


def margin_by_hand(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """The same loss on the whole model, written down from its logits; pairs lie side by side."""
    means = sums(model, batch) / (batch["labels"][:, 1:] != -100).sum(1)
    return torch.relu(MARGIN - (means[::2] - means[1::2])).mean()


OBJECTIVE = Objective(partial(margin_loss, margin=MARGIN))


@pytest.fixture
def checkpoint(checkpoint_of: Any) -> Checkpoint:
    found: Checkpoint = checkpoint_of("llama")
    return found


@pytest.mark.parametrize("cuts", [(8,), (3, 5)], ids=str)
def test_loss_and_gradients_are_those_of_autograd_on_the_whole_model(
    checkpoint: Checkpoint, cuts: tuple[int, ...]
) -> None:
    """However the rows of the batch are cut into micro-batches, even between the rows of a pair."""
    batch = batch_of(examples())
    whole = whole_model(checkpoint)
    draw_b(whole)
    loss = margin_by_hand(whole, batch)
    loss.backward()
    expected = Outcome.of(whole, loss)
    with streamed_model(checkpoint, gradient_checkpointing=True) as model:
        draw_b(model.lora_manager)
        model.adapter.objective = OBJECTIVE
        loss = model.adapter.loss(parts_of(batch, *cuts))
        loss.backward()
        found = Outcome.of(model.lora_manager, loss)
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=TIGHT)
    difference = relative_difference(all_gradients(found), all_gradients(expected))
    assert difference < TIGHT


def test_a_loop_in_python_trains_on_it(checkpoint: Checkpoint) -> None:
    batch = batch_of(examples())
    with streamed_model(checkpoint, learning_rate=1e-2) as model:
        model.adapter.objective = OBJECTIVE
        trainer = model.get_trainer()
        losses = [trainer.train_step(batch)[1] for _ in range(5)]
        total, count = model.adapter.measured["ahead"]
    assert losses[-1] < losses[0] / 2
    assert float(total) / count > MARGIN / 2
