"""`lema data`: what a run will see of its training data, in numbers and token by token."""

import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lema.cli.arguments import ConfigFile, Settings, Trust, config_of, phase_file_of
from lema.cli.libraries import import_libraries
from lema.errors import ConfigError, LemaError, printable

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from lema.data import TokenDataset

__all__ = ["data"]

SHOWN = 10  # rows that are cut or left out
BARS = 12  # of the histogram, at most
WIDTH = 40  # of its longest bar


def data(
    context: typer.Context,
    config: ConfigFile,
    rows: Annotated[int, typer.Option(min=0, metavar="N", help="Rows to show token by token.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:
    """Show the training data of a run: rows, lengths, and the tokens that are trained on."""
    from lema.train.phases.file import has_phases

    if has_phases(config):
        file = phase_file_of(config, settings)
        if not all(phase.is_of_rows for phase in file.plan.phases):
            how = (
                "write its data sets as train_data into a file without phases; `lema plan` shows a "
                "mixture"
            )
            raise ConfigError("a file of phases has several data sets", where=str(config), how=how)
        checked = file.config
    else:
        checked = config_of(config, settings)
    if not checked.train_data:
        raise ConfigError(
            "the config names no training data",
            where="train_data",
            how="give a file or a list of files",
        )
    import_libraries(context, checked, trusted=trust_remote_code, models=False)
    from lema.data import TokenDataset
    from lema.data.dataset import first_rows
    from lema.data.read import mixed
    from lema.model.files import ModelFiles, read_data

    files = ModelFiles(checked, trust_remote_code=trust_remote_code)
    read = read_data(checked, files, checked.train_data)
    dataset: TokenDataset = read if isinstance(read, TokenDataset) else read.rows
    num_eval_rows = (
        len(read.split(checked.eval_split, checked.seed)[1]) if checked.eval_split else 0
    )
    dataset = mixed(checked, dataset)
    tokenizer = None
    with suppress(LemaError):  # a model has none where its rows are token ids
        tokenizer = files.tokenizer if rows else None
    about = described(dataset, rows, tokenizer)
    about["held_back"] = num_eval_rows
    about["steps"] = None  # which the data alone tell where steps have so many tokens
    if isinstance(checked.tokens_per_step, int) and not checked.packing:
        from lema.backend import Alone
        from lema.train.sampler import StepSampler

        training_rows = (
            read.split(checked.eval_split, checked.seed)[0] if checked.eval_split else read
        )
        about["steps"] = StepSampler(
            first_rows(training_rows, checked.max_train_samples), checked, Alone()
        ).num_steps
    if as_json:
        typer.echo(json.dumps(about, indent=1))
        return
    from rich.console import Console

    from lema.config.printing import print_table

    console = Console(highlight=False)
    print_table(_lines(about, str(dataset.counts)), console)
    for row in about["first"]:
        console.print(_tokens(row, plain=not console.is_terminal), soft_wrap=True)


def described(
    rows: "TokenDataset", count: int, tokenizer: "PreTrainedTokenizerBase | None"
) -> dict[str, Any]:
    """Return what there is to say of rows, and the first `count` of them token by token."""
    from dataclasses import asdict

    import numpy as np

    from lema.data.columns import IGNORED

    lengths = rows.lengths
    numbers, edges = np.histogram(lengths, bins=min(BARS, int(lengths.max() - lengths.min()) + 1))
    shown = []
    for index in range(min(count, len(rows))):
        ids, labels = (rows[index][name] for name in ("input_ids", "labels"))
        texts = [
            str(token_id) if tokenizer is None else tokenizer.decode([token_id]) for token_id in ids
        ]
        # The first token is never trained on, because nothing predicts it.
        trained = [position > 0 and label != IGNORED for position, label in enumerate(labels)]
        triples = zip(ids, texts, trained, strict=True)
        tokens = [
            {"id": token_id, "text": text, "trained": learnt} for token_id, text, learnt in triples
        ]
        row: dict[str, Any] = {"origin": rows.origin(index), "tokens": tokens}
        if (images := rows.images(index)) is not None:
            row["images"] = images.described()[0]
        shown.append(row)
    return {
        "counts": asdict(rows.counts),
        **_images_of(rows),
        "sources": rows.num_rows_of(),
        "lengths": {
            "mean": round(float(lengths.mean()), 1),
            "median": int(np.median(lengths)),
            "longest": int(lengths.max()),
            "histogram": [
                [int(np.ceil(end)), int(number)]
                for end, number in zip(edges, numbers, strict=False)
            ],
        },
        "notes": list(rows.notes),
        "skipped": list(rows.skipped(SHOWN)),
        "first": shown,
    }


def _images_of(rows: "TokenDataset") -> dict[str, Any]:
    """Return how many images there are, and the tokens and sizes of them all; of data without
    images nothing."""
    if not rows.has_images:
        return {}
    images = [
        image
        for index in range(len(rows))
        if (of_row := rows.images(index)) is not None
        for image in of_row.described()[0]
    ]
    counted = [image["tokens"] for image in images if image["tokens"] is not None]
    sizes = [image["size"] for image in images if "size" in image]
    seconds = [image["seconds"] for image in images if "seconds" in image]
    return {
        "images": {
            "number": len(images),
            "kinds": dict(Counter(image["kind"] for image in images)),
            "tokens": rows.image_tokens(),
            "longest": max(counted, default=None),
            "largest": max(sizes, key=math.prod, default=None),
            "seconds": max(seconds, default=None),
        }
    }


def _extent(size: list[int] | None, seconds: float | None) -> str:
    """Return how large an image, a video or a sound is."""
    if size is None:
        return f"{seconds:,} seconds"
    width, height, *frames = size
    return f"{width:,} x {height:,}" + (f" x {frames[0]:,} frames" if frames else "")


def _lines(about: dict[str, Any], counts: str) -> Iterator[tuple[str, str]]:
    yield "data", counts
    if about["held_back"]:
        yield "data", f"{about['held_back']:,} of them are held back for evaluation"
    if about["steps"]:
        yield "data", f"trained on in {about['steps']:,} steps"
    for name, number in about["sources"].items():
        yield "rows of", f"{name}  {number:,}"
    lengths = about["lengths"]
    yield (
        "lengths",
        (
            f"mean {lengths['mean']:,}  median {lengths['median']:,}  longest "
            f"{lengths['longest']:,} tokens"
        ),
    )
    if (images := about.get("images")) is not None:
        longest = "" if images["longest"] is None else f", at most {images['longest']:,} each"
        names = {"image": "images", "video": "videos", "audio": "sounds"}
        kinds = [f"{number:,} {names[kind]}" for kind, number in images["kinds"].items()]
        texts = [f"{' and '.join(kinds)} with {images['tokens']:,} tokens{longest}"]
        if images["largest"] is not None:
            texts.append(f"the largest has {_extent(images['largest'], None)} pixels")
        if images["seconds"] is not None:
            texts.append(f"the longest has {images['seconds']:,} seconds")
        yield "media", "; ".join(texts)
    most = max(number for _, number in lengths["histogram"])
    for start, number in lengths["histogram"]:
        yield "from", f"{start:>7,}  {'█' * -(-number * WIDTH // most):<{WIDTH}}  {number:,}"
    for note in about["notes"]:
        yield "note", note
    total = about["counts"]["truncated"] + about["counts"]["dropped"] + about["counts"]["left_out"]
    for row in about["skipped"]:
        lost = (
            f", {row['cut']:,} cut off, {row['cut_trained']:,} of them to be trained on"
            if "cut" in row
            else ""
        )
        size = f" ({row['tokens']:,} tokens{lost})" if row["tokens"] else ""
        yield "not whole", f"{row['file']}:{row['line']}  {row['why']}{size}"
    if total > len(about["skipped"]):
        yield "not whole", f"and {total - len(about['skipped']):,} more"


def _tokens(row: dict[str, Any], *, plain: bool) -> "Text":
    """A row, its tokens parted by bars: what is trained on in bold green, or in brackets where
    there are no colours.
    """
    from rich.text import Text

    styled = Text(f"\n{row['origin']}: ")
    styled.append("[trained on]\n" if plain else "trained on\n", "" if plain else "bold green")
    begins = {image["first"]: image for image in row.get("images", ()) if image["tokens"]}
    inside = 0
    for number, token in enumerate(row["tokens"]):
        if (image := begins.get(number)) is not None:
            extent = _extent(image.get("size"), image.get("seconds"))
            styled.append(
                printable(f"<{image['name']}, {extent}, {image['tokens']:,} tokens>"),
                "" if plain else "cyan",
            )
            styled.append("|", "" if plain else "dim")
            inside = number + image["tokens"]
        if number < inside:
            continue
        text = printable(
            token["text"].replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
        )
        if token["trained"]:
            styled.append(f"[{text}]" if plain else text, "" if plain else "bold green")
        else:
            styled.append(text, "" if plain else "dim")
        styled.append("|", "" if plain else "dim")
        if "\n" in token["text"]:
            styled.append("\n")
    return styled
