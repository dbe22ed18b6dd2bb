"""The KL term of TRL's GRPO without a pass of the reference, beside TRL's own way on a whole model:
every number is the same, and no more bytes of weights are read than without that term.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from generationserver import generation_server
from test_trl_grpo import REUSED, SAMPLED, RecordedGRPO, rewarded, same
from test_trl_served import OFF, of_trl, served
from trlruns import outcome, save, streamed_model, trainer_of, whole_model

from lema import ServedMixin, StreamingMixin
from lema.engine.stack import LayerStack
from lema.train.hf.reference import ReferenceMixin

__all__ = ["rewarded"]

pytestmark = [
    pytest.mark.filterwarnings("ignore:gradients are accumulated over several batches"),
    pytest.mark.filterwarnings(
        "ignore:`gradient_checkpointing_(en|dis)able` is deprecated:FutureWarning"
    ),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]
BETA = 0.04
# Of time, and of the server's log-probabilities, of which TRL tells more.
LEFT_OUT = ("time", "per_second", "sampling/")


class ComparedGRPO(ReferenceMixin, RecordedGRPO):
    """Completions of its own."""


class FromBase:
    """Compares with the model without adapters, as TRL does where it has attached the adapter."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.delete_adapter("ref")  # type: ignore[attr-defined] # the trainer's


def trained(model: Any) -> Any:
    """Give a model's adapter other numbers than those of a fresh one, which does nothing."""
    generator = torch.Generator().manual_seed(3)
    for name, one in sorted(model.named_parameters()):
        if "lora_B" in name:
            one.data.copy_(torch.empty(one.shape).normal_(std=0.2, generator=generator))
    return model


def logged(model: Any, directory: Path, trainer: Any, **arguments: Any) -> tuple[Any, ...]:
    """Train; return losses, the adapter, and what was logged of each step."""
    settings = {"beta": BETA, **SAMPLED, **arguments}
    running = trainer_of("grpo", model, directory, trainer=trainer, **settings)
    losses, weights = outcome(running)
    rows = [
        {name: value for name, value in row.items() if not any(word in name for word in LEFT_OUT)}
        for row in running.state.log_history
    ]
    return losses, weights, rows


def assert_same_logs(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    same(found, expected)
    kl = [row[name] for row in expected[2] for name in row if name in ("kl", "eval_kl")]
    assert len({*kl}) > 2
    assert max(kl) > 0


@pytest.mark.parametrize(
    ("shape", "arguments"),
    [
        ("llama", {}),
        ("llama", REUSED),
        ("llama", {"gradient_accumulation_steps": 2, "max_steps": 3}),
        ("llama", {"use_bias_correction_kl": True, "num_iterations": 2}),
        ("llama", {"evaluated": 4, "eval_strategy": "steps", "eval_steps": 2}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.1}),
        ("gemma3", REUSED),
    ],
    ids=[
        "plain",
        "reused",
        "accumulated",
        "repeated",
        "evaluated",
        "experts",
        "routers",
        "gemma3_reused",
    ],
)
@pytest.mark.parametrize("base", [False, True], ids=["adapter", "base"])
def test_every_number_is_that_of_trls_own_way(
    shape: str, arguments: dict[str, Any], base: bool, tmp_path: Path
) -> None:
    directory = save(shape, tmp_path / "model")
    kinds: list[Any] = [RecordedGRPO, ComparedGRPO]
    if base:
        kinds = [type("OfBase", (FromBase, kind), {}) for kind in kinds]
    expected = logged(trained(whole_model(directory)), tmp_path, kinds[0], **arguments)
    model = trained(streamed_model(directory))
    assert_same_logs(logged(model, tmp_path, kinds[1], **arguments), expected)
    model.close()


@pytest.mark.parametrize("arguments", [{}, REUSED], ids=["plain", "reused"])
def test_with_a_server_as_well(arguments: dict[str, Any], tmp_path: Path) -> None:
    directory = save("llama", tmp_path / "model")
    with generation_server(directory, off=OFF) as server:
        kind = of_trl(server.url, tmp_path)
        expected = logged(trained(whole_model(directory)), tmp_path, kind, **arguments)
    with generation_server(directory, off=OFF) as server:
        model = trained(streamed_model(directory))
        assert_same_logs(logged(model, tmp_path, served(server.url), **arguments), expected)
    model.close()


class StreamingServedGRPO(StreamingMixin, ServedMixin, RecordedGRPO):
    """Batches of an optimizer step, and the reference, in one pass."""


@pytest.mark.parametrize(("shape", "accumulated"), [("llama", 2), ("qwen3_moe", 1)])
def test_no_weight_is_read_for_it(
    shape: str, accumulated: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(shape, tmp_path / "model")

    def read(kind: Any, **arguments: Any) -> tuple[tuple[int, int], tuple[Any, ...]]:
        """Train; return leases and the bytes that were read, and what was logged."""
        model = trained(streamed_model(directory, {"strategy": "streaming"}))
        with generation_server(directory) as server:

            class Served(kind):  # type: ignore[misc]
                def __init__(self, *args: Any, **kwargs: Any) -> None:
                    super().__init__(*args, server=server.url, **kwargs)

            steps = {"max_steps": 3, "gradient_accumulation_steps": accumulated, **arguments}
            found = logged(model, tmp_path, Served, **steps)
        model.opened.memory.cancel()  # so that no read of a next step is counted
        counters = model.opened.memory.counters
        model.close()
        return (counters.leases, counters.bytes_read), found

    class Alone(ServedMixin, RecordedGRPO):
        pass

    without, _ = read(Alone, beta=0.0)
    compared, found = read(Alone)
    assert compared == without > (0, 0)
    assert max(row.get("kl", 0.0) for row in found[2]) > 0
    joined, of_joined = read(StreamingServedGRPO)
    assert joined == read(StreamingServedGRPO, beta=0.0)[0]
    assert joined < compared or accumulated == 1
    same(of_joined, found)
    # TRL's own way, which stays where a reference's rows cannot go along.
    monkeypatch.setattr(LayerStack, "takes_reference", False)
    own_way, of_own_way = read(Alone)
    assert own_way[0] > compared[0]
    assert own_way[1] > compared[1]
    same(of_own_way, found)


def test_experts_round_by_the_rows_that_they_are_given(tmp_path: Path) -> None:
    """TRL takes the rows of a batch of completions through the reference in another order than
    through the model, so an expert has other rows beside a row there."""
    directory = save("qwen3_moe", tmp_path / "model")
    several = {"gradient_accumulation_steps": 2, "max_steps": 1}
    expected = logged(trained(whole_model(directory)), tmp_path, RecordedGRPO, **several)
    model = trained(streamed_model(directory))
    found = logged(model, tmp_path, ComparedGRPO, **several)
    model.close()
    assert found[0] == pytest.approx(expected[0], abs=1e-6)
    assert found[2][0]["kl"] == pytest.approx(expected[2][0]["kl"], abs=1e-6)
