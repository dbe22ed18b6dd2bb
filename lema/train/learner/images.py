"""Images in the rows of a learner: the published processor makes the tokens and pixels of each."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lema.data.media.decode import Unusable, decoded
from lema.data.media.processor import OF_TOKENS, OF_TYPES, MediaProcessor
from lema.errors import DataError
from lema.train.model import LemaModel

__all__ = ["BatchImages", "LearnerImages", "RowImage", "RowOfChunks"]

WHERE = "model_input"
MOST_IMAGES = 64  # of a row


@dataclass(frozen=True)
class RowImage:
    """An image in a row.

    Args:
        first: its first token in the row.
        num_tokens: how many it has.
        content: the bytes of its file.
    """

    first: int
    num_tokens: int
    content: bytes


class LearnerImages:
    """Makes tokens and pixels of images; any thread may call it.

    Args:
        processor: of the model.
        placeholders: the tokens that the model replaces by what its tower makes.
        max_pixels: of an image, by its header.
        max_bytes: of an image's file.
    """

    def __init__(
        self,
        processor: MediaProcessor,
        placeholders: Sequence[int],
        *,
        max_pixels: int,
        max_bytes: int,
    ) -> None:
        self._processor = processor
        self.placeholders = tuple(placeholders)
        self._max_pixels = max_pixels
        self._max_bytes = max_bytes
        # because a tokenizer is changed by who pads with it
        self._lock = threading.Lock()

    @classmethod
    def of(cls, opened: LemaModel) -> LearnerImages | None:
        """Return what makes those of an open model; None: it was opened for text alone."""
        config = opened.config
        if config.modalities != "all":
            return None
        return cls(
            opened.files.image_processor(),
            opened.files.image_tokens,
            max_pixels=config.max_image_pixels,
            max_bytes=config.max_image_bytes,
        )

    def processed(self, content: bytes) -> dict[str, Tensor]:
        """Return what the processor makes of an image alone: its tokens, `[1, tokens]`, as are
        other columns of tokens, and its pixels.

        Raises:
            DataError: it is no image that is read, or the processor does not take it.
        """
        if len(content) > self._max_bytes:
            what = f"an image has {len(content):,} bytes, more than {self._max_bytes:,}"
            raise DataError(what, where=WHERE, how="make it smaller, or raise max_image_bytes")
        try:
            image = decoded(content, self._max_pixels)
        except Unusable as error:
            raise DataError(error.what, where=WHERE, how=error.how) from error
        with self._lock:
            return self._processor.block(image)

    def inputs(self, rows: Sequence[Sequence[RowImage]], input_ids: Tensor) -> dict[str, Tensor]:
        """Return what the model is given of images, besides tokens and mask.

        Args:
            rows: the images of each row.
            input_ids: of the same rows, int64 `[rows, tokens]`.

        Returns:
            Pixels of all images, one after the other, and columns of tokens `[rows, tokens]`, 0
            where no image is.
        """
        pixels: dict[str, list[Tensor]] = {}
        columns: dict[str, Tensor] = {}
        for number, images in enumerate(rows):
            for image in images:
                for name, value in self.processed(image.content).items():
                    if OF_TYPES in name:
                        column = columns.setdefault(name, value.new_zeros(input_ids.shape))
                        column[number, image.first : image.first + image.num_tokens] = value[0]
                    elif name not in OF_TOKENS:
                        pixels.setdefault(name, []).append(value)
        return {name: torch.cat(values) for name, values in pixels.items()} | columns


class BatchImages:
    """The images of a micro-batch, which become pixels when it comes to the model.

    Args:
        images: makes them.
        rows: the images of each row.

    Attributes:
        lengths: None, as rows are not packed.
    """

    lengths: None = None

    def __init__(self, images: LearnerImages, rows: Sequence[Sequence[RowImage]]) -> None:
        self._images = images
        self._rows = rows

    def inputs(self, input_ids: Tensor) -> dict[str, Tensor]:
        """Return what the model is given besides tokens and mask; see `LearnerImages.inputs`."""
        return self._images.inputs(self._rows, input_ids)


class RowOfChunks:
    """A row that is put together of tokens and images.

    Args:
        images: makes tokens of images; None: the model is open for text alone.
    """

    def __init__(self, images: LearnerImages | None) -> None:
        self._images = images
        self._tokens: list[Tensor] = []
        self.images: list[RowImage] = []

    @property
    def tokens(self) -> Tensor:
        """All tokens so far, int64 `[tokens]`."""
        return torch.cat([*self._tokens, torch.zeros(0, dtype=torch.long)])

    def add_tokens(self, tokens: Tensor) -> None:
        """Add text. `DataError`: a token of it stands for an image."""
        placeholders = () if self._images is None else self._images.placeholders
        if any(bool((tokens == placeholder).any()) for placeholder in placeholders):
            what = "a row has the model's token for an image in its text"
            raise DataError(what, where=WHERE, how="send the image, without tokens for it")
        self._tokens.append(tokens)

    def add_image(self, content: bytes) -> None:
        """Add an image. `DataError`: see `LearnerImages.processed`, or the row has too many."""
        if self._images is None:
            what = "a row has an image, and the server was started for text alone"
            how = "start it with --set modalities=all, if the model has a tower for images"
            raise DataError(what, where=WHERE, how=how)
        if len(self.images) >= MOST_IMAGES:
            raise DataError(f"a row has more than {MOST_IMAGES} images", where=WHERE)
        block = self._images.processed(content)["input_ids"][0].long()
        self.images.append(RowImage(sum(map(len, self._tokens)), len(block), content))
        self._tokens.append(block)
