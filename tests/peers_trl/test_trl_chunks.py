"""TRL's trainers, and transformers' own, with a streamed model whose rows go through each layer in
chunks: what they log is, to rounding, that of a streamed model that takes rows whole.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trl_grpo import SAMPLED, StreamingGRPO, rewarded
from trl.experimental.orpo import ORPOConfig, ORPOTrainer
from trlruns import (
    DPO_ROWS,
    KINDS,
    NUM_LAYERS,
    Recorded,
    RecordedDPO,
    RecordedKTO,
    RecordedSFT,
    adapters,
    recomputing,
    save,
    streamed_model,
    trainer_of,
)

from lema import StreamingMixin

__all__ = ["rewarded"]

# TRL calls what transformers renamed.
pytestmark = pytest.mark.filterwarnings(
    "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
    "ignore:.*experimental.*",
    "ignore:.*padding-free.*:UserWarning",
)

CHUNK = 5
STEPS = 10
# Of what is logged: ten steps of an optimizer that divides by gradients make rounding grow.
CLOSE = 2e-4
LEFT_OUT = ("runtime", "per_second", "time", "epoch", "memory", "flos")


class RecordedORPO(Recorded, ORPOTrainer):
    pass


class StreamingSFT(StreamingMixin, RecordedSFT):
    pass


class StreamingDPO(StreamingMixin, RecordedDPO):
    pass


class StreamingKTO(StreamingMixin, RecordedKTO):
    pass


JOINED = {"sft": StreamingSFT, "dpo": StreamingDPO, "kto": StreamingKTO, "grpo": StreamingGRPO}


@pytest.fixture(autouse=True)
def orpo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "orpo", (RecordedORPO, ORPOConfig, DPO_ROWS))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("gemma3", tmp_path_factory.mktemp("gemma3"))


def logs(trainer: Any) -> list[dict[str, float]]:
    """Return the numbers that a trainer has logged, but for those of time."""
    return [
        {
            name: float(value)
            for name, value in row.items()
            if not any(word in name for word in LEFT_OUT)
        }
        for row in trainer.state.log_history
    ]


def assert_close(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(found) == len(expected)
    for row, other in zip(found, expected, strict=True):
        assert row == pytest.approx(other, rel=CLOSE, abs=CLOSE)


def compared(
    kind: str,
    directory: Path,
    place: Path,
    *,
    trainer: Any = None,
    settings: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    **arguments: Any,
) -> tuple[list[dict[str, float]], Any]:
    """Train without chunks and with them; return what was logged, and the second's counters."""
    results = []
    counters = []
    for chunk in (None, CHUNK):
        chosen = {"sequence_chunk": chunk, **(settings or {})}
        model = streamed_model(directory, chosen, **(options or {}))
        running = trainer_of(
            kind, model, place, trainer=trainer, **{"max_steps": STEPS, **arguments}
        )
        running.train()
        results.append(logs(running))
        counters.append(model.opened.memory.counters)
        model.close()
    expected, found = results
    assert_close(found, expected)
    # not bytes: which layers a pass finds in their slots depends on how far readers have come
    assert counters[0].leases == counters[1].leases
    return found, counters[1]


@pytest.mark.parametrize("kind", ["trainer", "sft", "dpo", "kto", "orpo"])
def test_ten_steps_log_what_whole_sequences_log(kind: str, llama: Path, tmp_path: Path) -> None:
    rows, _ = compared(kind, llama, tmp_path)
    assert len({row["loss"] for row in rows if "loss" in row}) > 5
    if kind == "sft":  # looks at logits
        assert all("entropy" in row for row in rows if "loss" in row)
        assert all("mean_token_accuracy" in row for row in rows if "loss" in row)


@pytest.mark.parametrize("kind", JOINED)
def test_batches_of_a_step_share_the_leases(kind: str, llama: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_steps": 4}
    if kind == "grpo":
        arguments |= SAMPLED | {"beta": 0.04}
    compared(kind, llama, tmp_path, trainer=JOINED[kind], **arguments)


@pytest.mark.parametrize(
    ("kind", "settings", "arguments"),
    [
        ("sft", {"micro_batch_size": 1}, {"per_device_train_batch_size": 4}),
        ("sft", {}, {"packing": True, "max_length": 32}),
        ("sft", {}, {"padding_free": True, "max_length": None}),
        ("sft", {}, {"loss_type": "dft"}),
        ("sft", {}, {"neftune_noise_alpha": 5.0}),
        ("sft", {}, recomputing(False)),
        ("sft", {"gradient_checkpointing": False}, recomputing(False)),
        ("sft", {"boundary_activations": "host"}, {}),
        ("dpo", {}, {"loss_type": ["ipo"], "padding_free": True}),
        ("dpo", {}, {"precompute_ref_log_probs": True}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore")
def test_ways_to_train(
    kind: str, settings: dict[str, Any], arguments: dict[str, Any], gemma3: Path, tmp_path: Path
) -> None:
    compared(kind, gemma3, tmp_path, settings=settings, **{"max_steps": 3, **arguments})


def test_the_loss_of_routers(tmp_path: Path) -> None:
    directory = save("qwen3_moe", tmp_path / "model")
    rows, _ = compared("sft", directory, tmp_path, max_steps=4, router_aux_loss_coef=0.5)
    assert all("aux_loss" in row for row in rows if "loss" in row)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_evaluations(kind: str, llama: Path, tmp_path: Path) -> None:
    rows, _ = compared(
        kind, llama, tmp_path, evaluated=5, max_steps=4, eval_strategy="steps", eval_steps=2
    )
    assert sum("eval_loss" in row for row in rows) == 2


def test_a_run_with_dropout_is_resumed_bitwise(llama: Path, tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    chunks = {"sequence_chunk": CHUNK}
    straight = streamed_model(llama, chunks, lora_dropout=0.1)
    trainer = trainer_of("sft", straight, tmp_path, **saving)
    trainer.train()
    expected = adapters(straight)
    losses = trainer.losses
    straight.close()
    again = streamed_model(llama, chunks, lora_dropout=0.1)
    trainer = trainer_of("sft", again, tmp_path, **saving)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert trainer.losses == losses[4:]
    assert all(torch.equal(one, expected[name]) for name, one in adapters(again).items())
    counters = again.opened.memory.counters
    assert counters.leases == 2 * 4 * NUM_LAYERS + 1  # and one to learn what a layer returns
    again.close()
