"""No padding is computed that the rows of a micro-batch do not need, and nothing else comes of
it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as limits
from hypothesis import strategies as st
from preferences import examples
from smallrun import NUM_LAYERS, VOCABULARY, opened, settings, write_model
from torch import Tensor
from whole import gradients_of, whole_of

from lema.data import Batches, collate
from lema.data.batches import dealt, split_batch
from lema.data.preference import EXAMPLE, ExampleColumn
from lema.plan.work.step import step_shape
from lema.train.sampler import StepSampler

LENGTHS = (5, 40, 7, 3, 22, 9, 61, 4, 12, 3, 30, 8)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


def rows_of(lengths: Sequence[int], seed: int = 1) -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(seed)
    drawn = [torch.randint(1, VOCABULARY, (length,), generator=draw).tolist() for length in lengths]
    return [{"input_ids": ids, "labels": [-100, *ids[1:]]} for ids in drawn]


ROWS = rows_of(LENGTHS)


@pytest.mark.parametrize("micro_batch_size", [1, 3, None])
def test_a_step_computes_its_micro_batches_rows_times_their_longest(
    llama: Path, tmp_path: Path, micro_batch_size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(
        llama,
        tmp_path,
        batch_size=6,
        gradient_accumulation_steps=2,
        micro_batch_size=micro_batch_size,
    )
    shapes: list[tuple[int, ...]] = []
    with opened(config) as model:
        trainer = model.get_trainer()
        run_layer = model.split.run_layer

        def noted(index: int, weights: Any, call: Any, hidden: Tensor, **options: Any) -> Tensor:
            if index == NUM_LAYERS - 1:  # which is not recomputed
                shapes.append(tuple(hidden.shape[:2]))
            return run_layer(index, weights, call, hidden, **options)

        monkeypatch.setattr(model.split, "run_layer", noted)
        trainer.fit(ROWS)
        taken = list(shapes)
        shapes[:] = []
        trainer.evaluate(ROWS)
    ranked = sorted(LENGTHS, reverse=True)
    each = micro_batch_size or 6
    groups = [ranked[first : first + each] for first in range(0, len(ranked), each)]
    # of both batches of the step together
    assert taken == [(len(group), group[0]) for group in groups]
    if micro_batch_size == 1:
        assert (
            sum(rows * width for rows, width in taken)
            == sum(rows * width for rows, width in shapes)
            == sum(LENGTHS)
        )
    assert max(rows * width for rows, width in taken) <= step_shape(config, 128).micro_batch.tokens


@pytest.mark.parametrize("micro_batch_size", [1, 3])
def test_loss_and_gradients_are_peft_s_over_the_same_micro_batches(
    llama: Path, tmp_path: Path, micro_batch_size: int
) -> None:
    config = settings(llama, tmp_path, batch_size=12, micro_batch_size=micro_batch_size)
    uncut = {name: one for name, one in collate(ROWS).items() if isinstance(one, Tensor)}
    with opened(config) as model:
        model.save_pretrained(tmp_path / "adapter")
        parts = StepSampler(ROWS, config, model.backend.replicas).micro_batches(0)
        loss = model.adapter.loss(parts)
        loss.backward()
        found = gradients_of(model.skeleton)
    whole = whole_of(llama, tmp_path / "adapter", parts)
    assert found and loss.item() == whole.loss
    assert found.keys() == whole.gradients.keys()
    assert all(torch.equal(found[name], whole.gradients[name]) for name in found)
    padded = whole_of(llama, tmp_path / "adapter", [uncut])
    assert padded.loss == pytest.approx(loss.item(), rel=1e-6)
    for name, gradient in padded.gradients.items():
        assert float((found[name] - gradient).abs().max() / gradient.abs().max()) < 1e-5, name


def test_logits_have_the_order_and_the_width_of_the_caller_s_batch(
    llama: Path, tmp_path: Path
) -> None:
    batch = {name: one for name, one in collate(ROWS[:5]).items() if isinstance(one, Tensor)}
    with opened(settings(llama, tmp_path, micro_batch_size=2, learning_rate=0.0)) as model:
        logits, loss = model.get_trainer().train_step(batch)
    with opened(settings(llama, tmp_path, learning_rate=0.0)) as model:
        expected, at_once = model.get_trainer().train_step(batch)
    seen = batch["attention_mask"].bool()
    assert logits.shape == expected.shape == (5, 40, VOCABULARY)
    assert torch.allclose(logits[seen], expected[seen], atol=1e-5) and loss == pytest.approx(
        at_once, rel=1e-6
    )


def test_padding_at_the_left_and_holes_stay(llama: Path, tmp_path: Path) -> None:
    mask = torch.tensor(
        [[0, 0, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0, 0]]
    )
    ids = torch.arange(28).view(4, 7)
    labels = ids.masked_fill(mask == 0, -100)
    labels[3, 2] = 23  # learnt though nothing attends to it
    batch = {
        "input_ids": ids,
        "labels": labels,
        "attention_mask": mask,
        EXAMPLE: torch.zeros(4, 7, dtype=torch.long),
    }
    parts = split_batch(batch, 2)
    assert [part["input_ids"].shape for part in parts] == [(2, 5), (2, 7)] and parts[0][
        EXAMPLE
    ].shape == (2, 7)
    assert split_batch({name: one[3:] for name, one in batch.items()}, None)[0][
        "labels"
    ].tolist() == [[-100, 22, 23]]
    for part, first in zip(parts, (0, 2), strict=True):
        for name in ("input_ids", "labels", "attention_mask"):
            assert torch.equal(part[name], batch[name][first : first + 2, : part[name].shape[1]])
    without = {"input_ids": ids, "labels": labels.masked_fill(labels > 0, -100)}
    # because all of it is attended to
    assert split_batch(without, 2)[0]["input_ids"].shape == (
        2,
        7,
    )


@limits(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    size=st.integers(1, 9),
    at_once=st.integers(1, 7) | st.none(),
    batches=st.integers(1, 3),
)
def test_rows_are_dealt_out_by_length(
    lengths: list[int], size: int, at_once: int | None, batches: int
) -> None:
    shares = [dealt(lengths, rank, size, at_once, batches) for rank in range(size)]
    turns = [share[turn] for turn in range(len(shares[0])) for share in shares if turn < len(share)]
    assert sorted(place for group in turns for place in group) == list(range(len(lengths)))
    ranked = [lengths[place] for group in turns for place in group]
    assert ranked == sorted(lengths, reverse=True)
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)
    if at_once is None:
        assert max(map(len, turns)) <= -(
            -len(lengths) // min(size * batches, len(lengths))
        ) and all(turns)
    else:
        assert turns == dealt(lengths, at_once=at_once)  # the same for any number of processes


@pytest.mark.parametrize("micro_batch_size", [None, 1, 2, 3, 4])
def test_the_rows_of_a_pair_stay_together_and_say_which_batch_they_are_of(
    micro_batch_size: int | None,
) -> None:
    data = examples()
    batches = Batches(data, 2, shuffle=False, micro_batch_size=micro_batch_size)
    parts: list[Mapping[str, Any]] = batches.micro_batches([0, 1])
    about = torch.cat([part[EXAMPLE] for part in parts])
    assert (
        about[:, ExampleColumn.BATCH].tolist() == [0] * 4 + [1] * 4
        and about[:, ExampleColumn.BATCHES].tolist() == [2] * 8
    )
    assert about[::2, ExampleColumn.INDEX].tolist() == about[1::2, ExampleColumn.INDEX].tolist()
    assert [len(part["input_ids"]) for part in parts] == {None: [4, 4], 1: [1] * 8, 4: [4, 4]}.get(
        micro_batch_size, [2] * 4
    )
    for part in parts:
        seen = part.get("attention_mask", torch.ones_like(part["input_ids"]))
        assert int(seen.any(dim=0).sum()) == part["input_ids"].shape[1]
