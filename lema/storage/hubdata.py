"""Data sets of the hub, and directories of data, as the library `datasets` reads them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qsl

from lema.errors import DataError, installing

__all__ = ["HUB", "HubData", "is_hub"]

HUB = "hub:"
"""How the name of a data set of the hub begins:
`hub:org/name?name=subset&split=train&revision=main&streaming=true`.
"""


def is_hub(path: str | Path) -> bool:
    """Whether a text names a data set of the hub."""
    return str(path).startswith(HUB)


@dataclass(frozen=True)
class HubData:
    """A data set of the hub.

    Attributes:
        label: the text that names it.
        path: its id, or a directory.
        split: the splits of it, or parts of them.
        options: what else the library is told: `name`, `revision`, `data_files`.
        streaming: whether its rows are read without downloading it first.
        first: the first row of a stream that is read, from 0.
        count: how many rows of a stream are read; None: all.
    """

    label: str
    path: str
    split: str
    options: Mapping[str, Any]
    streaming: bool = False
    first: int = 0
    count: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the text that names a data set. `DataError`: it has an unknown option."""
        path, _, query = text.removeprefix(HUB).partition("?")
        options = dict(parse_qsl(query))
        split = options.pop("split", "train")
        streaming = options.pop("streaming", "false")
        first = int(options.pop("skip", 0))
        count = int(options.pop("take")) if "take" in options else None
        # others name files, directories and addresses
        if wrong := sorted(options.keys() - {"name", "revision"}):
            what = f"a data set of the hub has no option {wrong[0]!r}"
            raise DataError(what, where=text, how="there are name, split, revision and streaming")
        if streaming not in ("true", "false"):
            raise DataError(f"streaming is {streaming!r}", where=text, how="say true or false")
        return cls(text, path, split, options, streaming == "true", first, count)

    def part(self, first: int, count: int | None) -> Self:
        """Return a part of a stream, `count` rows from the one with number `first` of it on."""
        if self.count is not None:
            left = max(self.count - first, 0)
            count = left if count is None else min(count, left)
        label = self.label.partition("&skip=")[0].partition("&take=")[0]
        label += f"&skip={self.first + first}" * bool(self.first + first)
        label += "" if count is None else f"&take={count}"
        return replace(self, label=label, first=self.first + first, count=count)

    @contextmanager
    def _library(self) -> Iterator[Any]:
        """Give the library `datasets`. `DataError`: it is not there, or whatever it raises."""
        local = " or write path: DIRECTORY/* and LEMA reads the files" * Path(self.path).is_dir()
        try:
            import datasets
        except ImportError as error:
            what = "a data set of the hub needs the library `datasets`"
            fix = installing("datasets") + local
            raise DataError(what, where=self.label, how=fix) from error
        try:
            yield datasets
        except Exception as error:  # whatever the network, the builder or the files raise
            fix = (
                "check path, name and split; without a network the data set must be in the cache "
                "of `datasets`"
            )
            raise DataError(
                f"the data set cannot be loaded: {error}", where=self.label, how=fix
            ) from error

    def files_of(self, split: str) -> list[Path]:
        """Download a split, if it is not there yet, and return the Arrow files that the library
        keeps of it.
        """
        with self._library() as datasets:
            dataset = datasets.load_dataset(
                self.path, keep_in_memory=False, split=split, **self.options
            )
            return [Path(file["filename"]) for file in dataset.cache_files]

    def version(self) -> str:
        """Return where the library would keep a stream: it names the commit by it, or the times of
        local files.
        """
        with self._library() as datasets:
            return str(datasets.load_dataset_builder(self.path, **self.options).cache_dir)

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the rows of a stream, numbered from 1, as the library reads them. `DataError`: they
        cannot be had.
        """
        with self._library() as datasets:
            builder = datasets.load_dataset_builder(self.path, **self.options)
            rows = builder.as_streaming_dataset(split=self.split)
            rows = rows.skip(self.first) if self.first else rows
            rows = rows if self.count is None else rows.take(self.count)
            yield from enumerate(rows, 1 + self.first)
