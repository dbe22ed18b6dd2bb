"""One long row through `lema train` in a memory cgroup: killed in the middle of its step, killed
again as soon as that step's checkpoint is there, and resumed, against a run that nobody killed.

    OMP_NUM_THREADS=2 python benchmarks/long_row_in_cgroup.py --kind full --length 32768
    OMP_NUM_THREADS=2 python benchmarks/long_row_in_cgroup.py --kind delta --length 32768

A run has three steps of one row: a short one, the long one, and a short one. The first kill comes
when the process has taken half of the processor time of the long step, counted from the checkpoint
before it. Every process lives in a cgroup of its own, page cache included, without swap. The
adapters of all checkpoints are compared bit for bit. Weights are random. Needs the right to make
memory cgroups.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from common import Shape, report
from limits_group import Group, memory_group
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.qwen3_5 import Qwen3_5TextConfig

GB = 10**9
LONGEST = 131_072  # tokens for which 4 GB are asked for
LIMIT = 4 * GB
SHORT = 128  # tokens of the rows before and behind the long one
VOCABULARY = 512
HEAD_SIZE = 32
WINDOW = 1024
TINY = 4, 64, 128, 256  # layers, sizes of hidden states and in MLPs, tokens of a chunk
# Every layer attends to all tokens, to those of a window, or one of four does and three have states
CONFIGS: dict[str, tuple[Callable[..., PreTrainedConfig], dict[str, Any]]] = {
    "full": (LlamaConfig, {}),
    "window": (MistralConfig, {"sliding_window": WINDOW}),
    "delta": (
        Qwen3_5TextConfig,
        {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=sorted(CONFIGS), default="full", help="of the layers")
    parser.add_argument("--length", type=int, default=LONGEST, help="tokens of the long row")
    parser.add_argument("--memory", type=float, help="GB of the cgroup; 4 for 131,072 tokens")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens of a chunk")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--intermediate", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=1, help="of queries, of size 32; one of keys")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--boundaries", default="disk", help="where inputs of layers wait")
    parser.add_argument("--straight-only", action="store_true", help="no kill: measure one run")
    parser.add_argument("--directory", type=Path, help="where files go (a disk, not memory)")
    parser.add_argument("--tiny", action="store_true", help="a small model, to see that it runs")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.layers, arguments.hidden, arguments.intermediate, arguments.chunk = TINY
    limit = round(LIMIT * arguments.length / LONGEST)
    if arguments.memory:
        limit = round(arguments.memory * GB)
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        row = measured(arguments, Path(name), limit)
    print(json.dumps(row))
    if arguments.tiny:
        return
    shape = Shape(
        arguments.hidden,
        arguments.intermediate,
        arguments.layers,
        VOCABULARY,
        heads=arguments.heads,
        kv_heads=1,
        dtype=arguments.dtype,
    )
    report(f"long_row_in_cgroup_{arguments.kind}_{arguments.length}", [row], shape)


def measured(arguments: argparse.Namespace, directory: Path, limit: int) -> dict[str, Any]:
    """Run, kill and resume; return what it took, and whether the bits are the same."""
    settings = write_run(arguments, directory)
    straight = directory / "straight"
    cut = directory / "cut"
    row: dict[str, Any] = {"kind": arguments.kind, "tokens": arguments.length, "limit": limit}
    with started(settings, straight, limit) as run:
        run.wait_for_checkpoint(1)
        began = time.monotonic()
        before = run.cpu_seconds()
        run.wait_for_checkpoint(2)
        row["seconds"] = round(time.monotonic() - began, 1)
        step_seconds = run.cpu_seconds() - before
        row["cpu_seconds"] = round(step_seconds, 1)
        run.wait_for_end()
        row["peak"] = [run.group.counters()["peak"]]
    print(json.dumps(row), flush=True)
    if arguments.straight_only:
        return row
    with started(settings, cut, limit) as run:
        run.wait_for_checkpoint(1)
        run.wait_for_cpu(run.cpu_seconds() + step_seconds / 2)
        run.kill()
        row["peak"].append(run.group.counters()["peak"])
    checkpoints = [checkpoints_in(cut)]
    with started(settings, cut, limit, "--resume") as run:
        run.wait_for_checkpoint(2)
        run.kill()
        row["peak"].append(run.group.counters()["peak"])
    checkpoints.append(checkpoints_in(cut))
    with started(settings, cut, limit, "--resume") as run:
        run.wait_for_end()
    row["checkpoints_at_kills"] = checkpoints
    row["bitwise"] = {
        name: (straight / name).read_bytes() == (cut / name).read_bytes() for name in adapters()
    }
    return row


def adapters() -> list[str]:
    """Return the files that are compared, below the output directory."""
    places = ["", *(f"checkpoint-{step}/" for step in (1, 2, 3))]
    return [f"{place}adapter_model.safetensors" for place in places]


def checkpoints_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("checkpoint-*"))


def write_run(arguments: argparse.Namespace, directory: Path) -> Path:
    """Write a model, three rows, and the settings of a run; return the file of these."""
    make, options = CONFIGS[arguments.kind]
    torch.manual_seed(0)
    config = make(
        hidden_size=arguments.hidden,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.heads,
        num_key_value_heads=1,
        head_dim=HEAD_SIZE,
        vocab_size=VOCABULARY,
        max_position_embeddings=arguments.length,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, arguments.dtype))
    model.save_pretrained(directory / "model", max_shard_size="50MB")
    del model
    generator = torch.Generator().manual_seed(1)
    lengths = (SHORT, arguments.length, SHORT)
    rows = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]
    (directory / "rows.jsonl").write_text(
        "".join(f'{{"input_ids": {ids}, "labels": {ids}}}\n' for ids in rows)
    )
    settings = {
        "model_name_or_path": str(directory / "model"),
        "train_data": str(directory / "rows.jsonl"),
        "data_cache": False,
        "shuffle": "sequential",
        "device": "cpu",
        "max_length": arguments.length,
        "batch_size": 1,
        "micro_batch_size": 1,
        "max_steps": 3,
        "save_steps": 1,
        "sequence_chunk": arguments.chunk,
        "boundary_activations": arguments.boundaries,
        "lora_rank": 8,
        "learning_rate": 1e-2,
    }
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(settings))
    return file


@dataclass(frozen=True)
class Run:
    """A `lema train` in a cgroup."""

    process: subprocess.Popen[bytes]
    output: Path
    group: Group

    def cpu_seconds(self) -> float:
        """Return the processor time that the process has taken."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait_for_checkpoint(self, step: int) -> None:
        """Wait until a step's checkpoint is there."""
        self._wait_until((self.output / f"checkpoint-{step}").exists)

    def wait_for_cpu(self, seconds: float) -> None:
        """Wait until the process has taken so much processor time."""
        self._wait_until(lambda: self.cpu_seconds() >= seconds)

    def wait_for_end(self) -> None:
        """Wait until the run is done."""
        code = self.process.wait()
        assert code == 0, f"lema train ended with {code}\n{self._log()}"

    def kill(self) -> None:
        """Kill the process as nothing can prevent."""
        self.process.send_signal(signal.SIGKILL)
        code = self.process.wait()
        assert code == -signal.SIGKILL, f"it had ended before, with {code}\n{self._log()}"

    def _wait_until(self, is_true: Callable[[], bool]) -> None:
        while not is_true():
            code = self.process.poll()
            assert code is None, f"lema train ended with {code}\n{self._log()}"
            time.sleep(0.01)

    def _log(self) -> str:
        return self.output.with_suffix(".log").read_text()[-3000:]


@contextmanager
def started(settings: Path, output: Path, limit: int, *options: str) -> Iterator[Run]:
    """Start `lema train` in a cgroup of `limit` bytes; both end with the `with` block."""
    command = [sys.executable, "-m", "lema", "train", str(settings), *options]
    command += ["--set", f"output_dir={output}"]
    with memory_group(limit) as group, output.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=group.join)
        try:
            yield Run(process, output, group)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


if __name__ == "__main__":
    main()
