"""The files a demo makes before it trains: text, a tokenizer trained on it, a model with random weights, a config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

__all__ = ["DemoFiles", "without_bars", "write_files"]


VOCABULARY = 768
SHARD_SIZE = "2MB"
END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"


class DemoFiles:
    """Where everything of one demo lies."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.model = directory / "model"  # the base model, as a hub checkpoint: shards, index, config, tokenizer
        self.text = directory / "data/text.txt"  # the almanac, one row per line
        self.chat = directory / "data/chat.jsonl"  # its questions and answers, as `messages`
        self.pairs = directory / "data/pairs.jsonl"  # its questions with the answer, and with that to another question
        self.config = directory / "train.yaml"  # the settings, for `lema train`
        self.adapter = directory / "adapter"  # what training writes: the adapter, metrics and the loss curve
        self.metrics = self.adapter / "metrics.jsonl"  # the numbers of the run, a line of JSON for every measurement
        self.curve = self.adapter / "loss.png"  # the loss over the steps, where matplotlib is installed


def write_files(directory: Path) -> DemoFiles:
    """Write text, chats, tokenizer, model and config to a directory."""
    made = DemoFiles(directory)
    lines = [line for line in _bundled("almanac.txt").splitlines() if line and not line.startswith("#")]
    made.text.parent.mkdir(exist_ok=True)
    made.text.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    chats = list(_chats(lines))
    made.chat.write_text("".join(f"{json.dumps(chat)}\n" for chat in chats), encoding="utf-8")
    made.pairs.write_text("".join(f"{json.dumps(pair)}\n" for pair in _pairs(chats)), encoding="utf-8")
    tokenizer = _train_tokenizer(lines)
    tokenizer.save_pretrained(made.model)
    _write_model(made.model, tokenizer)
    made.config.write_text(_config_text(made), encoding="utf-8")
    return made


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep `transformers` from drawing progress bars of its own for the length of a `with` block."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _bundled(name: str) -> str:
    return (files("lema.cli.demo") / name).read_text(encoding="utf-8")


def _chats(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Every line that asks a question, as a chat of two messages."""
    for line in lines:
        question, asked, answer = line.partition("? ")
        if asked:
            messages = [{"role": "user", "content": f"{question}?"}, {"role": "assistant", "content": answer}]
            yield {"messages": messages}


def _pairs(chats: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Every chat's question with its answer, which is chosen, and with the next other answer, which is rejected."""
    for number, chat in enumerate(chats):
        question, answer = chat["messages"]
        later = (other["messages"][1] for other in (*chats[number:], *chats[:number]))
        yield {"prompt": [question], "chosen": [answer], "rejected": [next(one for one in later if one != answer)]}


def _train_tokenizer(lines: Sequence[str]) -> PreTrainedTokenizerFast:
    """Train byte-level BPE (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909): no text is out of its reach."""
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
    """Write a model with random weights as the hub keeps models: several shards and their index."""
    end = tokenizer.eos_token_id
    settings = json.loads(_bundled("model.json"))
    config = AutoConfig.for_model(
        **settings, vocab_size=len(tokenizer), bos_token_id=end, eos_token_id=end, pad_token_id=end
    )
    with torch.random.fork_rng(devices=[]), without_bars():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory, max_shard_size=SHARD_SIZE)


def _config_text(made: DemoFiles) -> str:
    paths = {"model": made.model, "adapter": made.adapter, "text": made.text}
    # A JSON string is a YAML string, whatever the path has in it.
    quoted = {name: json.dumps(str(path), ensure_ascii=False) for name, path in paths.items()}
    return Template(_bundled("train.yaml")).substitute(quoted)
