"""What every benchmark needs: a model of a given shape on disk, memory by kind, the machine in
words, JSON results.
"""

from __future__ import annotations

import json
import math
import os
import platform
import resource
import threading
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

from lema.config.printing import hush

# for the whole process, because a benchmark imports modules of LEMA one by one, and PEFT's own
hush()

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Shape:
    """A decoder of one common form; `layer_parameters` counts one layer without its two norms."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    heads: int = 16
    dtype: str = "bfloat16"
    kv_heads: int | None = None  # None: as many as heads

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """The linears of one layer by name, each `(rows, columns)`."""
        hidden = self.hidden
        inner = self.intermediate
        narrow = hidden // self.heads * (self.kv_heads or self.heads)
        attention = {"q": hidden, "k": narrow, "v": narrow}
        return {
            **{f"self_attn.{name}_proj": (rows, hidden) for name, rows in attention.items()},
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }

    @property
    def layer_parameters(self) -> int:
        return sum(rows * columns for rows, columns in self.matrices.values())

    @property
    def layer_bytes(self) -> int:
        return (self.layer_parameters + 2 * self.hidden) * getattr(torch, self.dtype).itemsize

    @property
    def weight_bytes(self) -> int:
        outside = (2 * self.vocabulary + 1) * self.hidden * getattr(torch, self.dtype).itemsize
        return self.layers * self.layer_bytes + outside


def write_config(directory: Path, shape: Shape) -> None:
    """Write the `config.json` of a model of `shape`."""
    directory.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads or shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype=shape.dtype,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(directory)


def write_index(directory: Path, shape: Shape, weight_map: dict[str, str]) -> None:
    """Write the index of a model whose tensors lie in the files named."""
    index = {"metadata": {"total_size": shape.weight_bytes}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_model(directory: Path, shape: Shape) -> None:
    """Write random weights of `shape` in the hub's sharded format, one layer in memory at a
    time.
    """
    write_config(directory, shape)
    dtype = getattr(torch, shape.dtype)
    generator = torch.Generator().manual_seed(0)
    weight_map: dict[str, str] = {}

    def draw(*size: int) -> torch.Tensor:
        return (torch.randn(size, generator=generator) * 0.02).to(dtype)

    def put(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, directory / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, name))

    hidden = shape.hidden
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        tensors = {f"{prefix}{name}.weight": draw(*size) for name, size in shape.matrices.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=dtype)
        put(f"model-{layer:05d}.safetensors", tensors)
    outside = {
        "model.embed_tokens.weight": draw(shape.vocabulary, hidden),
        "lm_head.weight": draw(shape.vocabulary, hidden),
    }
    put(
        "model-outside.safetensors",
        {**outside, "model.norm.weight": torch.ones(hidden, dtype=dtype)},
    )
    write_index(directory, shape, weight_map)


def write_zeros(directory: Path, shape: Shape) -> None:
    """Write a model of `shape` that takes no room on the disk: its weights are holes in files,
    which read as zeros.
    """
    write_config(directory, shape)
    weight_map: dict[str, str] = {}
    norms = "input_layernorm", "post_attention_layernorm"
    layer = {**shape.matrices, **dict.fromkeys(norms, (shape.hidden,))}
    table = shape.vocabulary, shape.hidden
    outside = {"model.embed_tokens": table, "lm_head": table, "model.norm": (shape.hidden,)}
    parts = [
        {f"model.layers.{number}.{name}": size for name, size in layer.items()}
        for number in range(shape.layers)
    ]
    for number, part in enumerate([*parts, outside]):
        header = dict[str, Any]()
        end = 0
        for name, size in part.items():
            begin = end
            end = end + math.prod(size) * 2
            header[f"{name}.weight"] = {
                "dtype": "BF16",
                "shape": size,
                "data_offsets": [begin, end],
            }
        written = json.dumps(header).encode()
        file = directory / f"model-{number + 1:05d}-of-{len(parts) + 1:05d}.safetensors"
        with file.open("wb") as out:
            out.write(len(written).to_bytes(8, "little") + written)
            out.truncate(8 + len(written) + end)
        weight_map.update(dict.fromkeys(header, file.name))
    write_index(directory, shape, weight_map)


def forget_pages(directory: Path) -> None:
    """Drop a model's files from the page cache, so that the next read comes from the disk."""
    for file in directory.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def memory_kinds(process: int | str = "self") -> dict[str, int]:
    """Return a process's resident bytes by kind: `anonymous`, `file`, `shared` (memory that
    several map).
    """
    kinds = {"RssAnon": "anonymous", "RssFile": "file", "RssShmem": "shared"}
    found = {}
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in kinds:
            found[kinds[name]] = int(value.split()[0]) * 1024
    return found


class PeakAnonymous:
    """Samples anonymous memory in a thread for the length of a `with` block; `peak` is the most
    seen, in bytes.
    """

    def __init__(self, interval: float = 0.005) -> None:
        self._stop = threading.Event()
        self._interval = interval
        self.peak = 0
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._stop.wait(self._interval):
            self.peak = max(self.peak, memory_kinds()["anonymous"])

    def __enter__(self) -> PeakAnonymous:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.peak = max(self.peak, memory_kinds()["anonymous"])


class Meter:
    """Measures a `with` block: `seconds`, this process's `cpu_seconds`, and how many cores
    `foreign_hooks` kept from it.

    A machine is shared: beside a time stands what others did to it, those on the same host too
    (stolen time).
    """

    seconds = cpu_seconds = others = 0.0

    def __enter__(self) -> Meter:
        self._machine = _busy_seconds()
        self._cpu = cpu_seconds()
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self.cpu_seconds = cpu_seconds() - self._cpu
        self.others = max(0.0, _busy_seconds() - self._machine - self.cpu_seconds) / self.seconds


def cpu_seconds() -> float:
    """Return the processor time that all threads of this process have taken."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _busy_seconds() -> float:
    """Return the processor time that was taken from the machine's cores since it started, by
    whomever.
    """
    user, nice, system, _, _, hard, soft, stolen, *_ = map(
        int, Path("/proc/stat").read_text().split()[1:11]
    )
    return (user + nice + system + hard + soft + stolen) / os.sysconf("SC_CLK_TCK")


def machine() -> dict[str, Any]:
    """Return the machine in words: processor, cores, memory, versions, how many processes wanted
    its cores lately.
    """
    # Not at the top, because `versions.py` runs this file with an earlier version, which lacks the
    # module.
    from lema_cpu.products import has_instructions

    model = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    halves = (torch.bfloat16, torch.float16)
    return {
        "processor": model,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "in_half_precision": [
            str(one).removeprefix("torch.") for one in halves if has_instructions(one)
        ],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(total / 2**30, 1),
        "torch": torch.__version__,
        "load": [round(load, 2) for load in os.getloadavg()],
        "date": datetime.now(UTC).date().isoformat(),
    }


def print_machine() -> None:
    """Print the machine that a table is of, with the instructions that torch and oneDNN use of
    its processor.
    """
    found = machine()
    halves = " and ".join(found["in_half_precision"]) or "no half precision"
    print(
        f"{found['processor']}, {found['cores']} cores, {found['instructions']} with "
        f"instructions for {halves}"
    )


def report(name: str, rows: Any, shape: Shape) -> None:
    """Write a benchmark's numbers to `results/<name>.json`, with the machine and the model's
    shape.
    """
    RESULTS.mkdir(exist_ok=True)
    whole = {"benchmark": name, "machine": machine(), "shape": asdict(shape), "rows": rows}
    (RESULTS / f"{name}.json").write_text(json.dumps(whole, indent=1) + "\n")
    print_machine()
    print(f"wrote {RESULTS / f'{name}.json'}")
