"""Rows that bring the experts which a server chose for them train with these, and nothing else
changes: log-probabilities and gradients are those of the whole model whose routers were written by
hand to choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from handwrittenrouters import FACTORS, choose
from peft import LoraConfig, get_peft_model
from publishedclass import publish
from tiny import Checkpoint
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from lema.errors import ConfigError, DataError
from lema.train.learner.adapter import AdapterSpec
from lema.train.learner.learner import Learner
from lema.train.learner.rows import AdapterRows, Datum

LAYERS = 8
EXPERTS = 6
CHOSEN = 2
TOKENS = 9  # of a row
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": CHOSEN,
}
CONFIGS = {
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=EXPERTS),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=EXPERTS,
        norm_topk_prob=True,
        mlp_only_layers=[2],
    ),
}
SPEC = AdapterSpec(4, seed=2, train_mlp=False)


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    name: str = request.param
    publish(name, tmp_path / name, CONFIGS[name]())
    return name, tmp_path / name


@pytest.fixture
def learner(model: tuple[str, Path]) -> Iterator[Learner]:
    opened = Learner.open(model[1], device="cpu", micro_batch_tokens=2 * TOKENS, longest=64)
    yield opened
    opened.close()


def rows_of(name: str, count: int = 2) -> list[Datum]:
    """Rows with choices that no router would make."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for _ in range(count):
        ids = torch.randint(3, 96, (TOKENS + 1,), generator=generator)
        scores = torch.rand(TOKENS, LAYERS, EXPERTS, generator=generator)
        choices = scores.argsort(dim=-1)[..., :CHOSEN]
        if name == "qwen3_moe":
            choices[:, 2] = 0  # a layer without experts, as a server has it
        data.append(Datum(ids[:-1], ids[1:], {}, choices.flatten(1)))
    return data


def test_routers_choose_what_rows_bring(model: tuple[str, Path], learner: Learner) -> None:
    name, directory = model
    data = rows_of(name)
    adapter = learner.add("one", SPEC)
    learner.add("other", SPEC)
    request = AdapterRows("one", data, "cross_entropy")
    free = AdapterRows("other", [replace(datum, choices=None) for datum in data], "cross_entropy")
    for checked in (request, free):
        learner.check_rows(checked)
    scored, scored_free = learner.run([request, free])
    whole: Any = AutoModelForCausalLM.from_pretrained(directory)
    torch.manual_seed(SPEC.seed)
    targets = learner._targets.chosen(SPEC)
    whole = get_peft_model(whole, LoraConfig(r=4, lora_alpha=32, target_modules=targets))
    choices = torch.stack([of for datum in data if (of := datum.choices) is not None])
    choose(whole, FACTORS[name], choices.unflatten(-1, (LAYERS, CHOSEN)))
    ids = torch.stack([datum.tokens for datum in data])
    expected = torch.stack([datum.targets for datum in data])
    logits = whole(input_ids=ids).logits.float()
    losses = cross_entropy(logits.flatten(0, 1), expected.flatten(), reduction="none")
    losses.sum().backward()
    assert torch.equal(-losses.view(expected.shape), torch.stack([*scored.logprobs]))
    own = {n.replace(".default.", "."): p for n, p in whole.named_parameters() if p.requires_grad}
    for path, parameter in adapter.parameters.items():
        assert torch.equal(own[path].grad, parameter.grad), path
    # the rows that came with them chose for themselves, as they do alone
    (alone,) = learner.run([free], differentiate=False)
    assert all(map(torch.equal, alone.logprobs, scored_free.logprobs))
    assert not torch.equal(alone.logprobs[0], scored.logprobs[0])


def test_choices_that_are_none_are_refused(model: tuple[str, Path], learner: Learner) -> None:
    name, _ = model
    (datum,) = rows_of(name, 1)
    assert datum.choices is not None
    twice = datum.choices.clone()
    twice[3, :CHOSEN] = 1
    high = datum.choices.clone()
    high[0, 0] = EXPERTS
    for choices, error, said in (
        (datum.choices[1:], DataError, "give \\[9 tokens, 8 layers"),
        (datum.choices[:, 1:], DataError, "layers \\* experts"),
        (datum.choices[:, 0], DataError, "have the shape"),
        (twice, ConfigError, "the experts of token 3 in layer 0 are \\[1, 1\\]"),
        (high, ConfigError, f"a choice is {EXPERTS}, and there are experts 0 to 5"),
    ):
        request = AdapterRows("one", [replace(datum, choices=choices)], "cross_entropy")
        with pytest.raises(error, match=said):
            learner.check_rows(request)


def test_a_model_without_experts_takes_no_choices(
    checkpoint_of: Callable[..., Checkpoint],
) -> None:
    learner = Learner.open(checkpoint_of("llama").streamed, device="cpu", longest=64)
    request = AdapterRows("one", rows_of("mixtral", 1), "cross_entropy")
    with pytest.raises(DataError, match="the model has no experts"):
        learner.check_rows(request)
    learner.close()
