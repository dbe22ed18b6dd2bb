"""Reads the images of rows, and makes tokens of the rows that have some."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from lema.data.chat.messages import Chat
from lema.data.chat.pictures import PICTURE, Picture
from lema.data.chat.turns import Span
from lema.data.columns import IMAGE_COLUMNS
from lema.data.files import Row
from lema.data.images.limits import IMAGES_PER_ROW, ImageLimits
from lema.data.images.processor import Expanded, ImageProcessor
from lema.data.images.rows import ImageRecord, RowImages
from lema.data.images.sources import ImageSource, Spool, source_of

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["ImageReading", "RowPictures", "with_column"]

UNREAD_COLUMNS = ("videos", "video", "audios", "audio")  # of TRL's rows, which are not read
WORD = "<image>"  # for an image in the texts of LLaVA's data and of those after it


@dataclass(frozen=True)
class RowPictures:
    """The decoded images of one row, while it is read."""

    sources: tuple[ImageSource, ...]
    images: tuple[Image, ...]


class ImageReading:
    """What images are read with; it lives as long as a data set is read.

    Args:
        opened: returns the model's processor. `DataError`: there is none.
        limits: what may be read.
        spool: keeps the bytes of images that are in rows.
        image_tokens: those that the model replaces by what its tower makes.

    Attributes:
        records: of rows that were read, by their origin, until somebody takes them.
    """

    def __init__(
        self,
        opened: Callable[[], ImageProcessor],
        limits: ImageLimits,
        spool: Spool,
        image_tokens: Sequence[int],
    ) -> None:
        self._opened = opened
        self._image_tokens = tuple(image_tokens)
        self._limits = limits
        self._spool = spool
        self.records: dict[str, ImageRecord] = {}

    def at(self, folders: Mapping[str, Any]) -> ImageReading:
        """Return the same for data files in these folders, by what rows name as their source."""
        limits = replace(self._limits, folders=folders)
        return ImageReading(self._opened, limits, self._spool, self._image_tokens)

    @cached_property
    def processor(self) -> ImageProcessor:
        """The model's processor."""
        return self._opened()

    def pictures(self, row: Row, pictures: Sequence[Picture]) -> RowPictures:
        """Return the images of a row.

        Args:
            row: the row.
            pictures: as its messages name them; those without a value are those of its column, in
                their order.

        Raises:
            DataError: there are more of these than of the others, or fewer, or an image cannot be
                used.
        """
        sources = []
        images = []
        num_pixels = 0
        for picture in pictures:
            source, image = source_of(picture, row, self._limits, self._spool)
            num_pixels += image.size[0] * image.size[1]
            if num_pixels > IMAGES_PER_ROW * self._limits.max_pixels:
                what = f"the images of the row have more than {num_pixels - 1:,} pixels together"
                how = "remove some, make them smaller, or raise max_image_pixels"
                raise row.broken(what, how=how)
            sources.append(source)
            images.append(image)
        return RowPictures(tuple(sources), tuple(images))

    def expanded(
        self, text: str, spans: Sequence[Span], pictures: RowPictures, row: Row
    ) -> tuple[Expanded, ImageRecord]:
        """Return a rendered chat as tokens, and the record of its images. `DataError` as of
        `ImageProcessor.expand`."""
        expanded = self.processor.expand(text, spans, pictures.images, row)
        places = np.flatnonzero(expanded.images)
        end = int(places[-1]) + 1 if len(places) else 0
        sizes = tuple(image.size for image in pictures.images)
        return expanded, ImageRecord(text, pictures.sources, 0, end, expanded.spans, sizes)

    def check_tokens(self, row: Row, ids: Sequence[int] | npt.NDArray[np.int32]) -> None:
        """Refuse a row without images that has a token for one, as words that write it out have.
        The model would look for its image among those of the other rows of a batch.

        Args:
            row: the row; one whose images are in `records` may have such tokens.
            ids: its tokens.

        Raises:
            DataError: there is such a token.
        """
        if row.origin in self.records or not np.isin(ids, self._image_tokens).any():
            return
        what = "the row has the model's token for an image in its text, and no image"
        raise row.broken(what, how="give the image, or write the word for it in another way")

    def rows(self, record: ImageRecord | None) -> RowImages:
        """Return the images of one row, for its micro-batch."""
        return RowImages([record], self.processor, self._limits.max_pixels)


def with_column(row: Row, chat: Chat) -> Chat:
    """Return a chat with the images of the row's column in their places. If none of its messages
    says where, all stand at the beginning of the first message of the user, as TRL puts them.

    Raises:
        DataError: there are other numbers of images and of places, or no place.
    """
    for unread in UNREAD_COLUMNS:
        if row.values.get(unread):
            what = f"the row has a column '{unread}', and rows have text and images alone"
            raise row.broken(what, how="remove the column, or the row")
    name = next((name for name in IMAGE_COLUMNS if row.values.get(name) is not None), None)
    if name is None:
        if any(picture.value is None for picture in chat.pictures):
            what = "a message has a part for an image, and the row has no column 'images'"
            how = 'add "images": [PATH], or write {"type": "image", "path": PATH}'
            raise row.broken(what, how=how)
        return chat
    value = row.values[name]
    values = list(value) if isinstance(value, list | tuple) else [value]
    named = [
        Picture(image, f"{name}, image {number}")
        for number, image in enumerate((image for image in values if image is not None), 1)
    ]
    if named and not chat.pictures:
        chat = _with_words(chat)
        if not chat.pictures:
            return _at_the_beginning(row, chat, named)
    places = sum(picture.value is None for picture in chat.pictures)
    if places != len(named):
        what = f"the row has {len(named)} images, and its messages have {places} places for them"
        raise row.broken(what, how='give each image one part {"type": "image"} in a message')
    following = iter(named)
    pictures = (next(following) if picture.value is None else picture for picture in chat.pictures)
    return replace(chat, pictures=tuple(pictures))


def _with_words(chat: Chat) -> Chat:
    """Return a chat whose texts have the word `<image>` with an image in the place of each."""
    messages = []
    count = 0
    for message in chat.messages:
        content = message["content"]
        if message["role"] != "assistant" and isinstance(content, str):
            count += content.count(WORD)
            message = {**message, "content": content.replace(WORD, PICTURE)}
        messages.append(message)
    return replace(chat, messages=messages, pictures=(Picture(None, "images"),) * count)


def _at_the_beginning(row: Row, chat: Chat, named: Sequence[Picture]) -> Chat:
    for number, message in enumerate(chat.messages):
        if message["role"] == "user" and isinstance(message["content"], str):
            first = {**message, "content": PICTURE * len(named) + message["content"]}
            messages = [*chat.messages[:number], first, *chat.messages[number + 1 :]]
            return replace(chat, messages=messages, pictures=tuple(named))
    raise row.broken(
        "the row has images, and no message is the user's",
        how='give each image one part {"type": "image"} in a message',
    )
