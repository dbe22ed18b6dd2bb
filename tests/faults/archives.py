"""Files of `torch.save` that are junk, nested without end, or stand for far more than they hold."""

import json
import os
import pickle
import shutil
import struct
import zipfile
from pathlib import Path
from random import Random
from typing import Any

from faults import watch
from faults.textbombs import SIZES
from faults.tinymodel import TinyModel

__all__ = ["pickled_adapter", "shards"]

A = "1.q_proj.lora_A"  # a name in the older format of adapters


def pickled_adapter(made: TinyModel, place: Path, draw: Random) -> str:
    """An `adapter_model.bin` that is junk, deep, an archive that unpacks to more, or tensors
    that say they are more.
    """
    adapter = made.adapter(place)
    (adapter / "adapter_model.safetensors").unlink()
    _pickled(adapter / "adapter_model.bin", draw)
    return watch.command("merge", adapter, place / "merged", named=(str(adapter),))


def shards(made: TinyModel, place: Path, draw: Random) -> str:
    """Shards of an adapter, one of them junk, in a number that their metadata do not have."""
    folder = place / "shards" / "model"
    folder.mkdir(parents=True)
    rank = draw.choice((0, 0, 0, 1, 99, 10**6, 10**9, 10**18))
    stage = draw.choice((0, 0, 0, 1, 10**9))
    _pickled(folder / f"dp_rank_00_tp_rank_{rank:02}_pp_rank_{stage:02}.pt", draw)
    size = draw.choice(SIZES)
    spec = {
        "tp_size": draw.choice((1, size)),
        "fused_linear_name": "qkv",
        "linear_names": ["q_proj"] * min(size, 1000),
    }
    spec |= {"fuse_axis": 0, "original_dims": [size] * 3}
    spec |= dict.fromkeys(
        ("num_attention_heads", "num_key_value_heads", "kv_size_multiplier"), size
    )
    kind = draw.choice(("FusedLinearsSpec", "GQAQKVColumnParallelLinearSpec"))
    owner = {"module_fully_qualified_name": "model.layers.0.self_attn", "specs": [[kind, spec]]}
    entry = {
        "is_tensor_parallel": True,
        "partition_dim": size,
        "stride": size,
        "num_partitions": size,
    }
    parameters = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight": entry}
    metadata = {
        "parameters": parameters,
        "model_weight_transformation_specs": [owner] * draw.choice((0, 1)),
    }
    (folder.parent / "mp_metadata_pp_rank_0.json").write_text(
        json.dumps(metadata), encoding="utf-8"
    )
    shutil.copy(made.adapter(place) / "adapter_config.json", folder.parent)
    return watch.command("consolidate", folder.parent, place / "whole", named=(str(folder.parent),))


def _pickled(file: Path, draw: Random) -> None:
    """Write one of the forms, each of which is another way to be wrong."""
    FORMS[draw.randrange(len(FORMS))](file, draw)


def _junk(file: Path, draw: Random) -> None:
    deep = b"\x80\x02" + b"]" * 10**5 + b"a" * 10**5 + b"."
    file.write_bytes(
        draw.choice((draw.randbytes(draw.choice((0, 1, 100, 5000))), b"(" * 10**5 + b".", deep))
    )


def _pipe(file: Path, draw: Random) -> None:
    os.mkfifo(file)


def _deep(file: Path, draw: Random) -> None:
    import torch

    deep: Any = []
    for _ in range(draw.choice((10, 400))):
        deep = [deep] if draw.random() < 0.5 else {"a": deep}
    torch.save({A: deep}, file)


def _stretched(file: Path, draw: Random) -> None:
    """A tensor of one number that says it has many, or one that is sparse."""
    import torch

    size = draw.choice((4, 1000, 10**6, 10**9, 10**11))
    base = torch.zeros(1)
    many = base.to(draw.choice((torch.float32, torch.bfloat16))).expand(size)
    wide = min(size, 10**9)  # torch makes no tensor of more than 2**63 numbers
    sparse = torch.sparse_coo_tensor(torch.zeros((2, 1), dtype=torch.long), base, (wide, wide))
    torch.save({draw.choice((A, "base_model.model.x")): draw.choice((many, many, sparse))}, file)


def _unpacking(file: Path, draw: Random) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr(
            "archive/data.pkl", pickle.dumps({}, 2) + b"\0" * draw.choice((0, 10**6, 10**8))
        )
        archive.writestr("archive/version", "3")


def _lying(file: Path, draw: Random) -> None:
    """The largest sizes that an archive can tell of itself."""
    import torch

    torch.save({A: torch.zeros(1)}, file)
    raw = bytearray(file.read_bytes())
    at = raw.rfind(b"PK\x01\x02") if draw.random() < 0.5 else raw.find(b"PK\x03\x04")
    where = at + draw.choice((18, 20, 22, 24))
    raw[where : where + 4] = struct.pack("<I", 2**32 - 2)
    file.write_bytes(raw)


def _others(file: Path, draw: Random) -> None:
    """What is no table of tensors by name."""
    import torch

    base = torch.zeros(1)
    names: tuple[Any, ...] = (
        1,
        "",
        "a.b",
        "x" * 10**6,
        "99999999999.q",
        "1.q_proj.lora_A\n",
        "\ud800",
        None,
    )
    torch.save(
        draw.choice(
            ({}, [], 3, "a", None, base, {A: {A: base}}, *({name: base} for name in names))
        ),
        file,
    )


def _bare(file: Path, draw: Random) -> None:
    """A pickle without an archive around it, whole or cut off."""
    value = draw.choice((print, os.system, 2 ** (8 * 10**6), b"a" * 10**6, {1: 2}))
    raw = pickle.dumps({A: value}, draw.choice((0, 2, 4)) if value != 2 ** (8 * 10**6) else 2)
    file.write_bytes(raw if draw.random() < 0.5 else raw[: draw.randrange(len(raw))])


FORMS = (_junk, _pipe, _deep, _stretched, _unpacking, _lying, _others, _bare)
