"""Files from outside that stand for far more than they hold: templates, tokenizers, rows, archives,
settings, labels.

Each case is drawn from the grammar of its class, with sizes from harmless to deadly, and opened as
a command opens it. What is harmless may be taken. Nothing else is asked than that it ends, within
ten seconds and a gibibyte, in words that name the file.
"""

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from faults import forked, watch
from faults.archives import pickled_adapter, shards
from faults.outcome import Outcome
from faults.textbombs import SIZES, chat_template, tokenizer
from faults.tinymodel import TinyModel

__all__ = ["KINDS", "run"]

Kind = Callable[[TinyModel, Path, Random], str]


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Open `count` files, each drawn from the seed and its own number, of all kinds in turn."""
    required = "taken, or refused by name, within 10 s and 1 GiB; no exit of 1"
    return watch.drawn(
        "files that stand for more than they hold", KINDS, count, seed, report, required
    )


def rows(made: TinyModel, place: Path, draw: Random) -> str:
    """Rows, or what stands in their place, that are very long, very many, very deep, or unpack
    to far more.
    """
    large = draw.choice((17_000_000, 60_000_000, 200_000_000))
    size = draw.choice((10, 10**4, 10**6, 10**6, 10**6, 17_000_000, large))
    ending = draw.choice(ENDINGS)
    file = place / f"rows.{ending}"
    packed = ending.endswith((".gz", ".zst"))
    unit = draw.choice(
        (b"a", b"a ", b"\xc3\xa9", b"\\u0041", b" ", b"[", b"1,", b'{"a":', *(LINES * packed))
    )
    head, tail = draw.choice(
        AROUND["json" if ending.startswith("json") else "csv" if ending == "csv" else "txt"]
    )
    head, tail, count = (
        (b"", b"", 1) if unit in LINES else (head, tail, draw.choice((1, 1, 1000, 10**5, 10**6)))
    )

    def write() -> int:
        file.write_bytes(_packed(ending, head + unit * (size // len(unit)) + tail, count))
        return 0

    # In a process of its own, because neither its memory nor its time is that of the case.
    made_so = forked.run(write, place / "write.log")
    assert not made_so.code, made_so.said
    return watch.command(
        "data", made.config(place, train_data=str(file)), named=(str(file), str(place))
    )


LINES = (b"\n", b"a b\n", b'{"text": "a b"}\n', b'{"text": "' + b"a b " * 500 + b'"}\n')
ENDINGS = ("jsonl", "txt", "csv", "json", "jsonl.gz", "txt.gz", "jsonl.zst", "parquet", "arrow")
AROUND = {
    "json": (
        *(
            (b'{"text": "', b'"}\n'),
            (b'{"messages": ', b"}\n"),
            (b'{"input_ids": [', b"1]}\n"),
            (b"", b"\n"),
        ),
        *((b'{"text": "a", "', b'": 1}\n'), (b'[{"text": "', b'"}]'), (b"[", b"")),
    ),
    "csv": (
        (b'text\n"', b'"\n'),
        (b"text\n", b"\n"),
        (b"text,", b"\na,b\n"),
        (b'"', b""),
        (b"", b""),
    ),
    "txt": ((b"", b""), (b"a\n", b"\n")),
}


def _packed(ending: str, raw: bytes, count: int) -> bytes:
    """Bytes of a file, compressed as its name ends; of columns with as many rows as 400 MB of
    text are.
    """
    if not ending.endswith((".gz", ".zst", "parquet", "arrow")):
        return raw
    if ending.endswith(".gz"):
        return gzip.compress(raw, 1)
    # here, because it starts threads, and a process with threads must not be forked
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import ipc

    out = pa.BufferOutputStream()
    if ending.endswith(".zst"):
        with pa.CompressedOutputStream(out, "zstd") as packed:
            packed.write(raw)
    else:
        text = raw.decode("utf-8", "replace")
        table = pa.table(
            {"text": pa.array([text] * max(1, min(count, 400_000_000 // max(1, len(text)))))}
        )
        if ending == "parquet":
            pq.write_table(table, out, compression="zstd")
        else:
            with ipc.new_stream(
                out, table.schema, options=ipc.IpcWriteOptions(compression="zstd")
            ) as writer:
                writer.write_table(table)
    return bytes(out.getvalue())


def yaml(made: TinyModel, place: Path, draw: Random) -> str:
    """Settings with anchors of anchors, merges, long scalars, many keys, deep lists, and numbers
    of many digits.
    """
    file = place / "run.yaml"
    size = draw.choice((1, 10, 300, 5000, 100_000, 3_000_000))
    key = draw.choice(KEYS)
    width = draw.choice((2, 9, 40))
    levels = draw.choice((2, 9, 40, 1000))
    opening, closing = draw.choice(
        (("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", ""), ("[{a: ", "}]"))
    )
    lists = [f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    merges = [
        f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}], k{n}: *a{n - 1}}}" for n in range(1, levels)
    ]
    text = draw.choice(
        (
            "\n".join(["a0: &a0 [x]", *lists, f"{key}: *a{levels - 1}"]),
            "\n".join(["a0: &a0 {k: x}", *merges, f"{key}: *a{levels - 1}"]),
            f"{key}: " + draw.choice(SCALARS) * size,
            f"{key}: "
            + draw.choice(
                ("0x" + "f" * size, "1e" + "9" * size, "1" + "_0" * size, "." + "5" * size)
            ),
            "\n".join(f"k{n}: {opening}" for n in range(size)) if size < 10**6 else "a: 1\n" * size,
            f"{key}: " + opening * size + draw.choice(("", closing * size)),
            f"{key}: &a [*a, {{b: *a}}]\nother: *a",
            "---\n" * size + f"{key}: 1",
            f"{key}: !!{draw.choice(('python/object', 'binary', 'set', 'omap', 'timestamp', 'int'))} "
            + "9a=" * size,
        )
    )
    file.write_text(text + "\n", encoding="utf-8")
    verb = draw.choice((("config", "show"), ("config", "import"), ("train",)))
    return watch.command(*verb, file, named=(str(file), key))


KEYS = (
    "train_data",
    "lora_rank",
    "backend_settings",
    "columns",
    "extra",
    "phases",
    "model_name_or_path",
)
SCALARS = (
    "a",
    "9",
    "é",
    "a b ",
    "'",
    "\\",
    "*",
    "&",
    "!",
    "- ",
    "? ",
    "<<: ",
    "| ",
    "-",
    "1:",
    "\t",
    "#",
)


def index(made: TinyModel, place: Path, draw: Random) -> str:
    """An index that names more tensors, or more files, than there are."""
    model = made.model(place)
    count = draw.choice((1, 1000, 1000, 10_000, draw.choice((10_000, 200_000))))
    name = draw.choice(
        ("model.layers.{}.mlp.down_proj.weight", "x{}", "x" * 3000 + "{}", "\ud800{}", "a\n{}")
    )
    target = draw.choice(("model.safetensors", "missing-{}.safetensors", "a\nb{}.safetensors"))
    numbers = range(count if len(name) < 1000 else min(count, 2000))
    where = {name.format(n): target.format(n) for n in numbers}
    (model / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": where}), encoding="utf-8"
    )
    return watch.command("train", made.config(place), named=(str(place),))


NUMBERED = (
    "num_labels",
    "num_local_experts",
    "n_routed_experts",
    "head_dim",
    "sliding_window",
    "pretraining_tp",
)
LISTED = (
    "id2label",
    "label2id",
    "layer_types",
    "rope_parameters",
    "architectures",
    "pruned_heads",
    "auto_map",
)


def model_config(made: TinyModel, place: Path, draw: Random) -> str:
    """A config.json with numbers, lists and names as large as can be."""
    file = made.model(place) / "config.json"
    content = json.loads(file.read_bytes())
    size = draw.choice(SIZES)
    numbers = [key for key, value in content.items() if type(value) in (int, float)]
    for key in draw.sample([*numbers, *NUMBERED], draw.choice((1, 1, 2, 3))):
        content[key] = draw.choice((size, -size, float(size), [size] * 3, str(size), {"a": size}))
    if draw.random() < 0.3:
        many = min(size, 200_000)
        rope = {"rope_type": "dynamic", "factor": size, "original_max_position_embeddings": size}
        labels = {str(n): "a" for n in range(many)}
        layers = ["full_attention"] * many
        content[draw.choice(LISTED)] = draw.choice((labels, layers, rope, "a" * many))
    file.write_text(json.dumps(content), encoding="utf-8")
    return watch.command("train", made.config(place), named=(str(place), "max_length"))


KINDS: Mapping[str, Kind] = {
    "chat template": chat_template,
    "tokenizer": tokenizer,
    "rows": rows,
    "YAML": yaml,
    "index": index,
    "pickled adapter": pickled_adapter,
    "shards": shards,
    "config": model_config,
}
