"""Whether a module of a layer works token by token, and whether tiles of tokens are worth it.

A module is run on a few tokens with its own weights. It works token by token if no output of a
token has a gradient with respect to another token's input, if it makes the same of the tokens in
tiles, and one by one, as of all at once, and if changing one token changes no other. It must leave
nothing in its modules, draw nothing but for dropout, and return one tensor. Tiles are worth it
where it keeps more for the backward than its input and its output have.

A plan has no weights. There a module is run with weights that are made up: each row of a matrix is
one number, so they take no memory. Stacked experts are not, because their products are of all of
them, and `transformers` defines what they make of each token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from lema.backend import Backend
from lema.errors import is_out_of_memory
from lema.model.capture import PASSED_THROUGH_THE_MODEL, has_values, routed, without_dropout
from lema.model.layers.tiled_call import CallForm, TokenArguments
from lema.model.shared_inputs import unwatched
from lema.model.state.snapshot import rehearsed

__all__ = ["works_by_token"]

NUM_TOKENS = 12
TILE = 5  # tokens: the last tile has fewer
LOOKED_AT = (0, 5, 11)  # tokens whose gradients are formed
CHANGED = 4  # a token
# of the length of what the module makes of a token, above rounding
TOLERANCE = {True: 0.1, False: 1e-4}  # by whether it computes in half precision
# how many times its input and its output a module has to keep
WORTH_IT = 1.5
SMALL = 0.1  # numbers that stand for weights

Run = Callable[[Sequence[Tensor], CallForm], object]


def works_by_token(
    module: nn.Module,
    forward: Callable[..., object],
    arguments: TokenArguments,
    backend: Backend,
    *,
    stacked: bool,
) -> bool:
    """Whether a module makes of each token what depends on that token alone, and keeps much more
    than its input for the backward.

    Args:
        module: the module, with the tensors that it has in a call.
        forward: its own.
        arguments: of the call; without values, as in plans, its weights are made up.
        backend: the device.
        stacked: whether it is one of stacked experts.
    """

    sample = _sample(arguments)
    run = _run_of(forward)
    # so that those of a graph that is being built see nothing of this one
    hooks = saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)
    with unwatched(), without_dropout(module), torch.enable_grad(), hooks, suppress(_DoesNotRun):
        if not _is_worth_it(module, run, sample):
            return False
        if has_values(arguments.tensors[0]):
            return _is_by_token(module, run, sample, backend)
        if stacked:
            return True
        with _disable_current_modes():
            return _is_by_token(
                module, _run_of(_with_made_up_weights(module)), _made_up(sample), backend
            )
    return False


class _DoesNotRun(Exception):
    """A module does not run on a few tokens."""


def _run_of(forward: Callable[..., object]) -> Run:
    """Return what runs a module on tensors of tokens."""

    def run(tensors: Sequence[Tensor], form: CallForm) -> object:
        args, kwargs = form.with_tensors(tensors)
        try:
            return forward(*args, **kwargs)
        except PASSED_THROUGH_THE_MODEL as error:
            if is_out_of_memory(error):
                raise
            raise _DoesNotRun from error

    return run


def _sample(arguments: TokenArguments) -> TokenArguments:
    """Return the arguments for a few tokens, taken from all over the call."""
    form = arguments.form
    places = torch.linspace(0, form.count - 1, NUM_TOKENS).round().long()
    places = places.to(arguments.tensors[0].device)
    leading = torch.Size([1] * (len(form.leading) - 1) + [NUM_TOKENS])
    few = CallForm(form.args, form.kwargs, leading)
    everything = slice(None)
    tensors = [
        few.tile(form.flat(tensor).detach().index_select(0, places), everything)
        for tensor in arguments.tensors
    ]
    return TokenArguments(few, tensors)


def _leaves(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [
        tensor.detach().clone().requires_grad_(tensor.is_floating_point()) for tensor in tensors
    ]


def _is_worth_it(module: nn.Module, run: Run, sample: TokenArguments) -> bool:
    """Whether a module returns one tensor of the same tokens, and keeps much for the backward."""
    inputs = _leaves(sample.tensors)
    weights = [*module.parameters(), *module.buffers()]
    left_out = {tensor.untyped_storage()._cdata for tensor in (*inputs, *weights)}
    shapes = {tuple(sorted(tensor.shape)) for tensor in weights}
    saved = dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # a weight that is cast for a product is another tensor of its shape
        if storage._cdata not in left_out and tuple(sorted(tensor.shape)) not in shapes:
            saved[storage._cdata] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = run(inputs, sample.form)
    leading = sample.form.leading
    if not isinstance(output, Tensor) or output.shape[: len(leading)] != leading:
        return False
    around = sum(tensor.nbytes for tensor in (*inputs, output))
    return sum(saved.values()) >= WORTH_IT * around


def _is_by_token(module: nn.Module, run: Run, sample: TokenArguments, backend: Backend) -> bool:
    """Whether a module makes of each token what depends on that token alone."""
    drawn = backend.rng_state()
    inputs = _leaves(sample.tensors)
    versions = [tensor._version for tensor in inputs]
    logits: list[Tensor] = []
    with rehearsed(module.modules()) as before, routed(logits):
        output = run(inputs, sample.form)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return False
        if before.changed() or not torch.equal(backend.rng_state(), drawn):
            return False
        if [tensor._version for tensor in inputs] != versions:
            return False
        if not _gradients_are_by_token(output, inputs, sample.form):
            return False
        with torch.no_grad():
            return _values_are_by_token(output.detach(), run, sample) and not logits


def _gradients_are_by_token(output: Tensor, inputs: Sequence[Tensor], form: CallForm) -> bool:
    """Whether no token's output has a gradient with respect to another token's input."""
    leaves = [tensor for tensor in inputs if tensor.requires_grad]
    rows = form.flat(output)
    for token in LOOKED_AT:
        # each feature counts differently, because those of a norm add up to nothing
        weights = torch.linspace(1, 2, rows[token].numel(), device=rows.device)
        value = (rows[token].flatten().float() * weights).sum()
        gradients: Sequence[Tensor | None] = torch.autograd.grad(
            value, leaves, retain_graph=True, allow_unused=True
        )
        for gradient in gradients:
            if gradient is None:
                continue
            by_token = form.flat(gradient).flatten(1).ne(0).any(dim=1)
            by_token[token] = False
            if bool(by_token.any()):
                return False
    return True


def _values_are_by_token(output: Tensor, run: Run, sample: TokenArguments) -> bool:
    """Whether a module makes the same of tokens in tiles, and apart, as of all at once, and of a
    token whatever the others are."""
    form = sample.form
    flat = [form.flat(tensor) for tensor in sample.tensors]
    half = torch.finfo(output.dtype).bits < 32 or torch.is_autocast_enabled(output.device.type)
    expected = form.flat(output).flatten(1).float()
    norms = expected.norm(dim=1)
    lengths = norms.clamp(min=1e-3 * float(norms.mean()) + 1e-30)

    def same(output: object, tokens: Sequence[int] = range(NUM_TOKENS)) -> bool:
        if not isinstance(output, Tensor) or output.numel() != expected.numel():
            return False
        rows = output.reshape(NUM_TOKENS, -1).float()
        errors = (rows - expected).norm(dim=1) / lengths
        return bool((errors[[*tokens]] <= TOLERANCE[half]).all())

    tiles = [run([form.tile(tensor, span) for tensor in flat], form) for span in form.spans(TILE)]
    rows = [tile.flatten(0, len(form.leading) - 1) for tile in tiles if isinstance(tile, Tensor)]
    if not same(torch.cat(rows)):
        return False
    # each token a row of its own
    if len(form.leading) == 2 and not same(run([tensor.unsqueeze(1) for tensor in flat], form)):
        return False
    first = flat[0].clone()
    first[CHANGED] = 2 * first[CHANGED].flip(-1) + 1
    changed = run([form.tile(tensor, slice(None)) for tensor in (first, *flat[1:])], form)
    return same(changed, [token for token in range(NUM_TOKENS) if token != CHANGED])


def _made_up(sample: TokenArguments) -> TokenArguments:
    """Return the arguments with values: numbers of a fixed order, and zeros for integers."""

    def values(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)
        count = tensor.numel()
        return torch.arange(count).mul(0.7).sin().to(tensor.dtype).view(tensor.shape)

    return TokenArguments(sample.form, [values(tensor) for tensor in sample.tensors])


def _with_made_up_weights(module: nn.Module) -> Callable[..., object]:
    """Return what runs a module with one number for each row of its tensors without values."""

    def made_up(tensor: Tensor) -> Tensor:
        rows = torch.arange(len(tensor) if tensor.dim() else 1).add(1).mul(0.7).sin().mul(SMALL)
        column = rows.view(-1, *[1] * (tensor.dim() - 1)) if tensor.dim() else rows[0]
        return column.to(tensor.dtype).expand(tensor.shape)

    named = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    weights = {name: made_up(tensor) for name, tensor in named.items() if not has_values(tensor)}

    def forward(*args: object, **kwargs: object) -> object:
        return torch.func.functional_call(module, weights, args, kwargs, tie_weights=False)

    return forward
