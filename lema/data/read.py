"""Reads files or rows into a data set of tokens, and names or counts every row that cannot be
used.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from lema.config import LemaConfig
from lema.data import cache as token_cache
from lema.data.columns import Kind, detect, num_trained, unused
from lema.data.dataset import CUT_IMAGE, Columns, Table, TokenDataset
from lema.data.files import Row
from lema.data.forms import Forms, Remarks
from lema.data.media.reading import MediaReading
from lema.data.media.rows import MediaRecord
from lema.data.mixing.sampling import Sampling, check_rates
from lema.data.readers import Readers
from lema.data.sets.sources import (
    DataFile,
    Sources,
    data_files,
    folders_of,
    given_files,
    read_rows,
    rows_in,
)
from lema.data.tokenize import Ints, Reading, tokenize_rows
from lema.errors import ConfigError, DataError, DiskError
from lema.storage.diskspace import make_private

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Overlong", "mixed", "needs_tokenizer", "prepare_data", "rows_of", "table_of"]

Overlong: TypeAlias = Literal["truncate", "drop", "error"]
"""What becomes of a row which is too long: cut at the end, left out, or refused."""

Data: TypeAlias = Sources | Iterable[Mapping[str, Any]]
"""Files, directories, globs, data sets; or the rows themselves, as dictionaries."""


def prepare_data(
    data: Data,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    *,
    max_length: int,
    overlong: Overlong = "truncate",
    vocab_size: int | None = None,
    forms: Forms | None = None,
    cache: Path | None = None,
    images: MediaReading | None = None,
) -> TokenDataset:
    """Read, recognise and tokenise training data. The columns of a file say what its rows are:
    `input_ids` (+ `labels`), `messages` or `conversations`, `prompt` + `completion`, `instruction`
    (+ `input`) + `output`, or `text`. All rows of a file are of one kind. A row which loses
    everything it had to learn when it is cut is dropped and counted; one that says not to be
    trained on is left out. `DataError`: no rows, a malformed row (named by file and line), a row
    with nothing to learn, or none left. `DiskError`: the tokens could not be written to `cache`.

    Args:
        data: files, directories or globs of them, or `hub:` and a data set's name
            (`lema.data.files`); or rows as dictionaries, such as a `datasets.Dataset` or an
            `IterableDataset`, which is read to its end.
        tokenizer: the model's tokenizer; None will do when the rows are token ids already.
        overlong: what becomes of a longer row: "truncate" it at the end, "drop" it, or raise an
            "error".
        vocab_size: how many tokens the model knows; ids beyond it are an error. None: not checked.
        forms: which columns are meant, which chat template, and what is trained on; None: as above.
        cache: a folder in which the tokens of large files are kept for later calls; None: they are
            not.
        images: what images of rows are read with; None: rows have none. With it no tokens are
            kept.
    """
    _check_lengths(max_length, overlong)
    files = given_files(data)
    forms = replace(forms or Forms(), pictures=images is not None)
    readers = Readers(files, forms, tokenizer)
    remarks = Remarks()
    images = None if images is None else images.at(folders_of(files))
    readings = {
        id(reader): Reading(reader.tokenizer, reader.forms, vocab_size, remarks, images)
        for reader in readers.all()
    }

    def gather(rows: Iterable[Row], first: Row | None = None) -> Columns:
        columns = Columns(remarks=remarks.begin())
        for reader, group in readers.grouped(rows):
            reading = readings[id(reader)]
            side = reader.forms.truncation_side
            kinds = _with_kinds(group, reader.forms, reading, first)
            for row, ids, labels in tokenize_rows(kinds, reading):
                record = None if images is None else images.records.pop(row.origin, None)
                if len(ids):
                    _take(columns, row, ids, labels, max_length, overlong, side, record)
                else:
                    columns.leave_out(row)
        return columns

    settings: dict[str, Any] = {
        "task": "sft",
        "train_on": readers.run.forms.train_on,
        "columns": dict(readers.run.forms.columns),
    }
    settings |= {"max_length": max_length, "overlong": overlong, "vocab_size": vocab_size}
    settings |= {"trains_prompt": readers.run.forms.trains_prompt}
    date = readers.run.forms.template_date
    settings |= {} if date is None else {"template_date": date}
    settings |= readers.run.forms.described() | readers.described()
    tokenizer = readers.run.tokenizer
    return TokenDataset(table_of(data, files, gather, tokenizer, settings, cache, images))


def _check_lengths(max_length: int, overlong: Overlong) -> None:
    if max_length < 2:
        what = f"rows of {max_length} tokens have nothing to predict"
        raise DataError(what, where="max_length", how="allow 2 or more")
    if overlong not in ("truncate", "drop", "error"):
        raise DataError(
            f"{overlong!r} is not an option for long rows",
            where="overlong",
            how="truncate, drop or error",
        )


def _take(
    columns: Columns,
    row: Row,
    ids: Ints,
    labels: Ints,
    max_length: int,
    overlong: Overlong,
    side: Literal["right", "left"],
    record: MediaRecord | None = None,
) -> None:
    length = len(ids)
    if length > max_length and overlong == "error":
        how = "raise max_length, shorten the row, or set overlong to truncate or drop"
        raise row.broken(
            f"the row has {length:,} tokens, more than max_length={max_length:,}", how=how
        )
    left = side == "left" and length > max_length
    span = slice(-max_length, None) if left else slice(max_length)
    cut = labels[:-max_length] if left else labels[max_length:]
    record = None if record is None else record.shifted(length - max_length if left else 0)
    if record is not None and not record.is_whole(max_length):
        columns.drop(row, length, CUT_IMAGE)
    elif len(cut) and (overlong == "drop" or num_trained(labels[span]) == 0):
        columns.drop(row, length)
    else:
        columns.append(row, ids[span], labels[span], cut, images=record)


def table_of(
    data: Data,
    files: list[DataFile] | None,
    gather: token_cache.Gather,
    tokenizer: "PreTrainedTokenizerBase | None",
    settings: Mapping[str, Any],
    cache: Path | None,
    images: MediaReading | None = None,
) -> Table:
    """Return data as tokens: those of large files from the folder `cache`, all others gathered in
    memory, as those of rows with `images`. `settings` are what else decides the tokens.
    `DataError`: no row is left; that and `DiskError`: as `lema.data.cache.cached`."""
    notes = list[str]()
    table = None
    if cache is not None and files is not None and images is None:
        # A tokenizer that cannot be saved cannot be told from another, so nothing is kept for it.
        with suppress(NotImplementedError):
            size = sum(file.num_bytes for file in files)
            if size >= token_cache.SMALL or any(file.stream is not None for file in files):
                try:
                    if cache == token_cache.folder_of(True):
                        make_private(cache)
                    table = token_cache.cached(
                        files, lambda: token_cache.key_of(files, tokenizer, settings), gather, cache
                    )
                except DiskError as error:
                    if cache != token_cache.folder_of(True):
                        raise  # because the user has named this folder
                    notes = [
                        (
                            "tokens are not kept, so every start makes them again: "
                            f"{error.what} ({error.where})"
                        )
                    ]
    if table is None:
        columns = gather(rows_of(data) if files is None else rows_in(files), None)
        table = columns.table((*notes, *Remarks(columns.remarks).lines()))
        if images is not None and columns.images:
            table = replace(
                table,
                images={number: images.rows(record) for number, record in columns.images.items()},
                without_images=images.rows(None),
            )
    if not len(table.rows):
        how = (
            f"raise max_length={settings['max_length']} or shorten the rows"
            if table.dropped
            else "give some rows"
        )
        gone = f"{table.dropped:,} were dropped, {table.left_out:,} say not to be trained on"
        raise DataError(f"no rows to train on: {gone}", where=_describe(data, files), how=how)
    return table


def mixed(config: LemaConfig, rows: Any) -> Any:
    """Return the rows of `train_data` in the shares that `mixture` gives its data sets; as they are
    where it is None. `ConfigError`: the shares do not sum to 1, or a file is in two data sets.
    `DataError`: a data set has no rows."""
    if config.mixture is None:
        return rows
    check_rates([Sampling(name, rate) for name, rate in config.mixture.items()], "mixture")
    assert isinstance(config.train_data, dict), "the settings were checked"
    sets: dict[str, str] = {}
    readings = dict[str, str]()
    for file in data_files(config.train_data, config.max_train_samples):
        sets[file.label] = file.data_set
        reading = f"{file.path} {file.span} {dict(file.options)}"
        if readings.setdefault(reading, file.data_set) != file.data_set:
            raise ConfigError(
                f"{file.path} is in two data sets", where="mixture", how="give it to one of them"
            )
    return rows.mixed(sets, config.mixture, config.seed)


def needs_tokenizer(data: Sources, forms: Forms | None = None) -> bool:
    """Whether any of the files holds other than token ids, by the first row of each; a stream is
    taken to, because its rows may be kept, and no network needed. `DataError`: as `prepare_data`.
    """
    files = data_files(data)
    if any(file.stream is not None for file in files):
        return True
    for file in files:
        manner = (forms or Forms()).of_data_set(file.options)
        first, _ = next(file.pieces())
        if detect(manner.renamed(first), manner)[0] != "input_ids":
            return True
    return False


def _with_kinds(
    rows: Iterable[Row], forms: Forms, reading: Reading, first_row: Row | None
) -> Iterator[tuple[Row, Kind]]:
    """Each row with the kind of its file, which its first row decides: the one given, or else
    that of the rows.
    """
    for _, group in groupby(map(forms.renamed, rows), key=lambda row: row.source):
        first = next(group)
        kind = detect(first if first_row is None else forms.renamed(first_row), forms)
        for row in chain([first], group):
            row_kind = detect(row, forms)
            if row_kind != kind:
                what = (
                    f"the row is {' + '.join(row_kind)}, and the file began with {' + '.join(kind)}"
                )
                raise row.broken(
                    what, how="give every row of a file the same columns, or use one file per kind"
                )
            for name in unused(row, kind, forms):
                reading.remarks.add(row, f"LEMA does not use the column {name!r}")
            yield row, kind


def rows_of(data: Data) -> Iterator[Row]:
    """Yield the rows of files, or the given rows. `DataError`: there are none, or the data are
    of another kind.
    """
    if isinstance(data, Mapping):
        what = f"the data are one dictionary (of {', '.join(map(str, data))}), not a list of rows"
        raise DataError(what, where="data", how="give a list of rows, or one of its splits")
    items = iter(cast("Iterable[Any]", data))
    first = next(items, None)
    if first is None:
        raise DataError(
            "there are no rows and no files", where=_describe(data, None), how="give some data"
        )
    if isinstance(first, (str, Path)):
        yield from read_rows(_paths(chain([first], items)))
        return
    for number, values in enumerate(chain([first], items), 1):
        if not isinstance(values, Mapping):
            what = f"a row should be a dictionary, not {type(values).__name__}"
            raise DataError(what, where=f"rows:{number}", how='give rows like {"text": "..."}')
        yield Row(values, "rows", number)


def _paths(items: Iterable[Any]) -> Iterator[str | Path]:
    for item in items:
        if not isinstance(item, (str, Path)):
            what = f"a list of data files has a {type(item).__name__}"
            raise DataError(what, where="data", how="give either files or rows")
        yield item


def _describe(data: Data, files: list[DataFile] | None) -> str:
    if isinstance(data, (str, Path)):
        return str(data)
    if files is not None:
        return ", ".join(dict.fromkeys(str(file.path) for file in files))
    return "data" if isinstance(data, (list, tuple)) and not data else "rows"
