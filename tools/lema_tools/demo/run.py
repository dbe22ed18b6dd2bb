"""The demo from beginning to end: makes the files, trains, measures what changed, and lets PEFT
read the result.

The files are text, a tokenizer trained on it, a model with random weights and a config. What was
measured is held against what LEMA claims, and the commands to try next are shown.
"""

import json
import re
import shlex
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files as bundle
from pathlib import Path
from string import Template
from typing import Any

import torch
from peft import PeftModel
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from lema.cli.progress import ProgressDisplay, progress_callback
from lema.config import LemaConfig
from lema.config.units import human_bytes, human_count
from lema.data import TokenDataset, collate
from lema.errors import LemaError
from lema.train import LemaModel
from lema.train.run import load_data
from lema_cpu.threads import one_thread

__all__ = [
    "MOST_DIFFERENCE",
    "Outcome",
    "check",
    "logit_difference",
    "next_commands",
    "run",
    "write_files",
]


VOCABULARY = 768
SHARD_SIZE = "2MB"
END = "<|end|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
PROMPT = "What does the miller bring?"
# of a logit of the streamed model and of PEFT's; with one arithmetic there is none
MOST_DIFFERENCE = 1e-4
Printer = Callable[..., None]  # a line, and its style
REPORT = "this is a bug in LEMA or a library; please report it with the output of `pip list`"


class DemoFiles:
    """Where everything of one demo lies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # the base model, as a hub checkpoint: shards, index, config, tokenizer
        self.model = directory / "model"
        self.text = directory / "data/text.txt"  # the almanac, one row per line
        self.chat = directory / "data/chat.jsonl"  # its questions and answers, as `messages`
        # its questions with the answer, and with that to another question
        self.pairs = directory / "data/pairs.jsonl"
        self.config = directory / "train.yaml"  # the settings, for `lema train`
        # what training writes: the adapter, metrics and the loss curve
        self.adapter = directory / "adapter"
        # the numbers of the run, a line of JSON for every measurement
        self.metrics = self.adapter / "metrics.jsonl"
        # a picture of the loss over the steps
        self.curve = self.adapter / "loss.png"


@dataclass(frozen=True)
class Measured:
    """What the model is worth at one time: loss and perplexity on held-out rows, and how it
    continues the prompt.
    """

    loss: float
    perplexity: float
    text: str


@dataclass(frozen=True)
class Outcome:
    """The model before and after training, and the largest difference of a logit once PEFT has
    loaded the adapter.
    """

    files: DemoFiles
    before: Measured
    after: Measured
    logit_difference: float


def run(
    directory: Path, *, max_steps: int | None = None, console: Console | None = None
) -> Outcome:
    """Run the demo in a directory that is its own; see `lema_tools.demo.run_demo`."""
    out = console or Console(highlight=False)
    # A line stays one, to be copied as it is; what looks like markup in it is somebody's path.
    print_line = partial(out.print, soft_wrap=True, markup=False, highlight=False, emoji=False)
    files = write_files(directory)
    config = LemaConfig.from_yaml(
        files.config, **({} if max_steps is None else {"max_steps": max_steps})
    )
    with one_thread(), closing(LemaModel(config)) as model:
        train_data, eval_data = load_data(model)
        assert isinstance(train_data, TokenDataset), "its objective is of rows"
        assert isinstance(eval_data, TokenDataset), "its settings name such rows"
        model.initialize_lora()
        _introduce(print_line, model, files, train_data)
        before = _measure(model, eval_data)
        _train(out, print_line, model, train_data, eval_data)
        after = _measure(model, eval_data)
        model.save_pretrained(files.adapter)
        outcome = Outcome(files, before, after, logit_difference(model, files, eval_data))
    _show_outcome(print_line, outcome)
    check(outcome)
    _show_next(print_line, files)
    return outcome


def logit_difference(model: LemaModel, files: DemoFiles, data: TokenDataset) -> float:
    """Load base and adapter the ordinary way, and return the largest absolute difference of any
    logit of the data.
    """
    with without_bars(), warnings.catch_warnings():
        # PEFT asks for a property that transformers has renamed; nobody here can act on that.
        warnings.filterwarnings(
            "ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning
        )
        base = AutoModelForCausalLM.from_pretrained(files.model)
        peft_model = PeftModel.from_pretrained(base, str(files.adapter)).eval()
    largest = 0.0
    for row in data:
        batch: Any = collate([row])
        streamed: list[torch.Tensor] = []
        model.adapter.evaluate([batch], logits=streamed)
        with torch.no_grad():
            expected = peft_model(input_ids=batch["input_ids"]).logits
        largest = max(largest, float((streamed[0] - expected).abs().max()))
    return largest


def _measure(model: LemaModel, eval_data: TokenDataset) -> Measured:
    numbers = model.get_trainer().evaluate(eval_data)
    (text,) = model.generate(PROMPT, max_new_tokens=24)
    return Measured(numbers["eval_loss"], numbers["eval_perplexity"], text)


def _train(
    out: Console,
    print_line: Printer,
    model: LemaModel,
    train_data: TokenDataset,
    eval_data: TokenDataset,
) -> None:
    began = time.perf_counter()
    read_before = model.memory.counters.bytes_read
    used_before = model.backend.memory().used
    with closing(ProgressDisplay(out)) as display:
        trainer = model.get_trainer(callbacks=[progress_callback(display)])
        result = trainer.fit(train_data, eval_data)
    read = model.memory.counters.bytes_read - read_before
    peak = model.backend.memory().peak
    print_line(
        f"{trainer.global_step} steps in {time.perf_counter() - began:.1f} s: "
        f"{human_count(result['train_tokens_per_second'])} tokens/s, {human_bytes(read)} "
        "of weights streamed, "
        f"{human_bytes(peak)} of memory at most, {human_bytes(used_before)} of it in use before",
    )


def check(outcome: Outcome) -> None:
    """Raise a LemaError if the outcome is not what the demo claims: the loss falls, and PEFT's
    numbers are the same.
    """
    before = outcome.before.loss
    after = outcome.after.loss
    files = outcome.files
    if not after < before:
        what = f"the held-out loss did not fall: {before:.3f} before, {after:.3f} after"
        raise LemaError(what, where=str(files.metrics), how=REPORT)
    if not outcome.logit_difference <= MOST_DIFFERENCE:
        what = f"PEFT's logits differ from the streamed model's by {outcome.logit_difference:.2e}"
        raise LemaError(what, where=str(files.adapter), how=REPORT)


def _introduce(
    print_line: Printer, model: LemaModel, files: DemoFiles, train_data: TokenDataset
) -> None:
    stream = model.memory
    shards = len(list(files.model.glob("*.safetensors")))
    allocated = stream.num_slots * stream.slot_bytes
    adapter = sum(parameter.numel() for parameter in model.get_trainable_parameters())
    print_line(
        (
            "A small model with random weights learns an almanac by heart; its layers stream "
            "from disk."
        ),
        style="bold",
    )
    print_line(
        f"model    {len(stream.layers)} layers, {human_bytes(model.gbi.nbytes)} in "
        f"{shards} files, frozen"
    )
    print_line(f"memory   {stream.num_slots} layers at a time: {human_bytes(allocated)} of weights")
    print_line(f"adapter  {human_count(adapter)} parameters, trained")
    print_line(f"data     {train_data.counts}")
    print_line()


def _show_outcome(print_line: Printer, outcome: Outcome) -> None:
    print_line()
    for name, measured in (("before", outcome.before), ("after", outcome.after)):
        print_line(
            f"{name:8} held-out loss {measured.loss:.3f}, perplexity {measured.perplexity:.1f}",
            style="bold",
        )
        print_line(f"         {PROMPT}{_printable(measured.text)}")
    print_line(
        "check    largest logit difference to plain transformers + PEFT: "
        f"{outcome.logit_difference:.2e}"
    )
    print_line()


def _show_next(print_line: Printer, files: DemoFiles) -> None:
    print_line("Files", style="bold")
    named = {"model": files.model, "text": files.text, "chats": files.chat, "pairs": files.pairs}
    named |= {"config": files.config, "adapter": files.adapter, "metrics": files.metrics}
    for name, path in {**named, "curve": files.curve}.items():
        print_line(f"  {name:8} {path}")
    print_line("What to try next", style="bold")
    for command in next_commands(files):
        print_line(f"  {command}")


def next_commands(files: DemoFiles) -> list[str]:
    """Return command lines, ready for a shell."""
    config = str(files.config)
    adapter = str(files.adapter)
    directory = files.directory
    smaller = ["--set", "lora_rank=8", *_set("output_dir", directory / "rank8")]
    chats = [*_set("train_data", files.chat), *_set("output_dir", directory / "chat")]
    arguments = [
        ["generate", adapter, "--prompt", "When does the baker rise?", "--max-new-tokens", "24"],
        ["eval", adapter],
        ["train", config, *smaller],
        ["train", config, *chats],
        ["chat", str(directory / "chat")],
        ["merge", adapter, str(directory / "merged")],
    ]
    return [f"{_command()} {shlex.join(line)}" for line in arguments]


def _set(name: str, path: Path) -> list[str]:
    value = str(path)
    # --set reads YAML, where a JSON string is a string whatever it holds
    if not re.fullmatch(r"[\w./-]+", value):
        value = json.dumps(value, ensure_ascii=False)
    return ["--set", f"{name}={value}"]


def _command() -> str:
    """How this `lema` is called from here: by name where the shell finds it, else by the path
    beside this Python.
    """
    if shutil.which("lema"):
        return "lema"
    script = Path(sys.executable).with_name("lema")
    if script.is_file():
        here = Path.cwd()
        return shlex.quote(str(script.relative_to(here) if script.is_relative_to(here) else script))
    return f"{shlex.quote(sys.executable)} -m lema"


def _printable(text: str) -> str:
    """An untrained model says anything, control characters included; the text it learns is plain
    ASCII.
    """
    return "".join(
        character if character.isascii() and character.isprintable() else "_" for character in text
    )


def write_files(directory: Path) -> DemoFiles:
    """Write text, chats, tokenizer, model and config to a directory."""
    files = DemoFiles(directory)
    lines = [
        line for line in _bundled("almanac.txt").splitlines() if line and not line.startswith("#")
    ]
    files.text.parent.mkdir(exist_ok=True)
    files.text.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
    chats = list(_chats(lines))
    files.chat.write_text(
        "".join(f"{json.dumps(chat)}\n" for chat in chats), encoding="utf-8", newline="\n"
    )
    files.pairs.write_text(
        "".join(f"{json.dumps(pair)}\n" for pair in _pairs(chats)), encoding="utf-8", newline="\n"
    )
    tokenizer = _train_tokenizer(lines)
    tokenizer.save_pretrained(files.model)
    _write_model(files.model, tokenizer)
    files.config.write_text(_config_text(files), encoding="utf-8", newline="\n")
    return files


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep `transformers` from drawing progress bars of its own for the length of a `with`
    block.
    """
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _bundled(name: str) -> str:
    return (bundle("lema_tools.demo") / name).read_text(encoding="utf-8")


def _chats(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every line that asks a question, as a chat of two messages."""
    for line in lines:
        question, asked, answer = line.partition("? ")
        if asked:
            messages = [
                {"role": "user", "content": f"{question}?"},
                {"role": "assistant", "content": answer},
            ]
            yield {"messages": messages}


def _pairs(chats: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every chat's question with its answer, which is chosen, and with the next other answer,
    which is rejected.
    """
    for number, chat in enumerate(chats):
        question, answer = chat["messages"]
        later = (later_chat["messages"][1] for later_chat in (*chats[number:], *chats[:number]))
        yield {
            "prompt": [question],
            "chosen": [answer],
            "rejected": [next(candidate for candidate in later if candidate != answer)],
        }


def _train_tokenizer(lines: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train byte-level BPE (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909): no text is
    out of its reach.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=_bundled("chat_template.jinja"),
    )


def _write_model(directory: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    end = tokenizer.eos_token_id
    settings = json.loads(_bundled("model.json"))
    config = AutoConfig.for_model(
        **settings, vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, pad_token_id=end
    )
    with torch.random.fork_rng(devices=[]), without_bars():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(
            directory, max_shard_size=SHARD_SIZE
        )


def _config_text(files: DemoFiles) -> str:
    paths = {"model": files.model, "adapter": files.adapter, "text": files.text}
    # A JSON string is a YAML string, whatever the path has in it.
    quoted = {name: json.dumps(str(path), ensure_ascii=False) for name, path in paths.items()}
    return Template(_bundled("train.yaml")).substitute(quoted)
