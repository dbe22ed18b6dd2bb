"""The demo from beginning to end: makes the files, trains, measures what changed, and lets PEFT read the result."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from transformers import AutoModelForCausalLM

from lema.cli.demo.files import DemoFiles, without_bars, write_files
from lema.cli.demo.report import Measured, Outcome, check, introduce, say, show_next, show_outcome
from lema.cli.progress import ProgressDisplay, progress_callback
from lema.config import LemaConfig
from lema.config.units import human_bytes, human_count
from lema.data import TokenDataset, collate
from lema.train import LemaModel
from lema.train.run import load_data

__all__ = ["logit_difference", "run"]


PROMPT = "What does the miller bring?"


def run(directory: Path, *, max_steps: int | None = None, console: Console | None = None) -> Outcome:
    """Run the demo in a directory that is its own; see `lema.cli.demo.run_demo`."""
    out = console or Console(highlight=False)
    files = write_files(directory)
    config = LemaConfig.from_yaml(files.config, **({} if max_steps is None else {"max_steps": max_steps}))
    with _one_thread(), closing(LemaModel(config)) as model:
        train_data, eval_data = load_data(model)
        assert eval_data is not None
        model.initialize_lora()
        introduce(out, model, files, train_data)
        before = _measure(model, eval_data)
        _train(out, model, train_data, eval_data)
        after = _measure(model, eval_data)
        model.save_pretrained(files.adapter)
        outcome = Outcome(files, before, after, logit_difference(model, files, eval_data))
    show_outcome(out, PROMPT, outcome)
    check(outcome)
    show_next(out, files)
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
    say(
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
