"""The images of some rows: where they are, and, once they are computed with, their tensors.

A micro-batch carries this in place of pixels. So images are decoded when the micro-batch comes to
the model, and what is made of them can go when the tower has read it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, overload

import torch
from torch import Tensor

from lema.data.media.decoder import Decoded, Decoder
from lema.data.media.processor import OF_TOKENS, OF_TYPES, MediaProcessor
from lema.data.media.sources import MediaSource
from lema.errors import DataError

__all__ = ["IMAGES", "MediaRecord", "RowMedia"]

IMAGES = "images"
"""The name of the images in a row, and in a micro-batch."""


@dataclass(frozen=True)
class MediaRecord:
    """The images of one row.

    Attributes:
        text: the rendered chat, with a word for each image.
        sources: where the images are, in their order.
        start: tokens of the whole row that were cut off its beginning.
        end: tokens of the whole row up to the end of its last image.
        spans: the first token of each image in the whole row, and the one after its last.
        extents: of each, as of `Decoder.extent`.
    """

    text: str
    sources: tuple[MediaSource, ...]
    start: int
    end: int
    spans: tuple[tuple[int, int], ...] = ()
    extents: tuple[tuple[float, ...], ...] = ()

    def shifted(self, start: int) -> MediaRecord:
        """Return the record of the row without so many tokens at its beginning."""
        return replace(self, start=start)

    def is_whole(self, max_length: int) -> bool:
        """Whether every image is in a row that is cut to so many tokens."""
        begins = min((start for start, _ in self.spans), default=self.start)
        return begins >= self.start and self.end - self.start <= max_length

    @property
    def num_tokens(self) -> int:
        """How many tokens the images have."""
        return sum(end - start for start, end in self.spans)

    def described(self) -> list[dict[str, Any]]:
        """Return what there is to say of each image; see `RowMedia.described`."""
        separate = len(self.spans) == len(self.sources)
        images = []
        for number, (source, extent) in enumerate(zip(self.sources, self.extents, strict=True)):
            start, end = self.spans[number] if separate else (None, None)
            tokens = None if start is None or end is None else end - start
            first = None if start is None else start - self.start
            size: dict[str, Any] = {"size": list(extent)}
            if source.kind == "audio":
                size = {"seconds": round(extent[0], 2)}
            about = {"name": source.name, "kind": source.kind, **size}
            images.append(about | {"first": first, "tokens": tokens})
        return images

    @property
    def digest(self) -> bytes:
        """What tells the images, and where they stand, from others."""
        about = hashlib.sha256(self.text.encode("utf-8", "surrogatepass"))
        for source in self.sources:
            about.update(source.digest)
        return about.digest()


class RowMedia(Sequence[MediaRecord | None]):
    """The images of the rows of a micro-batch, one entry a row; None: the row has none.

    Args:
        records: those of each row.
        processor: of the model.
        decoder: decodes the images, videos and sounds.
        lengths: of each pack of the micro-batch, the tokens of its rows; None: they are not packed.
    """

    def __init__(
        self,
        records: Sequence[MediaRecord | None],
        processor: MediaProcessor,
        decoder: Decoder,
        lengths: Sequence[Sequence[int]] | None = None,
    ) -> None:
        self.records = tuple(records)
        self.lengths = lengths
        self._processor = processor
        self._decoder = decoder

    def __len__(self) -> int:
        return len(self.records if self.lengths is None else self.lengths)

    @overload
    def __getitem__(self, index: int) -> MediaRecord | None: ...
    @overload
    def __getitem__(self, index: slice) -> RowMedia: ...
    def __getitem__(self, index: int | slice) -> MediaRecord | RowMedia | None:
        if isinstance(index, slice):
            if self.lengths is None:
                return RowMedia(self.records[index], self._processor, self._decoder)
            bounds = [0, *accumulate(map(len, self.lengths))]
            packs = range(len(self.lengths))[index]
            records = [row for pack in packs for row in self.records[slice(*bounds[pack:][:2])]]
            lengths = self.lengths[index]
            return RowMedia(records, self._processor, self._decoder, lengths)
        return self.records[index]

    def before_answers(self, prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Return what the model is given besides tokens and mask where prompts are padded on the
        left, because answers follow them; see `inputs`.

        Args:
            prompts: the tokens of each row.
        """
        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for number, prompt in enumerate(prompts):
            ids[number, : len(prompt)] = torch.tensor(prompt)
        inputs = self.inputs(ids)
        for name, value in inputs.items():
            if OF_TYPES in name:
                rows = [
                    row.roll(width - len(prompt))
                    for row, prompt in zip(value, prompts, strict=True)
                ]
                inputs[name] = torch.stack(rows)
        return inputs

    @classmethod
    def joined(cls, parts: Sequence[RowMedia | None]) -> RowMedia | None:
        """Return the images of rows one after the other; None: no row of the data has any."""
        first = next((part for part in parts if part is not None), None)
        if first is None:
            return None
        records = [row for part in parts for row in ((None,) if part is None else part.records)]
        packs = [part.lengths for part in parts if part is not None and part.lengths is not None]
        lengths = [of_pack for of_part in packs for of_pack in of_part] or None
        return cls(records, first._processor, first._decoder, lengths)

    def in_a_pack(self, lengths: Sequence[int]) -> RowMedia:
        """Return the images of the same rows as those of one pack, whose rows have so many
        tokens."""
        return RowMedia(self.records, self._processor, self._decoder, [lengths])

    @property
    def num_images(self) -> int:
        """How many images there are."""
        return sum(len(record.sources) for record in self.records if record is not None)

    def described(self) -> list[list[dict[str, Any]]]:
        """Return what there is to say of the images of each row: names and sizes, the places of
        their first tokens, and how many tokens they have; None, if they cannot be separated."""
        return [[] if record is None else record.described() for record in self.records]

    @property
    def digest(self) -> bytes:
        """What tells these images from others."""
        about = hashlib.sha256()
        for record in self.records:
            about.update(b"" if record is None else record.digest)
        return about.digest()

    def decoded(self) -> list[list[Decoded]]:
        """Decode the images, videos and sounds of each row. `DataError`: one cannot be read any
        more, or is another one."""
        return [
            [] if record is None else [source.load(self._decoder) for source in record.sources]
            for record in self.records
        ]

    def inputs(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Decode the images, and return what the model is given besides tokens and mask.

        Args:
            input_ids: of the same rows, int64 `[rows, sequence]`, padded on the right.

        Returns:
            What the processor makes: pixels as they come, and columns of tokens `[rows, sequence]`,
            0 where no image is.

        Raises:
            DataError: an image cannot be read any more, or is another one.
        """
        texts = [None if record is None else record.text for record in self.records]
        outputs = self._processor.inputs(texts, self.decoded())
        ids = outputs["input_ids"]
        inputs = {
            name: value
            for name, value in outputs.items()
            if name not in OF_TOKENS and OF_TYPES not in name
        }
        columns = {name: value for name, value in outputs.items() if OF_TYPES in name}
        inputs |= {name: value.new_zeros(input_ids.shape) for name, value in columns.items()}
        for number, record in enumerate(self.records):
            if record is None:
                continue
            in_row = slice(record.start, record.end)
            here = slice(0, record.end - record.start)
            if not ids[number, in_row].equal(input_ids[number, here].to(ids.device, ids.dtype)):
                what = "the model's processor makes other tokens of the row than when it was read"
                raise DataError(what, where=record.sources[0].origin, how="start the run anew")
            for name, value in columns.items():
                inputs[name][number, here] = value[number, in_row]
        return inputs
