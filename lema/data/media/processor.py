"""The model's published processor: it writes as many tokens for an image, a video or a sound as
the model's tower makes, and the tensors that the tower reads.

Nothing of that is known here. The processor is given rendered chats and images as any trainer
gives them, and its tokenizer is watched: where the trained words are in the text that it is given,
two marks tell, which the tokenizer itself never sees.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from lema.data.chat.pieces import Ids, Learnt
from lema.data.chat.tokens import tokenizing
from lema.data.chat.turns import Span
from lema.data.files import Row
from lema.data.media.decode import Unusable
from lema.data.media.decoder import Decoded
from lema.data.media.videos import Facts, Video
from lema.errors import DataError, LemaError, installing, message_of
from lema.storage.modelfiles import library_errors

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

__all__ = ["Expanded", "MediaProcessor"]

MARK = chr(0x107FFC)  # at the beginning and at the end of trained words, for the processor's input
OF_TOKENS = ("input_ids", "attention_mask")
HOW = "use the processor that was published with the model"
OTHER_MODEL = "remove the row, or take another model"
OFFSETS = "text_replacement_offsets"
WRITES = "get_text_with_replacements"  # the method of releases that tell the offsets
# what a processor of videos is told that its sampling of frames is not given
NOT_OF_SAMPLING = frozenset(
    {"input_data_format", "do_convert_rgb", "do_sample_frames", "device", "video_metadata"}
)
OF_TYPES = "token_type"  # is in the names of columns that say what each token is


@dataclass(frozen=True)
class Expanded:
    """A text with images as tokens.

    Attributes:
        ids: the tokens, int32 `[sequence]`.
        learnt: which of them are trained on, `[sequence]`; none of an image.
        images: of each token whether it is an image's, `[sequence]`.
        spans: the first token of each image, and the one after its last; one for all where they
            cannot be told apart.
    """

    ids: Ids
    learnt: Learnt
    images: Learnt
    spans: tuple[Span, ...]


class MediaProcessor:
    """A processor that was published with a model.

    Args:
        processor: the processor.
        tokenizer: that tokenises the rows of the run.
        image_tokens: the tokens that the model replaces by what its towers make.
    """

    def __init__(
        self,
        processor: ProcessorMixin,
        tokenizer: PreTrainedTokenizerBase,
        image_tokens: Sequence[int],
    ) -> None:
        self._processor: Any = copy.copy(processor)
        self._watched = _Watched(tokenizer)
        vars(self._processor)["tokenizer"] = self._watched
        self._tokenizer = tokenizer
        # whether the processor tells where in its text it has written what for an image
        self._offsets = {f"return_{OFFSETS}": True} if hasattr(processor, WRITES) else {}
        self._image_tokens = np.array(sorted(set(image_tokens)), dtype=np.int32)

    @property
    def name(self) -> str:
        """What the processor is called."""
        return type(self._processor).__name__

    @cached_property
    def _tokenize(self) -> Callable[[str, Sequence[Span], bool], tuple[Ids, Learnt]]:
        return tokenizing(self._tokenizer)

    @property
    def sampling_rate(self) -> int:
        """Samples a second that the model hears. `Unusable`: it does not hear."""
        part = getattr(self._processor, "audio_processor", None)
        part = part or getattr(self._processor, "feature_extractor", None)
        if part is None:
            raise Unusable(f"{self.name} takes no sounds", OTHER_MODEL)
        return int(part.sampling_rate)

    def frame_numbers(self, facts: Facts, fps: float | None) -> list[int]:
        """Return the numbers of the frames of a video that the model is shown.

        Args:
            facts: of the video.
            fps: so many for a second; None: as the processor's files say, which may be all.

        Raises:
            Unusable: the processor takes no videos, or cannot choose.
        """
        part = self._videos()
        if fps is None and not part.do_sample_frames:
            return list(range(facts.num_frames))
        from transformers.video_utils import VideoMetadata

        settings = {name: getattr(part, name, None) for name in part.valid_kwargs.__annotations__}
        if fps is not None:
            settings |= {"fps": fps, "num_frames": None}
        metadata = VideoMetadata(
            total_num_frames=facts.num_frames,
            fps=facts.rate,
            width=facts.width,
            height=facts.height,
            duration=None if facts.rate is None else facts.num_frames / facts.rate,
        )
        chosen = {name: settings[name] for name in settings.keys() - NOT_OF_SAMPLING}
        try:
            return [int(number) for number in part.sample_frames(metadata=metadata, **chosen)]
        except Exception as error:
            what = f"{self.name} chooses no frames of the video: {message_of(error)}"
            raise Unusable(what, "set video_fps, or give a list of frames") from error

    def _videos(self) -> Any:
        """Return the processor's part for videos. `Unusable`: there is none."""
        part = getattr(self._processor, "video_processor", None)
        if part is not None:
            return part
        if "video_processor" in self._processor.get_attributes():
            what = "videos are prepared by torchvision, which is not installed"
            raise Unusable(what, installing("videos"))
        raise Unusable(f"{self.name} takes no videos", OTHER_MODEL)

    def _arguments(self, rows: Sequence[Sequence[Decoded]]) -> dict[str, Any]:
        """Return what the processor is given besides texts, as `apply_chat_template` gives it: the
        images of each row, and the videos and sounds of all rows."""
        every = [medium for row in rows for medium in row]
        videos = [medium for medium in every if isinstance(medium, Video)]
        sounds = [medium for medium in every if isinstance(medium, np.ndarray)]
        arguments: dict[str, Any] = {}
        if len(every) > len(videos) + len(sounds):
            if getattr(self._processor, "image_processor", None) is None:
                raise Unusable(f"{self.name} takes no images", OTHER_MODEL)
            arguments["images"] = [
                [medium for medium in row if not isinstance(medium, Video | np.ndarray)]
                for row in rows
            ]
        if videos:
            self._videos()
            arguments["videos"] = [video.frames for video in videos]
            arguments["video_metadata"] = [video.metadata for video in videos]
            arguments["do_sample_frames"] = False  # because they are those that the model is shown
        if sounds:
            arguments |= {"audio": sounds, "sampling_rate": self.sampling_rate}
        return arguments

    def expand(
        self, text: str, spans: Sequence[Span], images: Sequence[Decoded], row: Row
    ) -> Expanded:
        """Return a rendered chat as tokens, with those of its images, videos and sounds.

        Args:
            text: the chat as its template writes it, with a word for each image.
            spans: the stretches that are trained on.
            images: them all, in their order in the text.
            row: where they are from.

        Raises:
            DataError: the processor refuses them, or changes the words.
        """
        if MARK in text:
            what = f"a message has the character U+{ord(MARK):X}, which LEMA uses as a mark"
            raise row.broken(what, how="remove it")
        with _refused(row):
            outputs = self._processor(
                text=[_marked(text, spans)],
                add_special_tokens=False,
                **self._arguments([images]),
                **self._offsets,
            )
        marked = self._watched.marked_texts[0]
        parts = marked.split(MARK)
        borders = np.cumsum([len(part) for part in parts]).tolist()[:-1]
        if len(borders) != 2 * len(spans):
            what = f"{self.name} changes the words of the chat"
            raise row.broken(what, how=HOW)
        in_text = list(zip(borders[::2], borders[1::2], strict=True))
        ids, learnt = self._tokenize("".join(parts), in_text, True)
        if ids.tolist() != np.asarray(outputs["input_ids"][0]).tolist():
            what = f"{self.name} makes other tokens of this chat than its tokenizer"
            raise row.broken(what, how=HOW)
        written = self._written(outputs, marked, row)
        # every second one, so that no two of them touch each other
        masks = [
            self._tokenize("".join(parts), of_parity, True)[1]
            for of_parity in (written[::2], written[1::2])
            if of_parity
        ] or [np.isin(ids, self._image_tokens)]
        if written and np.any(np.isin(ids, self._image_tokens) & ~np.logical_or.reduce(masks)):
            what = "the row has the model's token for an image in its text, beside its images"
            raise row.broken(what, how="write the word for it in another way")
        of_images: Learnt = np.logical_or.reduce(masks) | np.isin(ids, self._image_tokens)
        if images and not of_images.any():
            what = "the chat template writes nothing for the images of this chat"
            how = "use the chat template of the model's processor, or give chat_template"
            raise row.broken(what, how=how)
        runs = sorted(run for mask in masks for run in _runs(mask))
        if len(runs) != len(images) and runs:
            runs = [(runs[0][0], max(end for _, end in runs))]
        return Expanded(ids, learnt & ~of_images, of_images, tuple(runs))

    def _written(self, outputs: Mapping[str, Any], marked: str, row: Row) -> list[tuple[int, int]]:
        """Return where the processor's text has what it wrote for images, videos and sounds,
        without marks; nothing with releases that do not say it.

        Raises:
            DataError: it wrote nothing for one of them.
        """
        offsets = (outputs.get(OFFSETS) or [[]])[0]
        written = [
            (start - marked.count(MARK, 0, start), end - marked.count(MARK, 0, end))
            for start, end in (offset["new_span"] for offset in offsets)
        ]
        if any(start == end for start, end in written):
            what = (
                f"{self.name} writes no token for a sound or video of the row, which is too short"
            )
            raise row.broken(what, how="remove the row")
        return written

    def block(self, image: Image) -> dict[str, Tensor]:
        """Return what the processor makes of an image alone: the tokens that it writes for the
        word of an image, and the tensors that the tower reads.

        Raises:
            DataError: it writes no tokens for an image that stands alone.
        """
        word = getattr(self._processor, "image_token", None)
        if not isinstance(word, str):
            what = f"{self.name} does not say which word stands for an image"
            raise DataError(what, where="images", how=HOW)
        with library_errors(self.name, "the model's processor refuses an image", HOW):
            outputs = self._processor(
                text=[word], images=[[image]], add_special_tokens=False, return_tensors="pt"
            )
        if not np.isin(outputs["input_ids"].numpy(), self._image_tokens).any():
            raise DataError(f"{self.name} writes no tokens for an image", where="images", how=HOW)
        return dict(cast("Mapping[str, Tensor]", outputs))

    def inputs(
        self, texts: Sequence[str | None], images: Sequence[Sequence[Decoded]]
    ) -> dict[str, Tensor]:
        """Return what the processor makes of some rows together.

        Args:
            texts: rendered chats; None: of a row without images.
            images: those of each row.

        Returns:
            Its tensors by name, padded on the right; those of tokens are `[rows, sequence]`.
        """
        blank = self._tokenizer.eos_token or self._tokenizer.pad_token or "."
        padded = self._watched.padding()
        with library_errors(self.name, "the model's processor fails on a batch", HOW):
            outputs = self._processor(
                text=[blank if text is None else text for text in texts],
                **self._arguments(images),
                add_special_tokens=False,
                # of texts alone, because sounds are padded as the processor's files say
                text_kwargs={"padding": padded, "padding_side": "right"},
                return_tensors="pt",
            )
        return {
            name: value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value))
            for name, value in cast("Mapping[str, Any]", outputs).items()
        }


class _Watched:
    """A tokenizer that keeps the texts which it was given last, and tokenises them without marks.

    Args:
        tokenizer: does the work.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.marked_texts: list[str] = []

    def __call__(self, text: str | list[str], *args: object, **kwargs: object) -> object:
        texts = [text] if isinstance(text, str) else list(text)
        self.marked_texts = texts
        plain = [with_marks.replace(MARK, "") for with_marks in texts]
        call: Any = self._tokenizer
        return call(plain[0] if isinstance(text, str) else plain, *args, **kwargs)

    def __getattr__(self, name: str) -> object:
        value: object = getattr(self._tokenizer, name)
        return value

    def padding(self) -> bool:
        """Make sure that rows can be padded: with which token is nothing to them."""
        if self._tokenizer.pad_token is None:
            self._tokenizer = copy.copy(self._tokenizer)
            self._tokenizer.pad_token = self._tokenizer.eos_token
        return True


@contextmanager
def _refused(row: Row) -> Iterator[None]:
    """Have any error of a processor name the row: its files are from outside, and what it is given
    as well."""
    try:
        yield
    except LemaError:
        raise
    except Unusable as error:
        raise row.broken(error.what, how=error.how) from error
    except Exception as error:
        what = f"the model's processor refuses this row: {message_of(error)}"
        how = "compare the images of the row with the words for them in its chat"
        raise row.broken(what, how=how) from error


def _runs(mask: Learnt) -> list[Span]:
    """Return where a mask is true: the first place of each stretch, and the one after its last."""
    changes = np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))
    borders = np.flatnonzero(changes).tolist()
    return list(zip(borders[::2], borders[1::2], strict=True))


def _marked(text: str, spans: Sequence[Span]) -> str:
    parts = []
    at = 0
    for border in (border for span in spans for border in span):
        parts += [text[at:border], MARK]
        at = border
    return "".join([*parts, text[at:]])
