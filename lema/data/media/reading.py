"""Reads the images, videos and sounds of rows, and makes tokens of the rows that have some."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from lema.data.chat.messages import Chat
from lema.data.chat.pictures import MARKS, NOUNS, Kind, Picture, kinds_in
from lema.data.chat.turns import Span
from lema.data.columns import MEDIA_COLUMNS
from lema.data.files import Row
from lema.data.media.decoder import Decoded, Decoder
from lema.data.media.limits import IMAGES_PER_ROW, MediaLimits
from lema.data.media.processor import Expanded, MediaProcessor
from lema.data.media.rows import MediaRecord, RowMedia
from lema.data.media.sources import MediaSource, Spool, source_of

__all__ = ["DecodedRow", "MediaReading", "with_column"]

# what stands for one in the texts of LLaVA's data, and of those after it
WORDS: Mapping[Kind, str] = {"image": "<image>", "video": "<video>", "audio": "<audio>"}


@dataclass(frozen=True)
class DecodedRow:
    """The decoded images, videos and sounds of one row, while it is read."""

    sources: tuple[MediaSource, ...]
    images: tuple[Decoded, ...]


class MediaReading:
    """What images, videos and sounds are read with; it lives as long as a data set is read.

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
        opened: Callable[[], MediaProcessor],
        limits: MediaLimits,
        spool: Spool,
        image_tokens: Sequence[int],
    ) -> None:
        self._opened = opened
        self._image_tokens = tuple(image_tokens)
        self._limits = limits
        self._spool = spool
        self.records: dict[str, MediaRecord] = {}

    def at(self, folders: Mapping[str, Any]) -> MediaReading:
        """Return the same for data files in these folders, by what rows name as their source."""
        limits = replace(self._limits, folders=folders)
        return MediaReading(self._opened, limits, self._spool, self._image_tokens)

    @cached_property
    def processor(self) -> MediaProcessor:
        """The model's processor."""
        return self._opened()

    @cached_property
    def decoder(self) -> Decoder:
        """What decodes images, videos and sounds."""
        return Decoder(self._limits, lambda: self.processor)

    def pictures(self, row: Row, pictures: Sequence[Picture]) -> DecodedRow:
        """Return the images, videos and sounds of a row.

        Args:
            row: the row.
            pictures: as its messages name them; those without a value are those of its column, in
                their order.

        Raises:
            DataError: one cannot be used, or they are more than the limits allow of a row.
        """
        sources = []
        images = []
        num_pixels = 0.0
        seconds = 0.0
        for picture in pictures:
            source, image = source_of(picture, row, self.decoder, self._spool)
            extent = self.decoder.extent(image)
            if picture.kind == "audio":
                seconds += extent[0]
            else:
                num_pixels += math.prod(extent)
            if num_pixels > IMAGES_PER_ROW * self._limits.max_pixels:
                what = f"the images of the row have more than {num_pixels - 1:,.0f} pixels together"
                how = "remove some, make them smaller, or raise max_image_pixels"
                raise row.broken(what, how=how)
            if seconds > IMAGES_PER_ROW * self._limits.max_seconds:
                what = f"the sounds of the row have {seconds:,.0f} seconds together"
                raise row.broken(what, how="remove some, or raise max_media_seconds")
            sources.append(source)
            images.append(image)
        return DecodedRow(tuple(sources), tuple(images))

    def expanded(
        self, text: str, spans: Sequence[Span], pictures: DecodedRow, row: Row
    ) -> tuple[Expanded, MediaRecord]:
        """Return a rendered chat as tokens, and the record of its images. `DataError` as of
        `MediaProcessor.expand`."""
        expanded = self.processor.expand(text, spans, pictures.images, row)
        places = np.flatnonzero(expanded.images)
        end = int(places[-1]) + 1 if len(places) else 0
        extents = tuple(map(self.decoder.extent, pictures.images))
        return expanded, MediaRecord(text, pictures.sources, 0, end, expanded.spans, extents)

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

    def rows(self, record: MediaRecord | None) -> RowMedia:
        """Return the images of one row, for its micro-batch."""
        return RowMedia([record], self.processor, self.decoder)


def with_column(row: Row, chat: Chat) -> Chat:
    """Return a chat with the images, videos and sounds of the row's columns in their places. If
    none of its messages says where those of a kind are, all stand at the beginning of the first
    message of the user, as TRL puts them.

    Raises:
        DataError: there are other numbers of them and of places, or no place.
    """
    messages = chat.messages
    named = {kind: _in_column(row, kind) for kind in MEDIA_COLUMNS}
    for kind in reversed(list(MEDIA_COLUMNS)):  # because each is put before those that stand there
        pictures = named[kind]
        if pictures and not any(picture.kind == kind for picture in chat.pictures):
            messages = _with_words(messages, kind) or _at_the_beginning(row, messages, pictures)
    following = {kind: iter(pictures or ()) for kind, pictures in named.items()}
    in_parts = {kind: iter(_of_kind(chat, kind)) for kind in MEDIA_COLUMNS}
    places = dict.fromkeys(MEDIA_COLUMNS, 0)
    placed = []
    for message in messages:
        for kind in kinds_in(str(message.get("content"))):
            picture = next(in_parts[kind], None)
            if picture is None or picture.value is None:
                places[kind] += 1
                picture = next(following[kind], None)
            if picture is not None:
                placed.append(picture)
    for kind, pictures in named.items():
        if pictures is None and places[kind]:
            what = f"a message has a part for {NOUNS[kind]}, and the row has no column '{kind}s'"
            how = f'add "{kind}s": [PATH], or write {{"type": "{kind}", "path": PATH}}'
            raise row.broken(what, how=how)
        if places[kind] != len(pictures or ()):
            what = f"the row has {len(pictures or ())} {kind}s, and its messages have "
            what += f"{places[kind]} places for them"
            how = f'give each one part {{"type": "{kind}"}} in a message'
            raise row.broken(what, how=how)
    return replace(chat, messages=messages, pictures=tuple(placed))


def _in_column(row: Row, kind: Kind) -> list[Picture] | None:
    """Return what a row's column of a kind holds; None: the row has no such column."""
    names = [name for name in MEDIA_COLUMNS[kind] if row.values.get(name) is not None]
    if not names:
        return None
    # tables fill what a row does not have with lists of nothing, too
    names = [name for name in names if not _is_empty(row.values[name])] or names[:1]
    if len(names) > 1:
        what = f"the row has both '{names[0]}' and '{names[1]}', of which one would be lost"
        raise row.broken(what, how="give all in one of them")
    (name,) = names
    value = row.values[name]
    is_frames = kind == "video" and name == "video"  # one video, which may be a list of frames
    values = list(value) if isinstance(value, list | tuple) and not is_frames else [value]
    return [
        Picture(item, f"{name}, {kind} {number}", kind=kind)
        for number, item in enumerate((item for item in values if item is not None), 1)
    ]


def _is_empty(value: object) -> bool:
    return isinstance(value, list | tuple) and not value


def _of_kind(chat: Chat, kind: Kind) -> list[Picture]:
    return [picture for picture in chat.pictures if picture.kind == kind]


def _with_words(messages: list[dict[str, Any]], kind: Kind) -> list[dict[str, Any]] | None:
    """Return messages whose texts have a word such as `<image>` with an image in the place of each;
    None: none has the word."""
    word = WORDS[kind]
    changed = [
        {**message, "content": message["content"].replace(word, MARKS[kind])}
        if message["role"] != "assistant" and isinstance(message["content"], str)
        else message
        for message in messages
    ]
    return None if changed == messages else changed


def _at_the_beginning(
    row: Row, messages: list[dict[str, Any]], named: Sequence[Picture]
) -> list[dict[str, Any]]:
    for number, message in enumerate(messages):
        if message["role"] == "user" and isinstance(message["content"], str):
            marks = "".join(MARKS[picture.kind] for picture in named)
            first = {**message, "content": marks + message["content"]}
            return [*messages[:number], first, *messages[number + 1 :]]
    kind = named[0].kind
    raise row.broken(
        f"the row has {kind}s, and no message is the user's",
        how=f'give each one part {{"type": "{kind}"}} in a message',
    )
