"""Seconds and memory from a file of chats to a run's first step: the first start tokenises, the
second maps the tokens.

    OMP_NUM_THREADS=1 python benchmarks/tokenise.py --rows 300000
    OMP_NUM_THREADS=1 python benchmarks/tokenise.py --rows 2000000 --text
    OMP_NUM_THREADS=1 python benchmarks/tokenise.py --tenths 10GB

A small model and a tokenizer of 8,000 tokens are made, and a file of chats of about 250 tokens (or,
with `--text`, of lines of text). Each start is a process of its own, which trains one step of eight
rows. Its seconds in user mode count its workers; its memory is the peak of resident memory of the
process itself, and that of its largest worker.

With `--tenths` a file of lines of text of that size is made and tokenised, and nothing is trained:
for each tenth of the file its seconds in user mode, of the process and its workers, its bytes for
each of these, and the most anonymous memory (which is no file's) that they held while it was
tokenised; a page that they share is counted in shares.
"""

import argparse
import contextlib
import json
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from common import Shape, report, write_model

SHAPE = Shape(64, 128, 4, 8_000, heads=4, dtype="float32")
WORDS = 10_000
BYTES_A_ROW = 980  # of lines of text, about
LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' "
    "+ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main() -> None:
    """Make the files, start each arm in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=300_000)
    parser.add_argument("--text", action="store_true", help="lines of text rather than chats")
    parser.add_argument(
        "--in-memory",
        action="store_true",
        help="also tokenise without a cache, as before there was one",
    )
    parser.add_argument("--directory", type=Path, default=Path("tokenise-files"))
    parser.add_argument(
        "--tenths", metavar="SIZE", help="how a text of this size is tokenised, a tenth at a time"
    )
    parser.add_argument("--start", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.start:
        _start(json.loads(given.start))
        return
    model = given.directory / "model"
    if not model.exists():
        model.mkdir(parents=True)
        write_model(model, SHAPE)
        write_tokenizer(model)
    if given.tenths:
        report("tokenise-tenths", _tenths(given.directory, given.tenths), SHAPE)
        return
    ending = "txt" if given.text else "jsonl"
    few, many = (given.directory / f"{rows}.{ending}" for rows in (1_000, given.rows))
    for file, rows in ((few, 1_000), (many, given.rows)):
        write_rows(file, rows, text=given.text)
    arms = [("1,000 rows", few, False)]
    arms += [(f"{given.rows:,} rows, tokenised in memory", many, False)] * given.in_memory
    arms += [(f"{given.rows:,} rows, {which} start", many, True) for which in ("first", "second")]
    cache = given.directory.resolve() / "cache"
    found = []
    print(f"{many}: {many.stat().st_size / 1e6:.0f} MB")
    print(
        "| start | seconds | user seconds | peak memory MB | of a worker MB "
        "|\n|---|---|---|---|---|"
    )
    for name, file, cached in arms:
        settings = {
            "model_name_or_path": str(model),
            "train_data": str(file),
            "device": "cpu",
            "max_steps": 1,
            "save_steps": 0,
            "max_length": 1024,
            "data_cache": str(cache) if cached else False,
            "output_dir": str(given.directory / "output"),
            "overwrite_output_dir": True,
        }
        began = time.monotonic()
        command = [sys.executable, __file__, "--start", json.dumps(settings)]
        told = subprocess.run(
            command, check=True, stdout=subprocess.PIPE, text=True
        ).stdout.splitlines()[-1]
        row = {"start": name, "seconds": round(time.monotonic() - began, 1), **json.loads(told)}
        print("| " + " | ".join(str(value) for value in row.values()) + " |", flush=True)
        found.append(row)
    report("tokenise", found, SHAPE)


def _start(settings: dict[str, Any]) -> None:
    """Train one step as settings say, as `lema train` does, and print what it took."""
    file = Path(settings["output_dir"]).with_suffix(".yaml")
    file.write_text(json.dumps(settings), encoding="utf-8")  # which is YAML
    sys.argv = ["lema", "train", str(file)]
    from lema.cli import main as command

    try:
        command()
    except SystemExit as end:
        if end.code:
            raise
    own, workers = (
        resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    took = {"user": round(own.ru_utime + workers.ru_utime, 1)}
    # Not `ru_maxrss` of the process itself, because that counts the one that started it.
    [peak] = [
        line.split()[1]
        for line in Path("/proc/self/status").read_text().splitlines()
        if line[:5] == "VmHWM"
    ]
    print(json.dumps(took | {"memory": int(peak) // 1024, "worker": workers.ru_maxrss // 1024}))


def _tenths(directory: Path, size: str) -> list[dict[str, Any]]:
    """Tokenise a text of this size, and return and print what each tenth of it took."""
    from transformers import AutoTokenizer

    from lema.config.units import parse_memory
    from lema.data import cache, prepare_data

    file = directory / f"{size}.txt"
    found = list[dict[str, Any]]()
    write_rows(file, rows=parse_memory(size, 0) // BYTES_A_ROW, text=True)
    print(f"{file}: {file.stat().st_size / 1e6:.0f} MB")
    print(
        (
            "| tenth | user seconds | MB a user second | process MB | workers MB "
            "|\n|---|---|---|---|---|"
        ),
        flush=True,
    )

    @contextlib.contextmanager
    def line() -> Iterator[Callable[[int, int, float, int], None]]:
        own = psutil.Process()
        before = _user()
        behind = 0
        looked = 0
        most = {"process": 0, "workers": 0}

        def tell(done: int, total: int, *_: float) -> None:
            nonlocal before, behind, looked
            # because looking takes as long as tokenising a few rows
            if done - looked >= total // 1000:
                held = {"process": _anonymous(own), "workers": sum(map(_anonymous, own.children()))}
                most.update({name: max(most[name], now) for name, now in held.items()})
                looked = done
            if done < total * (len(found) + 1) // 10:
                return
            now = _user()
            row = {"tenth": len(found) + 1, "user": round(now - before, 1)}
            row |= {"rate": round((done - behind) / 1e6 / (now - before), 3)}
            found.append(row | {name: one // 10**6 for name, one in most.items()})
            most.update(process=0, workers=0)
            before = now
            behind = done
            print("| " + " | ".join(str(value) for value in found[-1].values()) + " |", flush=True)

        yield tell

    cache._line = line
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    rows = prepare_data(str(file), tokenizer, max_length=1024, cache=directory.resolve() / "cache")
    print(rows.counts)
    return found


def _user() -> float:
    """Seconds in user mode of this process and of the workers it has now."""
    own = psutil.Process()
    return sum(one.cpu_times().user for one in (own, *own.children()))


def _anonymous(process: psutil.Process) -> int:
    """Bytes of memory of a process that no file backs; of a page that it shares with forks, its
    share.
    """
    lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    [found] = [line.split()[1] for line in lines if line.startswith("Pss_Anon:")]
    return int(found) * 1024


def write_rows(file: Path, rows: int, *, text: bool) -> None:
    """Write so many chats of two messages, or lines of text, of about 250 tokens; the same for
    the same number.
    """
    if file.exists():
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    draw = random.Random(rows)
    words = _words()
    # Word number n is about as frequent as 1 / n, as in a language; a long draw is cut anew for
    # each row.
    stream = [words[min(int(WORDS ** draw.random()) - 1, WORDS - 1)] for _ in range(1_000_000)]
    with file.open("w", encoding="utf-8") as out:
        for _ in range(rows):
            asked, said = (
                " ".join(stream[first : first + count])
                for first, count in (
                    (draw.randrange(len(stream)), draw.randint(*size))
                    for size in ((20, 55), (60, 160))
                )
            )
            row = {
                "messages": [
                    {"role": "user", "content": asked},
                    {"role": "assistant", "content": said},
                ]
            }
            out.write(f"{asked} {said}\n" if text else json.dumps(row) + "\n")


def _words() -> list[str]:
    draw = random.Random(0)
    return [
        "".join(draw.choices(LETTERS, range(26, 0, -1), k=draw.randint(2, 9))) for _ in range(WORDS)
    ]


def write_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer trained on words as those of the rows, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=8_000,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    words = _words()
    bpe.train_from_iterator((" ".join(words[: 2**size]) for size in range(15)), trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)


if __name__ == "__main__":
    main()
