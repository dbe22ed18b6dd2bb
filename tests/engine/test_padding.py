"""Rows made longer train to the same numbers; nobody sees, learns, counts or hands out what was
added.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from smallrun import logged, opened, run_fit, settings, token_rows, write_model
from torch import Tensor

from lema.config import LemaConfig
from lema.data import collate
from lema.engine.head.loss import split_batch
from lema.engine.padding import Padding, padding_of
from lema.engine.step_inputs import StepInputs
from lema.errors import ConfigError, DataError
from lema.plan.work.step import step_shape


def masked(rows: int = 4) -> dict[str, Tensor]:
    found = collate(token_rows(rows))  # of 9 to 12 tokens
    return {name: found[name] for name in ("input_ids", "labels", "attention_mask")}


def taken(
    config: LemaConfig, batch: dict[str, Tensor]
) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """The loss, the gradients and the logits of a step of two micro-batches."""
    logits: list[Tensor] = []
    with opened(config) as model:
        loss = model.adapter.loss(split_batch(batch, 2), logits=logits)
        loss.backward()
        named = model.lora_manager.named_parameters()  # type: ignore[union-attr]
        return (
            loss.item(),
            {name: one.grad.clone() for name, one in named if one.grad is not None},
            logits,
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral"])
def test_numbers_are_those_without_padding(tmp_path: Path, name: str, recompute: bool) -> None:
    model = write_model(tmp_path / "model", name)
    plain = settings(model, tmp_path, gradient_checkpointing=recompute)
    longer = settings(model, tmp_path, gradient_checkpointing=recompute, pad_to_multiple_of=32)
    for batch in (
        masked(),
        {one: value[:, :9] for one, value in masked().items() if one != "attention_mask"},
    ):
        loss, gradients, logits = taken(plain, batch)
        found, others, more = taken(longer, batch)
        assert abs(found - loss) <= 1e-6 * loss
        assert others.keys() == gradients.keys() and gradients
        for parameter, gradient in gradients.items():
            assert bool(gradient.any())
            # relative to the largest, as rows of another length are added up in another order
            assert (
                float((others[parameter] - gradient).abs().max() / gradient.abs().max()) < 1e-5
            ), parameter
        for one, other, part in zip(logits, more, split_batch(batch, 2), strict=True):
            seen = part.get("attention_mask", torch.ones_like(part["labels"])).bool()
            assert other.shape == one.shape
            assert torch.allclose(other[seen], one[seen], atol=1e-5)


@pytest.mark.slow
def test_a_run_evaluates_trains_and_counts_as_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_model(tmp_path / "model")
    rows = token_rows(12)
    seen = []
    place = StepInputs.prepare

    def noted(self: StepInputs, batches: Any, **options: Any) -> Any:
        found = place(self, batches, **options)
        seen.append({tuple(batch["input_ids"].shape) for batch in found[0]})
        return found

    monkeypatch.setattr(StepInputs, "prepare", noted)
    results = []
    for name, multiple in (("plain", None), ("longer", 16)):
        # no sign of a rounding is a step
        longer = {
            "pad_to_multiple_of": multiple,
            "max_length": 16,
            "adam_epsilon": 1e-2,
        }
        config = settings(model, tmp_path / name, **longer)
        result, adapter = run_fit(config, rows, token_rows(4, seed=2))
        results.append((result["eval_loss"], list(logged(config).values()), adapter))
        assert set().union(*seen) == {(4, 16)} if multiple else len(set().union(*seen)) >= 1
        seen.clear()
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-6)
    assert results[0][1] == pytest.approx(results[1][1], rel=1e-6)
    for name, value in results[0][2].items():
        assert torch.allclose(value, results[1][2][name], atol=1e-5), name
    counted = []
    for multiple in (None, 32):
        with opened(
            settings(model, tmp_path / "counted", pad_to_multiple_of=multiple)
        ) as opened_model:
            step = opened_model.get_trainer().accumulate(split_batch(masked(), 2))
            counted.append((step.tokens, step.trained_tokens))
    assert counted[0] == counted[1]


def test_a_batch_of_the_right_length_gets_a_mask_and_nothing_else() -> None:
    ids = torch.arange(12).view(2, 6)
    assert Padding().of({"input_ids": ids, "labels": ids}).keys() == {"input_ids", "labels"}
    found = Padding(3).of({"input_ids": ids, "labels": ids})
    assert torch.equal(found["input_ids"], ids) and bool((found["attention_mask"] == 1).all())
    found = Padding(4).of({"input_ids": ids, "labels": ids})
    assert found["labels"][:, 6:].tolist() == [[-100, -100]] * 2
    assert found["attention_mask"].tolist() == [[1] * 6 + [0] * 2] * 2
    packed = {
        "input_ids": ids,
        "labels": ids,
        "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2),
    }
    found = Padding(4).of(packed)
    assert "attention_mask" not in found and found["position_ids"][0].tolist() == [
        0,
        1,
        2,
        0,
        1,
        2,
        0,
        0,
    ]


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="become 12 long, and the model has 10 positions"):
        Padding(6, positions=10).of({"input_ids": torch.zeros(1, 9, dtype=torch.long)})
    with pytest.raises(ConfigError, match="no multiple of 48"):
        LemaConfig("m", max_length=128, pad_to_multiple_of=48)
    shared = LemaConfig("m", sequence_parallel=True)
    assert padding_of(shared, 4, 64) == Padding(4, 64)
    assert padding_of(LemaConfig("m"), 4, None) == Padding(1, None)
    assert padding_of(LemaConfig("m", pad_to_multiple_of=6), 4, None).multiple == 6
    with pytest.raises(ConfigError, match="cut into 4 equal shares"):
        padding_of(LemaConfig("m", sequence_parallel=True, pad_to_multiple_of=6), 4, None)


def test_the_plan_takes_rows_as_long_as_they_become() -> None:
    assert step_shape(LemaConfig("m", pad_to_multiple_of=768), None).micro_batch.length == 1536
