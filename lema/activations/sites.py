"""Where in a model the forward is: hooks on its modules that say so, to whatever context is open."""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import nn

from lema.activations.hooks import Hooked, Hooks
from lema.activations.scope import current
from lema.errors import ConfigError

__all__ = ["Sites", "output_head", "wrapped"]

# Where models have their heads, in the order in which they are looked for. A head that is no module calls one of its
# own. Where there is nothing but the last norm, the head follows it.
HEADS = (
    "output",
    "output.linear",
    "lm_head",
    "decoder.output",
    "decoder.lm_head",
    "final_layer_norm",
    "ln_f",
    "head",
)
UNTOUCHED = "liger"  # modules named so keep what they save: their kernels do with it as they please
WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")  # parts of names that users do not write


class Sites:
    """The hooks of one context on a model.

    Args:
        model: as the user has it: wrapped or not, adapted or not.
        exclude: further modules whose saved tensors stay: ends of their dotted names, or regular expressions that match
            the whole of them.
        warn_if_no_head: warn where no output head is found.

    Attributes:
        head: whether an output head was found.

    Raises:
        ConfigError: nothing matches one of `exclude`, or it is no regular expression.
    """

    def __init__(self, model: nn.Module, *, exclude: Sequence[str] = (), warn_if_no_head: bool = True) -> None:
        levels = wrapped(model)
        excluded = [*_untouched(model), *_matching(levels, (exclude,) if isinstance(exclude, str) else exclude)]
        head = output_head(model)
        self.head = head is not None
        self._hooked = Hooked()
        for level in levels:
            self._hooked.add(level, BEGINNING)
        if head is not None:
            self._hooked.add(head, HEAD)
        elif warn_if_no_head:
            warnings.warn(
                f"no output head was found in {type(levels[-1]).__name__}, so what its head and its loss save, as wide "
                "as the vocabulary, is moved as well. Exclude the head by its name (exclude_modules), or compute the "
                "loss outside; warn_if_no_head=False says that this is meant",
                stacklevel=3,
            )
        for module in {id(module): module for module in excluded}.values():
            self._hooked.add(module, EXCLUDED)
        for module in model.modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                self._hooked.add(module, WITH_WEIGHTS)

    def close(self) -> None:
        """Take the hooks off that nobody else asks for. May be called twice."""
        self._hooked.close()


def wrapped(model: nn.Module) -> list[nn.Module]:
    """Return `model` and what is in its wrappers, one in the other, the bare model last."""
    levels = [model]
    while True:
        for found in _inner(levels[-1]):
            if isinstance(found, nn.Module) and found not in levels:
                levels.append(found)
                break
        else:
            return levels


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the module that turns hidden states into logits, as it is called; None: there is none to be found."""
    for level in reversed(wrapped(model)):
        get = getattr(level, "get_output_embeddings", None)
        for head in (None if get is None else get(), *(_at(level, path) for path in HEADS)):
            # A head that is its model's embedding is not called as a head.
            if isinstance(head, nn.Module) and not isinstance(head, nn.Embedding):
                return head
    return None


def _inner(model: nn.Module) -> Iterator[Any]:
    """Yield what `model` may be a wrapper of: of replicas, of a compiled model, of adapters."""
    for name in ("module", "_orig_mod"):
        yield getattr(model, name, None)
    if callable(get := getattr(model, "get_base_model", None)):
        yield get()
    elif hasattr(model, "peft_config"):
        yield model._modules.get("base_model")  # bare models have a property of that name, which is something else


def _at(model: Any, path: str) -> Any:
    return reduce(lambda found, name: getattr(found, name, None), path.split("."), model)


def _untouched(model: nn.Module) -> list[nn.Module]:
    """Return the modules of kernels that keep what they save; a block of such a class with modules in it is none."""
    return [
        module
        for name, module in model.named_modules()
        if UNTOUCHED in name.rpartition(".")[2].lower()
        or (UNTOUCHED in type(module).__name__.lower() and next(module.children(), None) is None)
    ]


def _matching(levels: Sequence[nn.Module], patterns: Sequence[str]) -> Iterator[nn.Module]:
    # Users know the names of the model as it was before it was wrapped, or adapted.
    named = [(_plain(name), module) for level in levels for name, module in level.named_modules() if name]
    for pattern in patterns:
        found = [module for name, module in named if f".{name}".endswith(f".{pattern}")]
        if not found:
            try:
                whole = re.compile(pattern)
            except re.error as error:
                raise ConfigError(
                    f"{pattern!r} ends no module's name, and is no regular expression: {error}", where="exclude_modules"
                ) from error
            found = [module for name, module in named if whole.fullmatch(name)]
        if not found:
            raise _no_match(pattern, [name for name, _ in named])
        yield from found


def _no_match(pattern: str, names: Sequence[str]) -> ConfigError:
    ends = {name.rpartition(".")[2] for name in names}
    close = difflib.get_close_matches(pattern, sorted(ends | set(names)), n=3)
    return ConfigError(
        f"no module matches {pattern!r}",
        where="exclude_modules",
        how=f"close names are: {', '.join(close)}" if close else "name the end of a module's name, or all by a pattern",
    )


def _plain(name: str) -> str:
    return reduce(lambda rest, part: rest.replace(part, ""), WRAPPERS, f"{name}.").removesuffix(".")


def _begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's
    if not torch.compiler.is_compiling() and (scope := current()) is not None:
        scope.past_head = False


def _enter_head(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's
    if not torch.compiler.is_compiling() and (scope := current()) is not None:
        scope.past_head = True


def _exclude(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's
    if not torch.compiler.is_compiling() and (scope := current()) is not None:
        scope.excluded += 1


def _include(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:  # noqa: ARG001
    if not torch.compiler.is_compiling() and (scope := current()) is not None:
        scope.excluded = max(0, scope.excluded - 1)  # a reset may have come in between


def _enter_weights(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:  # noqa: ARG001 - torch's
    if not torch.compiler.is_compiling() and (scope := current()) is not None:
        scope.modules.append((module, [0]))


def _leave_weights(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:  # noqa: ARG001
    if torch.compiler.is_compiling() or (scope := current()) is None:
        return
    if scope.modules and scope.modules[-1][0] is module:
        scope.modules.pop()


BEGINNING = Hooks(_begin)
HEAD = Hooks(_enter_head)
EXCLUDED = Hooks(_exclude, _include, first=True)
WITH_WEIGHTS = Hooks(_enter_weights, _leave_weights, first=True)
