"""Walks through one training step of a small model on the CPU, and counts what a reader of it meets.

    python tests/support/stepwalk.py            # prints the counts, the files and the frames

Counted are our files that a step runs through, our frames above a layer's own forward, and how many
of these are called under another name than their own, where "go to definition" ends.
"""

from __future__ import annotations

import linecache
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

__all__ = ["Walk", "lines", "walk"]

ROOT = Path(__file__).parents[2]
OURS = (str(ROOT / "lema") + "/", str(ROOT / "backends") + "/")
NUM_LAYERS = 8
STEP = 2  # counted from 0; the first two learn


@dataclass
class Walk:
    """What one step ran through."""

    files: set[str] = field(default_factory=set)
    functions: set[CodeType] = field(default_factory=set)
    # our frames above the forward of a layer, from the outermost in
    frames: list[str] = field(default_factory=list)
    callbacks: list[str] = field(default_factory=list)


def _name(code: CodeType) -> str:
    return f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}"


def _is_called_by_name(caller: FrameType, callee: CodeType) -> bool:
    """Whether the statement that a frame is at names the function that it calls."""
    positions = list(caller.f_code.co_positions())
    first, last, *_ = positions[caller.f_lasti // 2]
    lines = range((first or caller.f_lineno), (last or caller.f_lineno) + 1)
    source = "".join(linecache.getline(caller.f_code.co_filename, line) for line in lines)
    owner = callee.co_qualname.rpartition(".")[0].rpartition(".")[-1]
    # the class is where "go to definition" ends of an autograd function's `apply`
    return callee.co_name in source or (bool(owner) and f"{owner}.apply" in source)


def _stack(frame: FrameType) -> Iterator[FrameType]:
    above: FrameType | None = frame.f_back
    while above is not None:
        if above.f_code.co_filename.startswith(OURS):
            yield above
        above = above.f_back


@contextmanager
def _watching(result: Walk) -> Iterator[None]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    of_layer = LlamaDecoderLayer.forward
    while hasattr(of_layer, "__wrapped__"):
        of_layer = of_layer.__wrapped__

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call":
            return
        if code.co_filename.startswith(OURS):
            result.files.add(code.co_filename)
            result.functions.add(code)
        elif code is of_layer.__code__ and not result.frames:
            frames = [*_stack(frame)][::-1]
            names = [above.f_code.co_qualname for above in frames]
            if not any("LayerPass" in name for name in names):
                return
            # from the loop on: what lies above is the same for every step
            begin = next(at for at, name in enumerate(names) if name == "RunLoop._step")
            frames = frames[begin:]
            result.frames = [_name(above.f_code) for above in frames]
            result.callbacks = [
                _name(callee.f_code)
                for caller, callee in pairwise(frames)
                if not _is_called_by_name(caller, callee.f_code)
            ]

    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def walk() -> Walk:
    """Train a small Llama with LoRA for a few steps of two micro-batches; return what the last ran
    through.
    """
    from lema import LemaConfig, LemaModel

    result = Walk()
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=NUM_LAYERS,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        LlamaForCausalLM(config).save_pretrained(Path(directory) / "model")
        settings = LemaConfig(
            str(Path(directory) / "model"),
            output_dir=str(Path(directory) / "run"),
            device="cpu",
            batch_size=4,
            micro_batch_size=2,
            max_steps=STEP + 1,
            save_steps=0,
            max_length=16,
        )
        watching: list[Any] = []

        class Watch(_callback_class()):  # type: ignore[misc] # a class of transformers
            def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if state.global_step == STEP:
                    watching.append(_watching(result))
                    watching[0].__enter__()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                if watching:
                    watching.pop().__exit__(None, None, None)

        model = LemaModel(settings)
        model.initialize_lora()
        trainer = model.get_trainer(callbacks=[Watch()])
        rows = [{"input_ids": torch.randint(0, 128, (16,)), "labels": torch.randint(0, 128, (16,))}]
        trainer.fit(rows * 16)
        model.close()
    return result


def _callback_class() -> Any:
    from transformers import TrainerCallback

    return TrainerCallback


def lines(result: Walk) -> list[str]:
    """Return what is printed of a walk."""
    return [
        f"{len(result.files)} files, {len(result.functions)} functions",
        f"{len(result.frames)} frames above a layer's forward, {len(result.callbacks)} callbacks",
        *(f"  file {Path(file).relative_to(ROOT)}" for file in sorted(result.files)),
        *(
            f"  frame {frame}{' (callback)' if frame in result.callbacks else ''}"
            for frame in result.frames
        ),
    ]


if __name__ == "__main__":
    sys.stdout.write("\n".join(lines(walk())) + "\n")
