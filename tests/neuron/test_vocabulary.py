"""Embeddings and a head divided over the vocabulary: losses and gradients are those of the whole
ones.
"""

from typing import Any

import pytest
import torch
from threadranks import Threads, on_ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lema_neuron.comm import Comm
from lema_neuron.gradients import parts
from lema_neuron.shares import Part
from lema_neuron.vocabulary import divide_words, words_of

IDS = 37
HIDDEN = 16
TOKENS = 24  # words that neither 2 nor 4 ranks divide evenly
EXACT = 1e-6  # relative, of what is summed over the vocabulary in another order
ranks = pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
tied_or_not = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


class Scaled(nn.Embedding):
    """Embeddings with a class of their own, as some models have."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 3.0


class Ends(nn.Module):
    """What lies before the layers and after them."""

    def __init__(self, tied: bool, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = Scaled(IDS, HIDDEN, padding_idx=2, dtype=dtype)
        self.head = nn.Linear(HIDDEN, IDS, bias=bias, dtype=dtype)
        if tied:
            self.head.weight = self.embed.weight
        drawn = torch.Generator().manual_seed(7)  # of its own, because ranks are threads
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=drawn))

    def hidden(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.embed(ids))

    def logits(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.head(hidden) / 5) * 5  # soft-capped

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.hidden(ids))


def rows() -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(3)
    ids = torch.randint(3, IDS, (2, TOKENS // 2), generator=drawn)
    ids[0, :2] = torch.tensor([0, IDS - 1])  # the first word, and the last one
    targets = ids.roll(-1, 1)
    targets[1, -3:] = -100
    return ids, targets


def divided(comm: Comm, model: nn.Module) -> nn.Module:
    divide_words(model, ["embed.weight", "head.weight"], comm)
    return model


def far(mine: Tensor, whole: Tensor) -> float:
    return float((mine.double() - whole.double()).abs().max() / whole.double().abs().max())


def whole_gradient(model: nn.Module, name: str, comm: Comm) -> Tensor:
    """The gradient of all ranks' rows."""
    part: Any = parts(model, comm)[name]
    gradient: Any = model.get_parameter(name).grad
    missing = words_of(model.get_submodule(name.rpartition(".")[0])).words_per_rank - len(gradient)  # type: ignore[union-attr]
    padded = torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])
    assert isinstance(part, Part)
    return part.consolidate(padded, comm)


@ranks
@tied_or_not
@pytest.mark.parametrize(
    "options",
    [{"reduction": "sum"}, {"reduction": "none"}, {"reduction": "sum", "label_smoothing": 0.2}],
    ids=["sum", "none", "smoothed"],
)
def test_the_loss_of_divided_words_and_its_gradients_are_those_of_whole_ones(
    count: int, tied: bool, options: dict[str, Any]
) -> None:
    ids, targets = rows()
    # as DFT weighs tokens
    weights = torch.linspace(0.5, 2.0, TOKENS) if options["reduction"] == "none" else 1.0
    whole = Ends(tied, bias=not tied)
    wanted = cross_entropy(whole(ids).view(-1, IDS), targets.view(-1), **options)
    (wanted * weights).sum().backward()

    def one(comm: Threads) -> tuple[Tensor, dict[str, Tensor]]:
        model: Any = divided(comm, Ends(tied, bias=not tied))
        words: Any = words_of(model.head)
        hidden = model.hidden(ids)
        with words.only_local():
            logits = model.logits(hidden)
        assert logits.shape[-1] < IDS
        loss = words.cross_entropy(logits, targets, **options)
        (loss * weights).sum().backward()
        names = [name for name, _ in model.named_parameters()]
        assert ("head.weight" in names) != tied, "what is tied stays tied"
        return loss.detach(), {name: whole_gradient(model, name, comm) for name in names}

    for loss, gradients in on_ranks(count, one):
        assert far(loss, wanted.detach()) < EXACT
        for name, gradient in gradients.items():
            assert far(gradient, whole.get_parameter(name).grad) < EXACT, name


@ranks
def test_vectors_of_words_and_their_gradients_are_bitwise_those_of_the_whole_table(
    count: int,
) -> None:
    ids, _ = rows()
    whole = Ends(tied=False)
    wanted = whole.embed(ids)
    toward = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1))
    wanted.backward(toward)

    def one(comm: Threads) -> tuple[Tensor, Tensor]:
        model: Any = divided(comm, Ends(tied=False))
        found = model.embed(ids)
        found.backward(toward)
        return found.detach(), whole_gradient(model, "embed.weight", comm)

    for found, gradient in on_ranks(count, one):
        assert torch.equal(found, wanted)
        assert torch.equal(gradient, whole.embed.weight.grad)


@ranks
def test_logits_are_whole_where_nobody_asks_for_parts(count: int) -> None:
    ids, _ = rows()
    whole = Ends(tied=False, bias=True)
    wanted = whole(ids)
    hidden = torch.randn(
        2, 3, HIDDEN, requires_grad=True, generator=torch.Generator().manual_seed(2)
    )
    toward = torch.randn(2, 3, IDS, generator=torch.Generator().manual_seed(4))
    (gradient,) = torch.autograd.grad(whole.head(hidden), hidden, toward)

    def one(comm: Threads) -> tuple[Tensor, Tensor]:
        model: Any = divided(comm, Ends(tied=False, bias=True))
        mine = hidden.detach().clone().requires_grad_()
        return model(ids).detach(), torch.autograd.grad(model.head(mine), mine, toward)[0]

    for logits, mine in on_ranks(count, one):
        assert logits.shape == wanted.shape
        assert far(logits, wanted.detach()) < EXACT
        assert far(mine, gradient) < EXACT


def test_of_a_token_three_numbers_are_exchanged_and_not_its_logits() -> None:
    ids, targets = rows()

    def one(comm: Threads) -> tuple[int, int]:
        model: Any = divided(comm, Ends(tied=False))
        words: Any = words_of(model.head)
        hidden = torch.randn(*ids.shape, HIDDEN, requires_grad=True)
        with words.only_local():
            model.embed(ids)  # as it runs again before the head, and is thrown away
            loss = words.cross_entropy(model.head(hidden), targets, reduction="sum")
        forward = comm.sent
        loss.backward()
        return forward, comm.sent - forward

    for forward, backward in on_ranks(2, one):
        assert forward == 3 * TOKENS
        assert backward == TOKENS * HIDDEN


def test_halves_have_a_loss_in_single_precision() -> None:
    ids, targets = rows()
    wanted = cross_entropy(
        Ends(True, dtype=torch.bfloat16)(ids).float().view(-1, IDS), targets.view(-1)
    )

    def one(comm: Threads) -> Tensor:
        model: Any = divided(comm, Ends(True, dtype=torch.bfloat16))
        words: Any = words_of(model.head)
        hidden = model.hidden(ids)
        with words.only_local():
            loss: Tensor = (
                words.cross_entropy(model.logits(hidden), targets, reduction="sum")
                / (targets != -100).sum()
            )
        loss.backward()
        assert model.head.weight.grad.dtype == torch.bfloat16
        return loss.detach()

    for loss in on_ranks(2, one):
        assert loss.dtype == torch.float32
        assert far(loss, wanted.detach()) < EXACT


def test_where_there_are_words_for_some_ranks_only_they_stay_whole() -> None:
    def one(comm: Threads) -> bool:
        model = nn.Sequential(nn.Embedding(5, 4))
        divide_words(model, ["0.weight"], comm)
        return words_of(model[0]) is None and model[0].weight.shape == (5, 4)

    assert all(on_ranks(4, one))
