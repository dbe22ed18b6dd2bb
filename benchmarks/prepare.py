"""Preparing a checkpoint takes at most twice as long as copying it, in less memory than two of its
layers.

    OMP_NUM_THREADS=1 python benchmarks/prepare.py

Four checkpoints: one that is copied as it is, one that is cast, one whose experts are stored one by
one, and one whose experts are stored turned over. Three arms, which take turns: `lema prepare` in a
process of its own, the `cp` command, and Python's `shutil.copyfile`, each until every byte is on
the disk (fsync). The source is dropped from the page cache before every arm, unless `--warm`.
*setup* is what of preparing goes by before the first byte is written: transformers' imports,
building the model without weights, mapping names. Anonymous memory is sampled in the process that
prepares and counted from what it had when everything of lema was imported.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import PeakAnonymous, Shape, forget_pages, memory_kinds, report, write_model
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file
from transformers import MixtralConfig
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter

CASES = {
    "copied": None,
    "cast": "bfloat16",
    "experts one by one": None,
    "experts turned over": None,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--intermediate", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--layers", type=int, default=14, help="of the models with experts")
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--warm", action="store_true", help="read the source into the page cache before every arm"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--directory", type=Path, help="where to write the models (a disk, not memory)"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(_prepare(*arguments.child)))
        return
    shape = Shape(arguments.hidden, arguments.intermediate, arguments.layers, arguments.vocabulary)
    rows = []
    for case in arguments.cases:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
            source = Path(name) / "source"
            _write(case, source, arguments)
            rows.append({"case": case, "warm": arguments.warm, **_measure(case, source, arguments)})
    _show(rows)
    report("prepare-warm" if arguments.warm else "prepare", rows, shape)


def _write(case: str, directory: Path, arguments: argparse.Namespace) -> None:
    """Write a checkpoint of about the same size in bytes for every case."""
    hidden = arguments.hidden * 3 // 2
    inner = arguments.intermediate * 2
    if case == "copied":
        write_model(
            directory, Shape(hidden, inner, arguments.layers * 12 // 7, arguments.vocabulary)
        )
    elif case == "cast":
        write_model(
            directory,
            Shape(hidden, inner, arguments.layers * 6 // 7, arguments.vocabulary, dtype="float32"),
        )
    else:
        _write_experts(directory, arguments, turned_over=case == "experts turned over")


def _write_experts(directory: Path, arguments: argparse.Namespace, turned_over: bool) -> None:
    hidden = arguments.hidden
    inner = arguments.intermediate
    experts = arguments.experts
    config = MixtralConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=experts,
        vocab_size=arguments.vocabulary,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["MixtralForCausalLM"],
    )
    config.save_pretrained(directory)
    generator = torch.Generator().manual_seed(0)
    weight_map = dict[str, str]()

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * 0.02).bfloat16()

    def put(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    for layer in range(arguments.layers):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}self_attn.{name}_proj.weight": draw(hidden, hidden) for name in "qo"}
        tensors |= {
            f"{prefix}self_attn.{name}_proj.weight": draw(hidden // 2, hidden) for name in "kv"
        }
        if turned_over:
            tensors[f"{prefix}mlp.gate.weight"] = draw(experts, hidden)
            tensors[f"{prefix}mlp.experts.gate_up_projs"] = draw(experts, hidden, 2 * inner)
            tensors[f"{prefix}mlp.experts.down_projs"] = draw(experts, inner, hidden)
        else:
            tensors[f"{prefix}block_sparse_moe.gate.weight"] = draw(experts, hidden)
            for expert in range(experts):
                one = f"{prefix}block_sparse_moe.experts.{expert}."
                tensors |= {
                    f"{one}w1.weight": draw(inner, hidden),
                    f"{one}w3.weight": draw(inner, hidden),
                }
                tensors[f"{one}w2.weight"] = draw(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        put(f"model-{layer:05d}.safetensors", tensors)
    outside = {
        name: draw(arguments.vocabulary, hidden)
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    put(
        "model-outside.safetensors",
        {**outside, "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)},
    )
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _measure(case: str, source: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the arms in turn, each repeat beginning with another."""
    files = sorted(source.iterdir())
    out = source.parent / "out"
    arms: dict[str, Callable[[], dict[str, Any]]] = {
        "prepare": lambda: _child(case, source, out),
        "cp": lambda: _timed(lambda: subprocess.run(["cp", *files, out], check=True), out),
        "copyfile": lambda: _timed(
            lambda: [shutil.copyfile(file, out / file.name) for file in files], out
        ),
    }
    outcomes: dict[str, list[dict[str, Any]]] = {name: [] for name in arms}
    for repeat in range(arguments.repeats):
        names = list(arms)
        for name in names[repeat % 3 :] + names[: repeat % 3]:
            out.mkdir()
            forget_pages(source)
            if arguments.warm:
                for file in files:
                    file.read_bytes()
            os.sync()
            outcomes[name].append(arms[name]())
            shutil.rmtree(out)
    prepared = outcomes["prepare"]
    ratios = {
        f"ratio_{name}": statistics.median(
            copied["seconds"] / mine["seconds"]
            for copied, mine in zip(outcomes[name], prepared, strict=True)
        )
        for name in ("cp", "copyfile")
    }
    seconds = {
        f"seconds_{name}": [outcome["seconds"] for outcome in runs]
        for name, runs in outcomes.items()
    }
    sizes = {key: prepared[0][key] for key in ("layer", "embedding", "written")}
    peak = max(outcome["anonymous"] for outcome in prepared)
    return {
        "source": sum(file.stat().st_size for file in files),
        **sizes,
        **seconds,
        **ratios,
        "setup": statistics.median(outcome["setup"] for outcome in prepared),
        "anonymous": peak,
        "allowed": 2 * sizes["layer"] + sizes["embedding"],
    }


def _timed(copy: Callable[[], Any], out: Path) -> dict[str, Any]:
    began = time.perf_counter()
    copy()
    for file in out.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {"seconds": time.perf_counter() - began}


def _child(case: str, source: Path, out: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--child", case, str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the child ended with {done.returncode}\n{done.stderr[-2000:]}")
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return outcome


def _prepare(case: str, source: str, out: str) -> dict[str, Any]:
    """Prepare in this process, and say how long it took in how much memory."""
    from lema.convert.prepare import prepare
    from lema.storage import GlobalBinaryIndex

    if case == "experts turned over":
        rules = [
            WeightConverter(f"mlp.experts.{name}s", f"mlp.experts.{name}", [Transpose(1, 2)])
            for name in ("gate_up_proj", "down_proj")
        ]
        register_checkpoint_conversion_mapping("mixtral", rules, overwrite=True)
    starts: list[float] = []
    before = memory_kinds()["anonymous"]
    began = time.perf_counter()
    with PeakAnonymous(interval=0.002) as sampled:
        prepared = prepare(
            source,
            out,
            CASES[case],
            progress=lambda *_: starts or starts.append(time.perf_counter() - began),
        )
        seconds = time.perf_counter() - began
    index = GlobalBinaryIndex(prepared.path)
    return {
        "seconds": seconds,
        "setup": starts[0],
        "anonymous": sampled.peak - before,
        "layer": sum(record.nbytes for name, record in index.items() if ".layers.0." in name),
        "embedding": index["model.embed_tokens.weight"].nbytes,
        "written": prepared.nbytes,
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="prepare against copying: medians of seconds, MB")
    columns = [
        "checkpoint",
        "read",
        "written",
        "prepare",
        "of it setup",
        "cp",
        "copyfile",
        "cp ÷",
        "copyfile ÷",
    ]
    for column in [*columns, "anonymous", "2 layers + embedding"]:
        table.add_column(column, justify="left" if column == "checkpoint" else "right")
    for row in rows:
        seconds = {
            name: statistics.median(row[f"seconds_{name}"])
            for name in ("prepare", "cp", "copyfile")
        }
        cells = [
            f"{row['source'] / 1e6:,.0f}",
            f"{row['written'] / 1e6:,.0f}",
            f"{seconds['prepare']:.2f}",
        ]
        cells += [f"{row['setup']:.2f}", f"{seconds['cp']:.2f}", f"{seconds['copyfile']:.2f}"]
        cells += [f"{row['ratio_cp']:.2f}", f"{row['ratio_copyfile']:.2f}"]
        table.add_row(
            row["case"], *cells, f"{row['anonymous'] / 1e6:,.0f}", f"{row['allowed'] / 1e6:,.0f}"
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
