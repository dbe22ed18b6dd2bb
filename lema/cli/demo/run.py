"""The demo from beginning to end: makes the files, trains, measures what changed, and lets PEFT read the result.

What was measured is held against what LEMA claims, and the commands to try next are shown.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM

from lema.cli.demo.files import DemoFiles, without_bars, write_files
from lema.cli.progress import ProgressDisplay, progress_callback
from lema.config import LemaConfig
from lema.config.units import human_bytes, human_count
from lema.data import TokenDataset, collate
from lema.errors import LemaError
from lema.train import LemaModel
from lema.train.run import load_data

__all__ = ["MOST_DIFFERENCE", "Outcome", "check", "logit_difference", "next_commands", "run"]


PROMPT = "What does the miller bring?"
MOST_DIFFERENCE = 1e-4  # of a logit of the streamed model and of PEFT's; with one arithmetic there is none
REPORT = "this is a fault of lema or of a library it rests on; please report it with the output of `pip list`"


@dataclass(frozen=True)
class Measured:
    """What the model is worth at one time: loss and perplexity on held-out rows, and how it continues the prompt."""

    loss: float
    perplexity: float
    text: str


@dataclass(frozen=True)
class Outcome:
    """The model before and after training, and the largest difference of a logit once PEFT has loaded the adapter."""

    files: DemoFiles
    before: Measured
    after: Measured
    logit_difference: float


def run(directory: Path, *, max_steps: int | None = None, console: Console | None = None) -> Outcome:
    """Run the demo in a directory that is its own; see `lema.cli.demo.run_demo`."""
    out = console or Console(highlight=False)
    files = write_files(directory)
    config = LemaConfig.from_yaml(files.config, **({} if max_steps is None else {"max_steps": max_steps}))
    with _one_thread(), closing(LemaModel(config)) as model:
        train_data, eval_data = load_data(model)
        assert eval_data is not None
        model.initialize_lora()
        _introduce(out, model, files, train_data)
        before = _measure(model, eval_data)
        _train(out, model, train_data, eval_data)
        after = _measure(model, eval_data)
        model.save_pretrained(files.adapter)
        outcome = Outcome(files, before, after, logit_difference(model, files, eval_data))
    _show_outcome(out, outcome)
    check(outcome)
    _show_next(out, files)
    return outcome


def logit_difference(model: LemaModel, files: DemoFiles, data: TokenDataset) -> float:
    """Load base and adapter the ordinary way, and return the largest absolute difference of any logit of the data."""
    with without_bars(), warnings.catch_warnings():
        # PEFT asks for a property that transformers has renamed; nobody here can act on that.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        base = AutoModelForCausalLM.from_pretrained(files.model)
        whole = PeftModel.from_pretrained(base, str(files.adapter)).eval()
    largest = 0.0
    for row in data:
        batch: Any = collate([row])
        streamed: list[torch.Tensor] = []
        model.adapter.evaluate([batch], logits=streamed)
        with torch.no_grad():
            expected = whole(input_ids=batch["input_ids"]).logits
        largest = max(largest, float((streamed[0] - expected).abs().max()))
    return largest


def _measure(model: LemaModel, eval_data: TokenDataset) -> Measured:
    numbers = model.get_trainer().evaluate(eval_data)
    (text,) = model.generate(PROMPT, max_new_tokens=24)
    return Measured(numbers["eval_loss"], numbers["eval_perplexity"], text)


def _train(out: Console, model: LemaModel, train_data: TokenDataset, eval_data: TokenDataset) -> None:
    began, read_before, used_before = time.perf_counter(), model.memory.counters.bytes_read, model.backend.memory().used
    with closing(ProgressDisplay(out)) as display:
        trainer = model.get_trainer(callbacks=[progress_callback(display)])
        result = trainer.fit(train_data, eval_data)
    read, peak = model.memory.counters.bytes_read - read_before, model.backend.memory().peak
    _say(
        out,
        f"{trainer.global_step} steps in {time.perf_counter() - began:.1f} s: "
        f"{human_count(result['train_tokens_per_second'])} tokens/s, {human_bytes(read)} of weights streamed, "
        f"{human_bytes(peak)} of memory at most, {human_bytes(used_before)} of it in use before",
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread for the length of a `with` block.

    Layers this small gain a third from a second thread while it has a core to itself, and lose nine tenths of their
    speed while it has not: threads then spin, waiting for each other at the end of every operation.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def check(outcome: Outcome) -> None:
    """Raise a LemaError if the outcome is not what the demo claims: the loss falls, and PEFT's numbers are the same."""
    before, after, files = outcome.before.loss, outcome.after.loss, outcome.files
    if not after < before:
        what = f"the held-out loss did not fall: {before:.3f} before, {after:.3f} after"
        raise LemaError(what, where=str(files.metrics), how=REPORT)
    if not outcome.logit_difference <= MOST_DIFFERENCE:
        what = f"PEFT's logits differ from the streamed model's by {outcome.logit_difference:.2e}"
        raise LemaError(what, where=str(files.adapter), how=REPORT)


def _introduce(out: Console, model: LemaModel, files: DemoFiles, train_data: TokenDataset) -> None:
    """Say what is trained on what, and how much of it is in memory at a time."""
    stream = model.memory
    shards = len(list(files.model.glob("*.safetensors")))
    held = stream.num_slots * stream.slot_bytes
    adapter = sum(parameter.numel() for parameter in model.get_trainable_parameters())
    _say(out, "A small model with random weights learns an almanac by heart; its layers stream from disk.", "bold")
    _say(out, f"model    {len(stream.layers)} layers, {human_bytes(model.gbi.nbytes)} in {shards} files, frozen")
    _say(out, f"memory   {stream.num_slots} layers at a time: {human_bytes(held)} of weights")
    _say(out, f"adapter  {human_count(adapter)} parameters, trained")
    _say(out, f"data     {train_data.counts}")
    _say(out)


def _show_outcome(out: Console, outcome: Outcome) -> None:
    """Show the model before and after, and whether PEFT agrees."""
    _say(out)
    for name, measured in (("before", outcome.before), ("after", outcome.after)):
        _say(out, f"{name:8} held-out loss {measured.loss:.3f}, perplexity {measured.perplexity:.1f}", "bold")
        _say(out, f"         {PROMPT}{_printable(measured.text)}")
    _say(out, f"check    largest logit difference to plain transformers + PEFT: {outcome.logit_difference:.2e}")
    _say(out)


def _show_next(out: Console, files: DemoFiles) -> None:
    """Show where everything lies, and commands that go on from there."""
    curve = files.curve if files.curve.is_file() else "none: it is drawn where matplotlib is installed"
    _say(out, "Files", "bold")
    named = {"model": files.model, "text": files.text, "chats": files.chat, "pairs": files.pairs}
    named |= {"config": files.config, "adapter": files.adapter, "metrics": files.metrics}
    for name, place in {**named, "curve": curve}.items():
        _say(out, f"  {name:8} {place}")
    _say(out, "What to try next", "bold")
    for command in next_commands(files):
        _say(out, f"  {command}")


def next_commands(files: DemoFiles) -> list[str]:
    """Return command lines, ready for a shell."""
    config, adapter, directory = str(files.config), str(files.adapter), files.directory
    smaller = ["--set", "lora_rank=8", *_set("output_dir", directory / "rank8")]
    chats = [*_set("train_data", files.chat), *_set("output_dir", directory / "chat")]
    arguments = [
        ["generate", adapter, "--prompt", "When does the baker rise?", "--max-new-tokens", "32"],
        ["eval", adapter],
        ["train", config, *smaller],
        ["train", config, *chats],
        ["merge", adapter, str(directory / "merged")],
    ]
    return [f"{_command()} {shlex.join(line)}" for line in arguments]


def _say(out: Console, line: str = "", style: str = "") -> None:
    """Print one line that stays one, to be copied as it is; what looks like markup in it is somebody's path."""
    out.print(line, style=style, soft_wrap=True, markup=False, highlight=False, emoji=False)


def _set(name: str, path: Path) -> list[str]:
    value = str(path)
    if not re.fullmatch(r"[\w./-]+", value):  # --set reads YAML, where a JSON string is a string whatever it holds
        value = json.dumps(value, ensure_ascii=False)
    return ["--set", f"{name}={value}"]


def _command() -> str:
    """How this `lema` is called from here: by name where the shell finds it, else by the path beside this Python."""
    if shutil.which("lema"):
        return "lema"
    script = Path(sys.executable).with_name("lema")
    if script.is_file():
        here = Path.cwd()
        return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
    return f"{shlex.quote(sys.executable)} -m lema"


def _printable(text: str) -> str:
    """An untrained model says anything, control characters included; the text it learns is plain ASCII."""
    return "".join(character if character.isascii() and character.isprintable() else "_" for character in text)
