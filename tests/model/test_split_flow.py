"""A model is split only where that is exact: all that comes out of layers is followed to later
ones and the head.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutput

from lema.errors import ModelError
from lema.model import Split
from lema_cpu import CpuBackend


class Doubled(torch.autograd.Function):
    """An operation of which nobody outside can see what it is made of."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return 2 * hidden

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


Walk = Callable[["Toy", Tensor], Tensor]
WIDTH = 8
WORDS = 20
DEPTH = 4


class ToyConfig(PreTrainedConfig):
    model_type = "toy"
    num_hidden_layers = DEPTH


class Layer(GradientCheckpointingLayer):
    """Chooses one channel to add, or takes the choice of the layer below; writes where it is
    told to.
    """

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, chosen: Tensor | None = None, shared: Any = None) -> Any:
        hidden = hidden + torch.tanh(self.linear(hidden))
        if self.index % 2:  # these choose; layer 0 does not
            chosen = hidden.argmax(-1, keepdim=True)
        elif chosen is not None:
            hidden = hidden + hidden.gather(-1, chosen)
        if shared is not None and self.index == 1:
            shared[1] = hidden
        if shared is not None and self.index == 3:
            hidden = hidden + shared.get(1, shared.get(0)) if isinstance(shared, dict) else hidden
        return hidden, chosen


class Toy(PreTrainedModel):
    """A model whose way through its layers is given."""

    config_class = ToyConfig

    def __init__(self, walk: Walk) -> None:
        super().__init__(ToyConfig())
        self.walk = walk
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer(index) for index in range(DEPTH))
        self.lm_head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> CausalLMOutput:
        self.embedded = self.embed(input_ids)
        return CausalLMOutput(logits=self.lm_head(self.walk(self, self.embedded)))


def plain(model: Toy, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden, _ = layer(hidden)
    return hidden


def indices_handed_on(model: Toy, hidden: Tensor) -> Tensor:
    chosen = None
    for layer in model.layers:
        hidden, chosen = layer(hidden, chosen=chosen)
    return hidden


def indices_handed_on_by_position(model: Toy, hidden: Tensor) -> Tensor:
    chosen = None
    for layer in model.layers:
        hidden, chosen = layer(hidden, chosen)
    return hidden


def results_looked_at(model: Toy, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden, chosen = layer(hidden)
        assert chosen is None or chosen.ndim == 3  # a placeholder is not
    return hidden


def split_of(walk: Walk) -> tuple[Toy, Split]:
    torch.manual_seed(0)
    model = Toy(walk)
    return model, Split(model, CpuBackend())


def tokens(length: int = 11) -> Tensor:
    return torch.randint(0, WORDS, (2, length), generator=torch.Generator().manual_seed(1))


def streamed(split: Split, ids: Tensor) -> Tensor:
    weights = [dict(layer.named_parameters()) for layer in split.layers]
    prelude = split.prelude({"input_ids": ids}, weights[0])
    hidden = prelude.hidden
    for index, call in enumerate(prelude.calls):
        hidden = split.run_layer(index, weights[index], call, hidden)
    return split.head(hidden)


def test_what_is_handed_on_matters() -> None:
    _, with_indices = split_of(indices_handed_on)
    _, without = split_of(plain)
    assert not torch.equal(streamed(with_indices, tokens()), streamed(without, tokens()))


def test_learning_draws_nothing_and_leaves_no_gradient() -> None:
    model, split = split_of(plain)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    streamed(split, tokens())
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def indices_handed_on_changed(model: Toy, hidden: Tensor) -> Tensor:
    chosen = None
    for layer in model.layers:
        hidden, chosen = layer(hidden, chosen)
        chosen = None if chosen is None else (chosen + 1) % WIDTH
    return hidden


def between_layers(model: Toy, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden = 2 * layer(hidden)[0]
    return hidden


def from_layers_to_the_head(model: Toy, hidden: Tensor) -> Tensor:
    total = torch.zeros_like(hidden)
    for layer in model.layers:
        hidden, _ = layer(hidden)
        total = total + hidden
    return total


def from_layers_to_later_ones(model: Toy, hidden: Tensor) -> Tensor:
    first = None
    for layer in model.layers:
        hidden, _ = layer(hidden, shared={} if first is None else {0: first})
        first = hidden if first is None else first
    return hidden


def a_place_to_write(model: Toy, hidden: Tensor) -> Tensor:
    shared: dict[int, Tensor] = {}
    for layer in model.layers:
        hidden, _ = layer(hidden, shared=shared)
    return hidden


def from_the_embeddings_to_the_head(model: Toy, hidden: Tensor) -> Tensor:
    return plain(model, hidden) + model.embedded


def a_look_at_the_neighbours(model: Toy, hidden: Tensor) -> Tensor:
    return plain(model, hidden).cumsum(1)


def a_list_to_write(model: Toy, hidden: Tensor) -> Tensor:
    shared: list[Tensor] = [hidden, hidden]
    for layer in model.layers:
        hidden, _ = layer(hidden, shared=shared)
    return hidden


def unknown_to_torch(model: Toy, hidden: Tensor) -> Tensor:
    for layer in model.layers:
        hidden = Doubled.apply(layer(hidden)[0])
    return hidden


def every_layer_twice(model: Toy, hidden: Tensor) -> Tensor:
    return plain(model, plain(model, hidden))


def one_layer_left_out(model: Toy, hidden: Tensor) -> Tensor:
    for layer in model.layers[:-1]:
        hidden, _ = layer(hidden)
    return hidden


STREAMED = [
    plain,
    indices_handed_on,
    indices_handed_on_by_position,
    between_layers,
    from_layers_to_the_head,
    from_layers_to_later_ones,
    a_place_to_write,
    from_the_embeddings_to_the_head,
    a_look_at_the_neighbours,
]


@pytest.mark.parametrize("walk", STREAMED, ids=lambda walk: walk.__name__)
def test_layer_by_layer_gives_the_models_own_logits(walk: Walk) -> None:
    model, split = split_of(walk)
    for length in (11, 5):  # what one batch handed on is not given to the next
        assert torch.equal(streamed(split, tokens(length)), model(tokens(length)).logits)


@pytest.mark.parametrize("capped", [False, True])
def test_a_vocabulary_as_large_as_the_hidden_state_is_no_obstacle(capped: bool) -> None:
    """The last layer's output has the shape of logits, and so have the products before they are
    capped.
    """
    torch.manual_seed(0)
    model = Toy(plain)
    head = nn.Linear(WIDTH, WIDTH)
    model.lm_head = nn.Sequential(nn.LayerNorm(WIDTH), head, *[nn.Tanh()] * capped)
    split = Split(model, CpuBackend())
    ids = tokens() % WIDTH
    assert torch.equal(streamed(split, ids), model(ids).logits)


REFUSED = {
    a_list_to_write: "layer 1 passes something to later layers in a list",
    every_layer_twice: "does not run its layers once each",
    one_layer_left_out: "does not run its layers once each",
    indices_handed_on_changed: "between its layers it uses more than the hidden state",
    unknown_to_torch: "between its layers it uses operations that autograd does not follow",
}


@pytest.mark.parametrize("walk", REFUSED, ids=lambda walk: walk.__name__)
def test_what_would_not_be_exact_is_refused(walk: Walk) -> None:
    _, split = split_of(walk)
    with pytest.raises(ModelError, match=REFUSED[walk]):
        streamed(split, tokens())


def test_a_model_that_computes_with_what_layers_return_beside_the_hidden_state_streams() -> None:
    model, split = split_of(results_looked_at)
    assert torch.equal(streamed(split, tokens()), model(tokens()).logits)


def test_evaluation_is_learnt_apart_from_training() -> None:
    def scaled_in_evaluation(model: Toy, hidden: Tensor) -> Tensor:
        return plain(model, hidden) if model.training else between_layers(model, hidden)

    model, split = split_of(scaled_in_evaluation)
    assert torch.equal(streamed(split, tokens()), model(tokens()).logits)
    model.eval()
    assert torch.equal(streamed(split, tokens()), model(tokens()).logits)
