"""Tensors with a part for each token of a row, in pages of host memory; a few pages are on the
device at a time.

A page has the parts of some tokens behind each other, so it is one copy. It comes behind the copies
before it, beside the compute, and leaves behind the compute that has changed it. Compute waits for
a page that is to be read, and for one that leaves only when several more have begun to leave.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from lema.backend import Carrier, Download, Upload

__all__ = ["PageForm", "PageStore", "PagedTokens"]

NUM_LEAVING = 2  # pages that are held on the device until their copy has ended


@dataclass(frozen=True)
class PageForm:
    """How tensors `[rows, heads, tokens, width]` lie in a page.

    Args:
        tokens: of a page.
        parts: heads, width and dtype of each tensor.
    """

    tokens: int
    parts: tuple[tuple[int, int, torch.dtype], ...]

    @property
    def row_bytes(self) -> int:
        """Bytes of a page with one row."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [heads * self.tokens * width * dtype.itemsize for heads, width, dtype in self.parts]

    def tensors(self, memory: Tensor) -> list[Tensor]:
        """Return the tensors that lie in a page's memory, uint8 `[rows * row_bytes]`."""
        num_rows = len(memory) // self.row_bytes
        pieces = memory.split([num_rows * size for size in self._sizes])
        return [
            piece.view(dtype).view(num_rows, heads, self.tokens, width)
            for piece, (heads, width, dtype) in zip(pieces, self.parts, strict=True)
        ]


class PageStore:
    """Room for pages in host memory. What is given back is used again.

    Args:
        carrier: copies between there and the device.

    Attributes:
        bytes_up: of all copies to the device so far.
        bytes_down: of all copies from there.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._free: dict[int, list[Tensor]] = {}  # by size
        self.bytes_up = 0
        self.bytes_down = 0

    @property
    def device(self) -> torch.device:
        """The device on which pages are read."""
        return self._carrier.device

    def take(self, nbytes: int) -> Tensor:
        """Return room for a page, uint8 `[nbytes]`, in a storage of its own."""
        free = self._free.get(nbytes)
        return free.pop() if free else self._carrier.host_buffer(nbytes)

    def give(self, page: Tensor) -> None:
        """Take back what `take` has returned. Compute waits for all copies from there by now, and
        a copy to there comes after that."""
        self._free.setdefault(len(page), []).append(page)

    def upload(self, page: Tensor) -> Upload:
        """Begin to copy a page to the device, to memory that is the caller's."""
        self.bytes_up += len(page)
        return self._carrier.device_slots(len(page), 1).upload(page)

    def download(self, memory: Tensor, page: Tensor) -> Download:
        """Begin to copy a page to the host, behind the compute so far."""
        self.bytes_down += len(page)
        return self._carrier.download(memory, page)

    def clear(self) -> None:
        """Let go of the room that is free."""
        self._free.clear()


class _Page:
    """A page: in host memory, on the device, on its way, or at both places.

    Args:
        store: room for it in host memory.
        memory: on the device, where it begins to be.
    """

    def __init__(self, store: PageStore, memory: Tensor) -> None:
        self._store = store
        self.memory: Tensor | None = memory
        self._host: Tensor | None = None
        self._upload: Upload | None = None  # on its way to the device
        self._changed = True  # on the device, since it has left the host

    def expect(self) -> None:
        """Begin to copy it to the device, if it is elsewhere."""
        if self.memory is None and self._upload is None:
            assert self._host is not None, "a page is nowhere"
            self._upload = self._store.upload(self._host)

    def on_device(self, *, changes: bool) -> Tensor:
        """Return its memory on the device; `changes`: it is written."""
        self.expect()
        if self._upload is not None:
            self.memory = self._upload.wait()
            self._upload = None
        assert self.memory is not None, "a page has not come"
        self._changed = self._changed or changes
        return self.memory

    def leave(self) -> Download | None:
        """Have it leave the device; return the copy that is under way. None: there is none, because
        the host has it."""
        download = None
        if self._changed and self.memory is not None:
            if self._host is None:
                self._host = self._store.take(len(self.memory))
            download = self._store.download(self.memory, self._host)
            self._changed = False
        self.drop()
        return download

    def drop(self) -> None:
        """Let go of its memory on the device, so that compute waits for copies from the host."""
        self.memory = None
        self._upload = None

    def give_back(self) -> None:
        """Give back its room in host memory; it is on the device no more."""
        if self._host is not None:
            self._store.give(self._host)
        self._host = None


class _Pages:
    """The pages of a row, by their numbers.

    Args:
        store: room for them.
        form: how they lie in memory.
    """

    def __init__(self, store: PageStore, form: PageForm) -> None:
        self._store = store
        self._form = form
        self._pages: dict[int, _Page] = {}
        self._leaving: deque[Download] = deque()
        weakref.finalize(self, _let_go, self._pages, self._leaving).atexit = False

    def __contains__(self, number: int) -> bool:
        """Whether a page has been written."""
        return number in self._pages

    @property
    def nbytes(self) -> int:
        """Bytes on the device, of pages that are there."""
        memories = [page.memory for page in self._pages.values()]
        return sum(memory.nbytes for memory in memories if memory is not None)

    def begin(self, number: int, num_rows: int) -> None:
        """Write zeros, on the device, where there is no page, or copy a row for more rows."""
        nbytes = num_rows * self._form.row_bytes
        page = self._pages.get(number)
        if page is None:
            memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._store.device)
            self._pages[number] = _Page(self._store, memory)
            return
        memory = self.on_device(number)
        if len(memory) < nbytes:
            wider = memory.new_empty(nbytes)
            pairs = zip(self._form.tensors(wider), self._form.tensors(memory), strict=True)
            for tensor, row in pairs:
                tensor.copy_(row)
            self.forget(number)
            self._pages[number] = _Page(self._store, wider)

    def expect(self, number: int) -> None:
        """Begin to copy a page to the device, if there is one and it is elsewhere."""
        if number in self._pages:
            self._pages[number].expect()

    def on_device(self, number: int, *, changes: bool = False) -> Tensor:
        """Return a page's memory on the device; `changes`: it is written."""
        return self._pages[number].on_device(changes=changes)

    def keep(self, numbers: Collection[int]) -> None:
        """Have all other pages leave the device, those that are on their way there as well."""
        for number, page in self._pages.items():
            if number in numbers:
                continue
            download = page.leave()
            if download is not None:
                self._leaving.append(download)
            # not at once, because compute need not wait for the copy then
            if len(self._leaving) > NUM_LEAVING:
                self._leaving.popleft().release()

    def forget(self, number: int) -> None:
        """Drop a page: it is zero from now on."""
        page = self._pages.pop(number)
        page.drop()
        page.give_back()


def _let_go(pages: dict[int, _Page], leaving: deque[Download]) -> None:
    # before any room is given back, because dropping copies has compute wait for them
    leaving.clear()
    for page in pages.values():
        page.drop()
    for page in pages.values():
        page.give_back()
    pages.clear()


class PagedTokens:
    """Tensors `[rows, heads, tokens, width]` of a row of tokens, in pages.

    Pages that are read or changed are expected in ascending order: the one after is on its way.

    Args:
        store: room for pages.
        form: how tensors lie in one.
        length: tokens of the row.
        num_rows: of a page that begins to exist when it is changed.

    Attributes:
        form: how tensors lie in a page.
        num_rows: the most rows that have been written.
    """

    def __init__(self, store: PageStore, form: PageForm, length: int, *, num_rows: int = 0) -> None:
        self.form = form
        self.num_rows = num_rows
        self._length = length
        self._pages = _Pages(store, form)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._pages.nbytes

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory for all pages of the row."""
        return -(-self._length // self.form.tokens) * self.num_rows * self.form.row_bytes

    def write(self, tensors: Sequence[Tensor], start: int) -> None:
        """Write the parts of some tokens from `start` on, `[rows, heads, n, width]`; tokens of the
        same page that have not been written are zero."""
        self.num_rows = max(self.num_rows, len(tensors[0]))
        for number, bounds in self._bounds(start, start + tensors[0].shape[-2]):
            self._pages.keep([number])
            self._pages.begin(number, len(tensors[0]))
            parts = self._parts(number, bounds, slice(None), changes=True)
            for part, tensor in zip(parts, tensors, strict=True):
                part.copy_(tensor[..., bounds.start - start : bounds.stop - start, :])

    def read(self, start: int, stop: int, num_rows: int) -> list[Tensor]:
        """Return the parts of the tokens from `start` to before `stop`, for so many rows; of pages
        that have one row for all, the same. What has not been written is zero."""
        pages = self._bounds(start, stop)
        self._pages.keep([*(number for number, _ in pages), pages[-1][0] + 1])
        for number, _ in pages:
            self._pages.begin(number, 1)
        pieces = [self._parts(number, bounds, slice(num_rows)) for number, bounds in pages]
        self._pages.expect(pages[-1][0] + 1)
        pieces = [
            [part.expand(num_rows, *part.shape[1:]) for part in of_page] for of_page in pieces
        ]
        return _joined(pieces)

    @contextmanager
    def changing(self, start: int, stop: int, rows: slice) -> Iterator[list[Tensor]]:
        """Yield the parts of some tokens, of some rows, which are written back after the `with`
        block. What has not been written is zero."""
        pages = self._bounds(start, stop)
        self._pages.keep([*(number for number, _ in pages), pages[-1][0] + 1])
        for number, _ in pages:
            self._pages.begin(number, self.num_rows)
        pieces = [self._parts(number, bounds, rows, changes=True) for number, bounds in pages]
        self._pages.expect(pages[-1][0] + 1)
        joined = _joined(pieces)
        yield joined
        if len(pieces) == 1:
            return
        sizes = [bounds.stop - bounds.start for _, bounds in pages]
        for parts, changed in zip(zip(*pieces, strict=True), joined, strict=True):
            for part, of_page in zip(parts, changed.split(sizes, dim=-2), strict=True):
                part.copy_(of_page)

    def take(self, start: int, stop: int) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield the parts of some tokens, page after page, with the first token of each; they are
        zero afterwards."""
        for number, bounds in self._bounds(start, stop):
            with self.changing(bounds.start, bounds.stop, slice(None)) as parts:
                yield bounds.start, parts
                for part in parts:
                    part.zero_()
            first = number * self.form.tokens
            if bounds.start == first and bounds.stop == min(first + self.form.tokens, self._length):
                self._pages.forget(number)

    def _bounds(self, start: int, stop: int) -> list[tuple[int, slice]]:
        """Return the numbers of the pages that have some tokens, and which of these each has."""
        tokens = self.form.tokens
        return [
            (number, slice(max(start, number * tokens), min(stop, (number + 1) * tokens)))
            for number in range(start // tokens, -(-stop // tokens))
        ]

    def _parts(
        self, number: int, bounds: slice, rows: slice, *, changes: bool = False
    ) -> list[Tensor]:
        memory = self._pages.on_device(number, changes=changes)
        first = number * self.form.tokens
        part = slice(bounds.start - first, bounds.stop - first)
        return [tensor[rows, :, part] for tensor in self.form.tensors(memory)]


def _joined(pieces: Sequence[list[Tensor]]) -> list[Tensor]:
    """Return what pages have, behind each other."""
    if len(pieces) == 1:
        return pieces[0]
    return [torch.cat(parts, dim=-2) for parts in zip(*pieces, strict=True)]
