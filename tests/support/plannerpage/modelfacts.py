"""What a plan has to know of a model: the bytes of its layers, and what a micro-batch costs in them.

Both are taken from what `lema plan` takes them from: the blueprint of a checkpoint without its
weights, and the measurements on tensors without values.
"""

from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lema.config import LemaConfig
from lema.data.forms import num_positions
from lema.engine.head.loss import CHUNK_TOKENS
from lema.model.outer_weights import buffer_bytes
from lema.model.skeleton import main_dtype
from lema.plan.blueprint import Blueprint, draw_up
from lema.plan.choice import LESS
from lema.plan.work.workload import MicroBatch, Workload, measure
from lema_tools.models.checkpoints import Checkpoint, config_of
from lema_tools.models.published import SETTINGS
from plannerpage.hollowforms import AS_PUBLISHED, FORMS, write_form

__all__ = [
    "CHUNKS",
    "LENGTHS",
    "RANKS",
    "ROWS",
    "SETTINGS_OF_ALL",
    "drawn_up",
    "facts_of",
    "measured",
    "signs_of",
]

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens of a row
RANKS = (8, 64)  # of an adapter; between these every figure is on a line
ROWS = (1, 2)  # of a micro-batch; all others follow from these, as in a plan
CHUNKS = (CHUNK_TOKENS, LESS[0])  # tokens whose logits exist at once
LENGTHS_OF_HEAD = (512, 1024, 2048, 4096)  # longer rows follow from the last two
KINDS_OF_HEAD = ("sft", "dpo")  # whether the head may be cut, or is whole on the device
SETTINGS_OF_ALL: dict[str, Any] = {"device": "cpu", "lora_target_parameters": list[str]()}
SIZES = (  # of a config.json, by which it is recognised
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "moe_intermediate_size",
    "num_experts_per_tok",
)
COUNTS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the page knows of a model, as plain JSON types."""
    with TemporaryDirectory() as scratch:
        directories = {
            form: directory
            for form in FORMS
            if (directory := write_form(checkpoint, form, Path(scratch))) is not None
        }
        forms = {form: _form(directory) for form, directory in directories.items()}
        by_rank = {rank: drawn_up(directories[AS_PUBLISHED], "sft", rank) for rank in RANKS}
    first = by_rank[RANKS[0]]
    positions = num_positions(first.model.config)
    lengths = [length for length in LENGTHS if positions is None or length <= positions]
    work = {length: [_work(drawn, length) for drawn in by_rank.values()] for length in lengths}
    works = next(iter(work.values()))
    heads = {length: _heads(first, length) for length in LENGTHS_OF_HEAD if length in lengths}
    return {
        "hub": checkpoint.hub_id,
        "type": checkpoint.model_type,
        **signs_of(checkpoint),
        "published": checkpoint.form,
        "experts": bool(first.most_experts),
        "positions": positions,
        "itemsize": main_dtype(first.model).itemsize,
        "parameters": first.parameters,
        "trained": [drawn.adapter_parameters for drawn in by_rank.values()],
        "adapter": [drawn.adapter_bytes for drawn in by_rank.values()],
        "checkpoint": [drawn.checkpoint_bytes for drawn in by_rank.values()],
        "lowest": first.lowest_adapted,
        "kinds": works[0]["kinds"],
        "forms": forms,
        "work": {length: [entry["rows"] for entry in of_rank] for length, of_rank in work.items()},
        "heads": heads,
    }


def signs_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what a config.json is recognised by: its sizes, whether the head is the table of
    tokens, and the method by which the weights are published quantised (None: by no method).
    """
    config = config_of(checkpoint)
    settings = SETTINGS[checkpoint.form]
    return {
        "sizes": _sizes(checkpoint),
        "tied": bool(config.get_text_config().tie_word_embeddings),
        "method": None if settings is None else settings["quant_method"],
    }


def drawn_up(directory: Path, objective: str, rank: int) -> Blueprint:
    """Draw up the blueprint of a checkpoint for a machine that is not here."""
    config = LemaConfig(
        str(directory),
        objective=objective,
        lora_rank=rank,
        device_memory="24GB",  # any limit: with one the head may be cut
        **SETTINGS_OF_ALL,
    )
    return draw_up(config, elsewhere=True)


def _form(directory: Path) -> dict[str, Any]:
    """Return the bytes of a model in the form in which it is stored."""
    drawn, whole = (drawn_up(directory, objective, RANKS[0]) for objective in KINDS_OF_HEAD)
    layers = [
        (
            layer.nbytes,
            layer.read_bytes,
            layer.upload_bytes,
            layer.expanded_bytes,
            int(bool(layer.expansions)),
        )
        for layer in drawn.layers
    ]
    kinds = sorted(set(layers))
    pieces = drawn.head.pieces(drawn.layers)
    head = drawn.head.nbytes if drawn.head.module is not None else None
    rows = [drawn.tables.row_bytes, whole.tables.row_bytes]
    drawn.head.keep_whole(drawn.tables)  # and with it a table of the same weight
    rows.insert(1, drawn.tables.row_bytes)
    return {
        "layers": [list(kind) for kind in kinds],
        "order": [kinds.index(layer) for layer in layers],
        "outside": [drawn.outside_bytes, whole.outside_bytes],
        "head": head,
        "pieces": [[piece.nbytes, piece.read_bytes, piece.upload_bytes] for piece in pieces],
        # of a token, where the head may be cut, where it is whole after all, and where it always is
        "rows": rows,
        "buffers": buffer_bytes(drawn.model),
        "stored": drawn.stored_bytes,
    }


def _work(drawn: Blueprint, length: int) -> dict[str, Any]:
    """Return what micro-batches of one row and of two cost in the layers."""
    works = [measured(drawn, count, length, CHUNKS[0]) for count in ROWS]
    return {"kinds": list(works[0].kinds), "rows": [list(_of_layers(work)) for work in works]}


def _heads(drawn: Blueprint, length: int) -> list[Any]:
    """Return what the head costs of micro-batches of one row and of two, with as many logits at
    once as `CHUNKS` has.
    """
    heads = []
    for count in ROWS:
        layers = measured(drawn, count, length, CHUNKS[0])
        of_chunks = (measured(drawn, count, length, chunk, layers) for chunk in CHUNKS)
        heads.append([list(_of_head(work)) for work in of_chunks])
    return heads


def measured(
    drawn: Blueprint, rows: int, length: int, chunk: int, layers: Workload | None = None
) -> Workload:
    """Measure layers, or with those the head in pieces."""
    return measure(
        drawn.model,
        drawn.layers,
        MicroBatch(rows, length),
        chunk,
        drawn.names,
        drawn.parallel,
        None if layers is None else drawn.head,
        layers,
        drawn.split,
    )


def _of_layers(work: Workload) -> Iterator[Any]:
    yield [
        [
            layer.forward,
            layer.recompute,
            layer.backward,
            layer.saved_bytes,
            layer.working_bytes,
            layer.forward_bytes,
            layer.gradient_bytes,
            layer.product_bytes,
            layer.product_flops,
        ]
        for layer in work.works
    ]
    exchanges = [*(part for layer in work.works for part in (*layer.exchanges, layer.reduced))]
    assert not any(any(astuple(exchange)) for exchange in exchanges), "one process exchanges"
    yield [
        work.hidden_bytes,
        work.call_bytes,
        work.prelude_bytes,
        work.state_bytes,
        int(work.starts_below),
    ]


def _of_head(work: Workload) -> Iterator[int]:
    yield work.head.flops
    yield work.head.working_bytes
    if work.pieces is not None:
        yield work.pieces.working_bytes
        yield work.pieces.waiting_bytes


def _sizes(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the sizes by which a config.json is recognised."""
    text = config_of(checkpoint).get_text_config()
    sizes = {name: getattr(text, name, None) for name in SIZES}
    sizes["experts"] = next(
        (count for name in COUNTS_OF_EXPERTS if (count := getattr(text, name, None))), None
    )
    return {name: size for name, size in sizes.items() if isinstance(size, int)}
