"""The report of a demo: what was measured, whether it is what LEMA claims, and which commands to try next."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lema.cli.demo.files import DemoFiles
from lema.config.units import human_bytes, human_count
from lema.data import TokenDataset
from lema.errors import LemaError
from lema.train import LemaModel

__all__ = [
    "MOST_DIFFERENCE",
    "Measured",
    "Outcome",
    "check",
    "introduce",
    "next_commands",
    "say",
    "show_next",
    "show_outcome",
]


MOST_DIFFERENCE = 1e-4  # of a logit of the streamed model and of PEFT's; with one arithmetic there is none
_REPORT = "this is a fault of lema or of a library it rests on; please report it with the output of `pip list`"


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


def check(outcome: Outcome) -> None:
    """Hold the outcome against what the demo claims.

    Raises:
        LemaError: the loss did not fall, or PEFT's numbers are others.
    """
    if not outcome.after.loss < outcome.before.loss:
        raise LemaError(
            f"the held-out loss did not fall: {outcome.before.loss:.3f} before, {outcome.after.loss:.3f} after",
            where=str(outcome.files.metrics),
            how=_REPORT,
        )
    if not outcome.logit_difference <= MOST_DIFFERENCE:
        raise LemaError(
            f"PEFT's logits differ from the streamed model's by {outcome.logit_difference:.2e}",
            where=str(outcome.files.adapter),
            how=_REPORT,
        )


def introduce(out: Console, model: LemaModel, files: DemoFiles, train_data: TokenDataset) -> None:
    """Say what is trained on what, and how much of it is in memory at a time."""
    stream = model.memory
    shards = len(list(files.model.glob("*.safetensors")))
    held = stream.num_slots * stream.slot_bytes
    adapter = sum(parameter.numel() for parameter in model.get_trainable_parameters())
    say(out, "A small model with random weights learns an almanac by heart; its layers stream from disk.", "bold")
    say(out, f"model    {len(stream.layers)} layers, {human_bytes(model.gbi.nbytes)} in {shards} files, frozen")
    say(out, f"memory   {stream.num_slots} layers at a time: {human_bytes(held)} of weights")
    say(out, f"adapter  {human_count(adapter)} parameters, trained")
    say(out, f"data     {train_data.counts}")
    say(out)


def show_outcome(out: Console, prompt: str, outcome: Outcome) -> None:
    """Show the model before and after, and whether PEFT agrees."""
    say(out)
    for name, measured in (("before", outcome.before), ("after", outcome.after)):
        say(out, f"{name:8} held-out loss {measured.loss:.3f}, perplexity {measured.perplexity:.1f}", "bold")
        say(out, f"         {prompt}{_printable(measured.text)}")
    say(out, f"check    largest logit difference to plain transformers + PEFT: {outcome.logit_difference:.2e}")
    say(out)


def show_next(out: Console, files: DemoFiles) -> None:
    """Show where everything lies, and commands that go on from there."""
    curve = files.curve if files.curve.is_file() else "none: it is drawn where matplotlib is installed"
    say(out, "Files", "bold")
    named = {
        "model": files.model,
        "text": files.text,
        "chats": files.chat,
        "pairs": files.pairs,
        "config": files.config,
    }
    for name, place in {**named, "adapter": files.adapter, "metrics": files.metrics, "curve": curve}.items():
        say(out, f"  {name:8} {place}")
    say(out, "What to try next", "bold")
    for command in next_commands(files):
        say(out, f"  {command}")


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


def say(out: Console, line: str = "", style: str = "") -> None:
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
