"""A learner's adapters are those of PEFT on the whole model with torch's AdamW, bit for bit, and
several of them train in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import VOCABULARY, Checkpoint
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from lema.errors import ConfigError, DataError
from lema.train.learner.adapter import AdamSettings, AdapterSpec
from lema.train.learner.learner import Learner
from lema.train.learner.rows import AdapterRows, Datum, MicroBatch, micro_batches_of

CheckpointOf = Callable[..., Checkpoint]
TOKENS = 24  # of a micro-batch
ADAM = AdamSettings(learning_rate=1e-2, weight_decay=0.1, grad_clip_norm=0.5)
SPECS = [
    AdapterSpec(4, seed=1),
    AdapterSpec(8, seed=2, train_mlp=False),
    AdapterSpec(2, seed=3, train_attn=False, train_unembed=False),
]


def data(seed: int, lengths: Sequence[int] = (9, 7, 12, 5)) -> list[Datum]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for length in lengths:
        ids = torch.randint(3, VOCABULARY, (length + 1,), generator=generator)
        weights = torch.rand(length, generator=generator).round(decimals=2)
        rows.append(Datum(ids[:-1], ids[1:], {"weights": weights}))
    return rows


def limited(directory: Path) -> Learner:
    """A learner whose layers stream: none fits beside the adapters."""
    learner = open_learner(directory, reserve=(3, 8), device_memory=3_430_000)
    assert not learner.opened.allocation.residents
    return learner


def open_learner(directory: Path, **settings: Any) -> Learner:
    return Learner.open(directory, device="cpu", micro_batch_tokens=TOKENS, **settings)


@pytest.fixture
def learner(checkpoint_of: CheckpointOf) -> Iterator[Learner]:
    opened = open_learner(checkpoint_of("llama").streamed)
    yield opened
    opened.close()


def whole(checkpoint: Checkpoint, learner: Learner, spec: AdapterSpec) -> Any:
    model = AutoModelForCausalLM.from_pretrained(checkpoint.published)
    torch.manual_seed(spec.seed)
    targets = learner._targets.chosen(spec)
    config = LoraConfig(r=spec.rank, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM")
    return get_peft_model(model, config)


def own_forward_backward(model: Any, rows: Sequence[Datum]) -> None:
    """Gradients of the weighted cross-entropy, by autograd over the whole model."""
    for part in micro_batches_of([AdapterRows("one", rows, "cross_entropy")], TOKENS):
        inputs = part.inputs()
        logits = model(**inputs).logits.float()
        targets, weights = side_by_side(part, inputs["input_ids"].shape[1])
        losses = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        (losses.view(targets.shape) * weights).sum().backward()


def side_by_side(part: MicroBatch, width: int) -> tuple[Tensor, Tensor]:
    targets = torch.zeros(len(part.data), width, dtype=torch.long)
    weights = torch.zeros(len(part.data), width)
    for row, datum in enumerate(part.data):
        targets[row, : len(datum.tokens)] = datum.targets
        weights[row, : len(datum.tokens)] = datum.tensors["weights"]
    return targets, weights


def own_parameters(model: Any) -> dict[str, Tensor]:
    return {
        name.replace(".default.", "."): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def test_three_steps_are_those_of_peft_and_torch(
    checkpoint_of: CheckpointOf, learner: Learner
) -> None:
    for index, spec in enumerate(SPECS):
        adapter = learner.add(f"a{index}", spec)
        model = whole(checkpoint_of("llama"), learner, spec)
        own = own_parameters(model)
        assert own.keys() == adapter.parameters.keys()
        optimizer = torch.optim.AdamW(
            own.values(), lr=ADAM.learning_rate, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1
        )
        for step in range(3):
            rows = data(step)
            (scored,) = learner.run([AdapterRows(adapter.name, rows, "cross_entropy")])
            own_forward_backward(model, rows)
            for name, parameter in own.items():
                formed = adapter.parameters[name].grad
                assert formed is not None and torch.equal(formed, parameter.grad), name
            assert scored.loss > 0
            torch.nn.utils.clip_grad_norm_(own.values(), ADAM.grad_clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            assert learner.step(adapter.name, ADAM) > 0
            for name, parameter in own.items():
                assert torch.equal(adapter.parameters[name], parameter), name


def test_a_pass_of_several_adapters_reads_the_weights_of_one(
    checkpoint_of: CheckpointOf,
) -> None:
    directory = checkpoint_of("llama").streamed
    requests = [AdapterRows(f"a{index}", data(index), "cross_entropy") for index in range(3)]
    alone = {}
    bytes_alone = []
    for request, spec in zip(requests, SPECS, strict=True):
        learner = limited(directory)
        learner.add(request.adapter, spec)
        learner.run([request])  # which learns what layers return
        before = learner.counters.bytes_uploaded
        learner.adapters[request.adapter].drop_gradients()
        (scored,) = learner.run([request])
        bytes_alone.append(learner.counters.bytes_uploaded - before)
        alone[request.adapter] = scored, gradients(learner, request.adapter)
        learner.close()
    learner = limited(directory)
    for request, spec in zip(requests, SPECS, strict=True):
        learner.add(request.adapter, spec)
    learner.run(requests[:1])
    learner.adapters["a0"].drop_gradients()
    before = learner.counters.bytes_uploaded
    together = learner.run(requests)
    assert learner.counters.bytes_uploaded - before == bytes_alone[0] > 0
    for request, scored in zip(requests, together, strict=True):
        own, own_gradients = alone[request.adapter]
        assert scored.loss == own.loss
        assert all(map(torch.equal, scored.logprobs, own.logprobs))
        formed = gradients(learner, request.adapter)
        assert formed.keys() == own_gradients.keys()
        for name, gradient in own_gradients.items():
            assert torch.equal(formed[name], gradient), name
    learner.close()


def gradients(learner: Learner, name: str) -> dict[str, Tensor]:
    return {
        path: parameter.grad.clone()
        for path, parameter in learner.adapters[name].parameters.items()
        if parameter.grad is not None
    }


def test_a_forward_forms_no_gradient(learner: Learner) -> None:
    learner.add("one", SPECS[0])
    request = AdapterRows("one", data(1), "cross_entropy")
    (scored,) = learner.run([request], differentiate=False)
    assert not gradients(learner, "one")
    (again,) = learner.run([request])
    assert scored.loss == again.loss
    assert all(map(torch.equal, scored.logprobs, again.logprobs))
    with pytest.raises(ConfigError, match="nothing to step with"):
        learner.adapters["one"].drop_gradients()
        learner.step("one", ADAM)


def test_a_state_is_all_that_a_step_depends_on(learner: Learner) -> None:
    adapter = learner.add("one", SPECS[0])
    for step in range(2):
        learner.run([AdapterRows("one", data(step), "cross_entropy")])
        learner.step("one", ADAM)
    state = adapter.state()
    other = learner.add("two", SPECS[0])
    other.restore(state, steps=2, optimizer=True)
    fresh = learner.add("three", SPECS[0])
    fresh.restore(state, steps=2, optimizer=False)
    for name in ("one", "two", "three"):
        learner.run([AdapterRows(name, data(5), "cross_entropy")])
        learner.step(name, ADAM)
    same = [
        torch.equal(adapter.parameters[name], other.parameters[name]) for name in adapter.parameters
    ]
    assert all(same)
    assert other.steps == 3
    assert not all(
        torch.equal(adapter.parameters[name], fresh.parameters[name]) for name in adapter.parameters
    )
    learner.remove("two")
    assert "two" not in learner.adapters
    with pytest.raises(DataError, match="rank or modules"):
        learner.add("four", SPECS[1]).restore(state, steps=0, optimizer=True)


def test_a_request_that_is_not_finite_leaves_the_others(learner: Learner) -> None:
    for name in ("one", "two"):
        learner.add(name, SPECS[0])
    learner.run([AdapterRows("one", data(1), "cross_entropy")])
    before = gradients(learner, "one")
    rows = [
        Datum(
            row.tokens,
            row.targets,
            {
                "logprobs": torch.full((len(row.tokens),), -1e6),
                "advantages": row.tensors["weights"],
            },
        )
        for row in data(2)
    ]
    failed, fine = learner.run(
        [
            AdapterRows("one", rows, "importance_sampling"),
            AdapterRows("two", data(1), "cross_entropy"),
        ]
    )
    assert failed.error is not None
    assert fine.error is None
    after = gradients(learner, "one")
    for name, gradient in before.items():
        assert torch.equal(after[name], gradient), name
        assert torch.equal(gradients(learner, "two")[name], gradient), name


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_long_rows_in_chunks_learn_the_same(checkpoint_of: CheckpointOf, architecture: str) -> None:
    directory = checkpoint_of(architecture).streamed
    requests = [
        AdapterRows("a0", data(1, (40, 9, 33)), "cross_entropy"),
        AdapterRows("a1", data(2, (20, 5)), "cross_entropy"),
    ]
    made = []
    for settings in ({}, {"sequence_chunk": 7}):
        learner = open_learner(directory, **settings)
        for index, spec in enumerate(SPECS[:2]):
            learner.add(f"a{index}", spec)
        # a step before, because the gradients of A are zero without one
        learner.run(requests)
        for name in learner.adapters:
            learner.step(name, ADAM)
        joined = learner.run(requests)
        gradients = gradients_of(learner)
        for request, scored in zip(requests, joined, strict=True):
            learner.adapters[request.adapter].drop_gradients()
            (alone,) = learner.run([request])
            assert all(map(torch.equal, alone.logprobs, scored.logprobs))
        assert all(map(torch.equal, gradients, gradients_of(learner)))
        made.append(([row for scored in joined for row in scored.logprobs], gradients))
        learner.close()
    (logprobs, gradients), (in_chunks, gradients_in_chunks) = made
    torch.testing.assert_close(in_chunks, logprobs, rtol=1e-5, atol=1e-5)
    for own, expected in zip(gradients_in_chunks, gradients, strict=True):
        torch.testing.assert_close(own, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def gradients_of(learner: Learner) -> list[Tensor]:
    """Copies of the gradients of all adapters."""
    parameters = [p for adapter in learner.adapters.values() for p in adapter.parameters.values()]
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("setting", ["sequence_chunk", "mlp_tile_tokens"])
def test_a_learner_is_told_how_many_tokens_are_computed_at_once(
    checkpoint_of: CheckpointOf, setting: str
) -> None:
    with pytest.raises(ConfigError, match="does not choose how many tokens") as refused:
        open_learner(checkpoint_of("llama").streamed, **{setting: "auto"})
    assert refused.value.where == setting
