"""Modules of a layer that work token by token, such as its MLP, in tiles of tokens.

Between its products such a module has tensors that are several times as wide as its input. While a
layer is differentiated they are there for all tokens at once, and in most layers nothing takes more
memory. In tiles they are there for a few tokens: the forward keeps the module's input alone, and
the backward runs it again tile by tile (arctic long sequence training, Bekman et al. 2025,
https://arxiv.org/abs/2506.13996, calls it a tiled MLP).

No module is known by its name. A layer's modules are looked at from the outside in when the layer
first runs on more tokens than a tile has, with its own weights: `lema.model.layers.tile_check` says
which of them work token by token. One that does is run in tiles, and of one that does not its parts
are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from lema.backend import Backend
from lema.errors import ConfigError
from lema.model.capture import has_values, replaced
from lema.model.experts import stacked_weights
from lema.model.layers.routing import has_routers
from lema.model.layers.tile_check import works_by_token
from lema.model.layers.tiled_call import TiledCall, TokenArguments
from lema.model.shared_inputs import is_unwatched, tried
from lema.model.state.hooks import is_hooked

__all__ = ["TILES", "TokenTiles"]

TILES = "mlp_tile_tokens"


class TokenTiles:
    """The modules of decoder layers that run in tiles of tokens, found as the layers run.

    Args:
        layers: the decoder layers, with the adapters that they have now.
        name: what these are called in the model.
        backend: the device.
        size: tokens of a tile; None: modules run on all tokens at once.
    """

    def __init__(
        self, layers: nn.ModuleList, name: str, backend: Backend, size: int | None = None
    ) -> None:
        self._layers = layers
        self._name = name
        self._backend = backend
        self.size = size
        self._candidates: dict[int, dict[nn.Module, str]] = {}
        # Whether a module works token by token, as has been seen with its weights, and without
        # values, where weights are made up.
        self._verdicts: dict[bool, dict[nn.Module, bool]] = {True: {}, False: {}}
        self._seen: dict[bool, set[int]] = {True: set(), False: set()}

    def resize(self, size: int | None) -> None:
        """Have tiles of another size from now on; None: no tiles."""
        self.size = size

    @contextmanager
    def sized(self, size: int | None) -> Iterator[None]:
        """Have tiles of another size in a `with` block; None: no tiles."""
        before = self.size
        self.size = size
        try:
            yield
        finally:
            self.size = before

    @contextmanager
    def used(self, index: int, hidden: Tensor | None) -> Iterator[None]:
        """Have what works token by token run in tiles in a `with` block, a call of one layer.

        Args:
            index: which layer it is.
            hidden: one of the tensors that the layer is given, which says how many tokens there
                are.
        """
        if self.size is None or hidden is None or tried():
            yield
            return
        real = has_values(hidden)
        refused = {module for module, works in self._verdicts[real].items() if not works}
        modules = self._candidates_of(index).keys() - refused
        forwards = {module: partial(self._run, index, module, module.forward) for module in modules}
        with replaced(forwards):
            yield
        if hidden.shape[:-1].numel() > self.size:
            self._seen[real].add(index)
            if real and len(self._seen[True]) == len(self._layers):
                self.check_any()

    def check_any(self, *, real: bool = True) -> None:
        """Refuse tiles where nothing runs in them of the layers that have run on enough tokens.

        Args:
            real: of layers that have run with values; else of those without.

        Raises:
            ConfigError: nothing does.
        """
        if self._seen[real] and not any(self._verdicts[real].values()):
            raise ConfigError(
                f"nothing in {self._name} works token by token and keeps much more than its input "
                "for the backward, so nothing runs in tiles",
                where=TILES,
                how="set it to null, or cut sequences by sequence_chunk",
            )

    def names(self, *, real: bool = True) -> dict[int, list[str]]:
        """Return what runs in tiles so far, by the numbers of layers.

        Args:
            real: of layers that have run with values; else of those without.
        """
        verdicts = self._verdicts[real]
        return {
            index: [
                name
                for module, name in self._candidates_of(index).items()
                if verdicts.get(module, False)
            ]
            for index in sorted(self._seen[real])
        }

    def _candidates_of(self, index: int) -> dict[nn.Module, str]:
        """Return the modules that may run in tiles, with their names in the layer: those of several
        matrices that choose no experts, because what a router makes of all tokens is looked at as
        one."""
        if index not in self._candidates:
            layer = self._layers[index]
            self._candidates[index] = {
                module: name
                for name, module in layer.named_modules()
                if module is not layer
                and type(module).forward is not nn.Module.forward
                and _num_matrices(module) > 1
                and (not has_routers(module) or _stacks_experts(module))
            }
        return self._candidates[index]

    def _run(
        self,
        index: int,
        module: nn.Module,
        forward: Callable[..., Any],
        *args: object,
        **kwargs: object,
    ) -> object:
        """Run a module, in tiles if it works token by token. `forward`: its own."""
        size = self.size
        if size is None or is_unwatched():  # it runs in a tile
            return forward(*args, **kwargs)
        arguments = TokenArguments.of(args, kwargs)
        if arguments is None or arguments.form.count <= size:
            return forward(*args, **kwargs)
        verdicts = self._verdicts[has_values(arguments.tensors[0])]
        if module not in verdicts:
            stacked = _stacks_experts(module)
            verdicts[module] = works_by_token(
                module, forward, arguments, self._backend, stacked=stacked
            )
        if not verdicts[module]:
            return forward(*args, **kwargs)
        if any(map(is_hooked, module.modules())):
            raise ConfigError(
                f"{self._name}.{index}.{self._candidates_of(index)[module]} runs in tiles of "
                "tokens, and hooks on it, or on modules in it, would see tiles",
                where=TILES,
                how="remove the hooks, or set it to null",
            )
        return TiledCall.run(module, forward, arguments, size, self._backend)


def _stacks_experts(module: nn.Module) -> bool:
    """Whether a module is one of stacked experts, which are chosen before it is called."""
    base = module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
    return bool(stacked_weights(base))


def _num_matrices(module: nn.Module) -> int:
    """Count a module's parameters of several dimensions, those of adapters left out."""
    if isinstance(module, BaseTunerLayer):
        return _num_matrices(module.get_base_layer())
    matrices = sum(parameter.ndim > 1 for parameter in module.parameters(recurse=False))
    return matrices + sum(map(_num_matrices, module.children()))
