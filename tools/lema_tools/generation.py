"""`lema generate`: continues prompts with a trained model, and writes what it makes as batches
end.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lema.cli.arguments import PhaseNamed, Settings, Source, Trust, check_written
from lema.config.units import human_bytes, human_count
from lema.errors import ConfigError, printable
from lema_tools.loading import model_of, outcome_of

if TYPE_CHECKING:
    from lema.data.files import Row
    from lema.train.inference.texts import Completion
    from lema.train.model import LemaModel

__all__ = ["generate"]

COLDEST = 1e-4
HOTTEST = 1e4  # divisors of logits, of which none overflows in bfloat16
LINE = b'{"'  # how each result begins
MOST_RESULTS = 2**32  # bytes of the results that a command which resumes reads again


def generate(
    source: Source,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text to continue; may be repeated.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=(
                "Prompts: lines of .txt, or `prompt` or `messages` of .jsonl; - is standard input."
            ),
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the results, one JSON object per line."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Keep the results in the output file, and generate the others."
        ),
    ] = False,
    batch_size: Annotated[
        int | None,
        typer.Option(min=1, help="Prompts at once. Default: as many as fit, at most 64."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 128,
    do_sample: Annotated[
        bool,
        typer.Option(
            "--do-sample",
            help="Sample tokens instead of taking the most likely one; --temperature implies it.",
        ),
    ] = False,
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=HOTTEST, help="Temperature of sampling; 0 takes the most likely token."
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Sample from the most likely tokens up to this probability mass."
        ),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from this many of the most likely tokens.")
    ] = None,
    min_p: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Sample from tokens with this fraction of the highest probability.",
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(min=COLDEST, max=HOTTEST, help="Above 1: repeat tokens less often."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of sampling. Default: the seed of the settings.")
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Stop before this text; may be repeated."),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Render texts with the chat template, as messages of the user."
        ),
    ] = False,
    kv: Annotated[
        str, typer.Option(metavar="device|host", help="Where keys and values are kept.")
    ] = "device",
    phase: PhaseNamed = None,
    settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:
    """Continue prompts with the base model and adapter. A batch reads the weights once per new
    token.
    """
    if (prompts is None) == (not prompt):
        raise ConfigError(
            "prompts must come from one place",
            where="--prompt",
            how="give --prompt TEXT or --prompts FILE",
        )
    if kv not in ("device", "host"):
        raise ConfigError(
            f"{kv!r} is not a place for keys and values", where="--kv", how="use device or host"
        )
    options = _sampling(
        do_sample=do_sample, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
    )
    options |= {} if repetition_penalty is None else {"repetition_penalty": repetition_penalty}
    options |= {"stop_strings": stop} if stop else {}
    from lema.config.acting import OF_TRAINING
    from lema.data.chat.prompts import read_prompts
    from lema.data.files import Row

    rows = [
        Row({"prompt": text}, "--prompt", number) for number, text in enumerate(prompt or [], 1)
    ]
    rows = rows or read_prompts(prompts or Path("-"))
    results = _saved_results(output, rows, resume=resume)
    outcome = outcome_of(source, settings, phase)
    model = model_of(source, settings, trust_remote_code, outcome, unread=OF_TRAINING)
    with contextlib.closing(model):
        check_written("--output", output, model.config, source, prompts)
        writer = _ResultWriter(
            model, rows, results, output, bare=prompts is None and output is None
        )
        writer.run(options, chat=chat, new=max_new_tokens, batch_size=batch_size, kv=kv, seed=seed)


def _sampling(
    *, do_sample: bool, temperature: float | None, **options: float | None
) -> dict[str, Any]:
    """Return the settings of sampling as `transformers` names them; a ConfigError: with them
    nothing would be drawn.
    """
    chosen = {name: value for name, value in options.items() if value is not None}
    if temperature is not None and 0 < temperature < COLDEST:
        what = f"logits divided by {temperature} would be infinite"
        raise ConfigError(what, where="--temperature", how=f"give 0, or {COLDEST} or more")
    if temperature == 0 or not (do_sample or temperature):
        if chosen or do_sample:
            named = ", ".join(
                f"--{name.replace('_', '-')}" for name in [*chosen, *["do_sample"] * do_sample]
            )
            how = "give --do-sample, or a --temperature above 0; or leave these out"
            raise ConfigError("this option has no effect without sampling", where=named, how=how)
        return {"do_sample": False}
    return {
        "do_sample": True,
        **({} if temperature is None else {"temperature": temperature}),
        **chosen,
    }


def _saved_results(
    output: Path | None, rows: list["Row"], *, resume: bool
) -> dict[int, dict[str, Any]]:
    """Return the results in the output, by the number of their prompts; or ConfigError: of
    others, or unwanted.
    """
    if output is None or not output.exists():
        if resume and output is None:
            raise ConfigError(
                "there is no output to continue", where="--resume", how="give --output FILE, too"
            )
        return {}
    if not resume:
        how = "use --resume to continue it, or choose another file"
        raise ConfigError("the output already has results", where=f"--output {output}", how=how)
    from lema.data.chat.prompts import written
    from lema.storage.regular import read_regular

    results = {}
    for number, line in enumerate(read_regular(output, MOST_RESULTS).splitlines(keepends=True), 1):
        if not line.endswith(b"\n") and LINE.startswith(line[: len(LINE)]):
            continue  # the end of what was being written as the run ended
        try:
            result = json.loads(line)
            same = result.items() >= written(rows[result["index"]]).items() and isinstance(
                result["completion"], str
            )
        except (ValueError, LookupError, TypeError, AttributeError):
            same = False
        if not same:
            how = "use the original file of prompts, or another output"
            raise ConfigError(
                "the output has results of other prompts", where=f"{output}:{number}", how=how
            )
        results[result["index"]] = result
    return results


@dataclass(frozen=True)
class _ResultWriter:
    """Results, written where they are wanted as batches end; the first process of a group writes
    for all.
    """

    model: "LemaModel"
    rows: list["Row"]  # the prompts
    results: dict[int, dict[str, Any]]  # the results that there are, by the number of their prompts
    output: Path | None
    bare: bool  # print texts alone

    def run(
        self,
        options: dict[str, Any],
        *,
        chat: bool,
        new: int,
        batch_size: int | None,
        kv: Any,
        seed: int | None,
    ) -> None:
        """Continue the prompts that have no result yet."""
        from lema.cli.progress import TokenProgress
        from lema.data.chat.prompts import fitting, prompt_ids
        from lema.train.inference.texts import completions, plan_of

        model = self.model
        first = self.model.backend.replicas.first
        ids = [prompt_ids(row, model.tokenizer, chat=chat) for row in self.rows]
        fitting(self.rows, ids, new, model.skeleton.config.get_text_config())
        plan = plan_of(model, ids, new, batch_size, kv, choose=True)
        size = plan.rows if plan is not None else batch_size or min(64, len(ids))
        if plan is not None and first and not self.bare:
            typer.echo(f"{len(ids):,} prompts, {plan.summary()}", err=True)
        began = time.monotonic()
        before = model.memory.counters
        seed = model.config.seed if seed is None else seed
        with contextlib.closing(TokenProgress(len(ids), len(self.results))) as display:
            on_token = display if first else lambda _: None
            done = self.results.keys()
            batches = completions(
                model,
                ids,
                new,
                size,
                options,
                keys_values=kv,
                seed=seed,
                done=done,
                on_token=on_token,
            )
            tokens = self._written(batches, display, first=first)
        seconds = time.monotonic() - began
        after = model.memory.counters
        if first and not self.bare:
            read = human_bytes(after.bytes_read - before.bytes_read)
            rate = tokens / max(seconds, 1e-9)
            typer.echo(
                f"{tokens:,} tokens, {human_count(rate)}/s; {read} of weights read", err=True
            )

    def _written(
        self,
        batches: Iterable[list["Completion"]],
        show: Callable[[int, int], None],
        *,
        first: bool,
    ) -> int:
        """Write each batch as it ends, whole, and all in the order of the prompts at last;
        return the tokens made.
        """
        from lema.data.chat.prompts import written
        from lema.storage.diskspace import disk_errors
        from lema.storage.regular import append

        tokens = 0
        if first:
            self._rewrite()  # so that it ends with a whole line
        for batch in batches:
            for completion in batch:
                counts = {
                    "prompt_tokens": completion.prompt_tokens,
                    "completion_tokens": len(completion.tokens),
                }
                result = {
                    "index": completion.index,
                    "completion": completion.text,
                    "finish_reason": completion.finish,
                }
                self.results[completion.index] = {
                    **written(self.rows[completion.index]),
                    **result,
                    **counts,
                }
                tokens += len(completion.tokens)
            lines = "".join(_line(self.results[completion.index]) for completion in batch)
            if first and self.output is not None:
                with disk_errors(self.output):
                    append(self.output, lines.encode())
            elif first and not self.bare:
                typer.echo(lines, nl=False)
            show(0, len(batch))
        if first:
            self._rewrite()
        if first and self.bare:
            for index in sorted(self.results):
                typer.echo(printable(self.results[index]["completion"]))
        return tokens

    def _rewrite(self) -> None:
        from lema.storage.atomic import replace_file

        if self.output is not None:
            replace_file(
                self.output,
                "".join(_line(self.results[index]) for index in sorted(self.results)).encode(),
            )


def _line(result: dict[str, Any]) -> str:
    return json.dumps(result, ensure_ascii=False) + "\n"
