"""What a model, or the part of it that holds the layers, is given of the tokens of some rows, cut
into parts of the tokens.

To which tokens a value belongs shows in its shape: one for each token; positions of several kinds
for each; a mask of padding; a mask of pairs of tokens; features of some tokens that follow one
another. What has another shape is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.utils._pytree import tree_leaves

from lema.model.sequence.blockmask import pairs_of
from lema.model.sequence.cache import refusal
from lema.model.sequence.marks import TokenMarks
from lema.model.sequence.states import Span

__all__ = ["EMBEDDINGS", "IDS", "MASK", "POSITIONS", "TokenInputs"]

IDS = "input_ids"
EMBEDDINGS = "inputs_embeds"
MASK = "attention_mask"
POSITIONS = "position_ids"
NAMES = frozenset({IDS, EMBEDDINGS, MASK, POSITIONS})
Belonging: TypeAlias = Literal["token", "kinds", "padding", "pairs", "features"]


class TokenInputs:
    """The arguments of a call that belong to its tokens.

    Args:
        values: by name: `input_ids`, `[rows, sequence]`, or `inputs_embeds`, `[rows, sequence,
            hidden]`, and what else there is.
        unread: names of arguments that the model's forward has no parameter for, and hands on.

    Attributes:
        values: as they were given.

    Raises:
        ConfigError: a value may belong to the whole sequence.
    """

    def __init__(self, values: Mapping[str, Any], unread: Collection[str] = ()) -> None:
        self.values = dict(values)
        self._unread = frozenset(unread)
        rows, length = self.tokens.shape[:2]
        self._shape = rows, length
        self._marks = TokenMarks(values, self._shape)
        self._marking = {
            id(mask)
            for leaf in tree_leaves(self.values)
            if isinstance(leaf, Tensor) and (mask := self._marks.of(leaf)) is not None
        }
        for name, value in self.values.items():
            for leaf in tree_leaves(value):
                if self.belonging(name, leaf) is None:
                    shape = [*leaf.shape] if isinstance(leaf, Tensor) else type(leaf).__name__
                    what = f"{name} {shape}, which may belong to the whole sequence"
                    raise refusal(f"the model is given {what}")

    @property
    def name(self) -> str:
        """What the model calls its tokens."""
        return IDS if IDS in self.values else EMBEDDINGS

    @property
    def tokens(self) -> Tensor:
        """The tokens' ids, or what the caller has looked up for them."""
        tokens: Tensor = self.values[self.name]
        return tokens

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self._shape[1]

    @property
    def padding(self) -> Tensor | None:
        """The mask `[rows, sequence]` that says which tokens are padding; None: there is none."""
        mask = self.values.get(MASK)
        is_padding = isinstance(mask, Tensor) and self.belonging(MASK, mask) == "padding"
        return mask if is_padding else None

    @property
    def positions(self) -> Tensor | None:
        """The positions of the tokens, `[rows, sequence]` or `[kinds, rows, sequence]`; None: the
        model counts them."""
        return self.values.get(POSITIONS)

    @property
    def masks(self) -> list[Tensor]:
        """The masks of pairs of tokens, `[rows, 1, sequence, sequence]`, that were made before."""
        leaves = tree_leaves(self.values.get(MASK))
        return [leaf for leaf in leaves if self.belonging(MASK, leaf) == "pairs"]

    def looked_up(self, embeddings: Tensor) -> TokenInputs:
        """Return the same with embeddings in the place of ids."""
        values = {name: value for name, value in self.values.items() if name != IDS}
        return TokenInputs({**values, EMBEDDINGS: embeddings}, self._unread)

    def part(self, span: Span, rows: slice = slice(None)) -> dict[str, Any]:
        """Return what belongs to the tokens of a chunk. A mask is of all tokens up to its end."""
        return {name: self._cut(name, value, span, rows) for name, value in self.values.items()}

    def _cut(self, name: str, value: object, span: Span, rows: slice) -> object:
        if isinstance(value, Mapping):
            return {key: self._cut(name, item, span, rows) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._cut(name, item, span, rows) for item in value)
        assert isinstance(value, Tensor), "another value was refused"
        match self.belonging(name, value):
            case "padding":
                return value[rows, : span.stop]
            case "pairs":
                return pairs_of(value, span, Span(0, span.stop))
            case "kinds":
                return value[:, rows, span.slice]
            case "features":
                marks = self._marks.of(value)
                assert marks is not None, "features have marks"
                return self._marks.cut(value, marks, rows, span.slice)
        return value[rows, span.slice]

    def belonging(self, name: str, value: object) -> Belonging | None:
        """Return how a value belongs to the tokens; None: it may belong to all of them."""
        if not isinstance(value, Tensor):
            return None
        rows, length = self._shape
        if name == MASK and value.dim() == 4:
            fits = value.shape[1:] == (1, length, length) and value.shape[0] in (1, rows)
            return "pairs" if fits else None
        if name == POSITIONS and value.dim() == 3:
            return "kinds" if value.shape[1:] == self._shape else None
        if name == POSITIONS and value.shape == (1, length):
            return "token"
        if value.shape[:2] == self._shape:
            return self._of_tokens(name, value)
        features = self._marks.of(value) is not None and not self._marks.several
        return "features" if features else None

    def _of_tokens(self, name: str, value: Tensor) -> Belonging | None:
        """Return how a value of as many rows and tokens belongs to them. Of a mask, or a kind, of
        each token the model itself may make something of the whole sequence."""
        if name == MASK:
            return "padding" if value.dim() == 2 else None
        named = name in NAMES or name in self._unread or id(value) in self._marking
        return "token" if named or value.dim() > 2 else None
