"""The results of `lema generate`: read where a run was stopped, and written as batches end."""

import contextlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lema.config.units import human_bytes, human_count
from lema.errors import ConfigError, printable
from lema_tools.generation.compared import print_compared, with_base
from lema_tools.generation.images import reading_of
from lema_tools.generation.stream import ShownText, draws_text

if TYPE_CHECKING:
    from lema.data.files import Row
    from lema.data.row_forms import PromptForm
    from lema.train.inference.texts import Completion
    from lema.train.model import LemaModel

__all__ = ["ResultWriter", "saved_results"]

OF_BASE = "base_completion"
LINE = b'{"'  # how each result begins
MOST_RESULTS = 2**32  # bytes of the results that a command which resumes reads again


def saved_results(
    output: Path | None, rows: list["Row"], *, resume: bool, compares: bool = False
) -> dict[int, dict[str, Any]]:
    """Return the results in the output, by the number of their prompts.

    Args:
        output: where they are; None: there are none.
        rows: the prompts.
        resume: whether results may be there.
        compares: whether each has the base model's text, too.

    Raises:
        ConfigError: the results are of other prompts, or unwanted, or with the base model's texts
            where those are not wanted, or without.
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
    from lema.data.prompts import written
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
        if (OF_BASE in result) != compares:
            what = f"the output has results {'without' if compares else 'with'} the base model's"
            how = f"{'leave out' if compares else 'give'} --base, as before, or another output"
            raise ConfigError(what, where=f"{output}:{number}", how=how)
        results[result["index"]] = result
    return results


@dataclass(frozen=True)
class ResultWriter:
    """Results, written where they are wanted as batches end; the first process of a group writes
    for all.
    """

    model: "LemaModel"
    rows: list["Row"]  # the prompts
    results: dict[int, dict[str, Any]]  # the results that there are, by the number of their prompts
    output: Path | None
    bare: bool  # print texts alone
    compares: bool = False  # the base model's text, too

    def run(
        self,
        options: dict[str, Any],
        *,
        form: "PromptForm",
        new: int,
        batch_size: int | None,
        kv: Any,
        seed: int | None,
    ) -> None:
        """Continue the prompts that have no result yet."""
        from lema.cli.progress import NoProgress, TokenProgress
        from lema.data.prompts import fitting, prompt_of
        from lema.train.inference.texts import completions, plan_of

        model = self.model
        first = self.model.backend.replicas.first
        reading = reading_of(model, self.rows)
        prompts = [prompt_of(row, model.tokenizer, form=form, reading=reading) for row in self.rows]
        ids = [prompt.ids for prompt in prompts]
        text = model.skeleton.config.get_text_config()
        fitting(self.rows, ids, new, text, model.config)
        plan = plan_of(model, ids, new, batch_size, kv, choose=True)
        size = plan.rows if plan is not None else batch_size or min(64, len(ids))
        if plan is not None and first and not self.bare:
            typer.echo(f"{len(ids):,} prompts, {plan.summary()}", err=True)
        began = time.monotonic()
        before = model.memory.counters
        seed = model.config.seed if seed is None else seed
        shown = None
        if first and self.bare and len(ids) == 1 and not self.compares and draws_text():
            shown = ShownText(model.tokenizer, options.get("stop_strings") or ())
            options = {**options, "streamer": shown}
        counts = TokenProgress(len(ids), len(self.results)) if shown is None else NoProgress()
        with contextlib.closing(counts) as display:
            on_token = display if first else lambda _: None
            arguments = (model, ids, new, size, options)
            chosen: dict[str, Any] = {"keys_values": kv, "seed": seed, "done": self.results.keys()}
            if any(prompt.images is not None for prompt in prompts):
                chosen["images"] = [prompt.images for prompt in prompts]
            batches = completions(*arguments, **chosen, on_token=on_token)
            pairs: Iterable[tuple[list[Completion], list[Completion]]]
            if self.compares:
                of_base = completions(*arguments, **chosen, on_token=on_token)
                pairs = with_base(model, of_base, batches)
            else:
                pairs = ((batch, []) for batch in batches)
            tokens = self._written(pairs, display, first=first, streamed=shown is not None)
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
        batches: Iterable[tuple[list["Completion"], list["Completion"]]],
        show: Callable[[int, int], None],
        *,
        first: bool,
        streamed: bool,
    ) -> int:
        """Write each batch as it ends, whole, and all in the order of the prompts at last; with
        each comes the base model's, or nothing. Return the tokens made.
        """
        from lema.storage.diskspace import disk_errors
        from lema.storage.regular import append

        tokens = 0
        if first:
            self._rewrite()  # so that it ends with a whole line
        for batch, base_batch in batches:
            of_base = {completion.index: completion for completion in base_batch}
            for completion in batch:
                index = completion.index
                self.results[index] = self._result(completion, of_base.get(index))
            tokens += sum(len(completion.tokens) for completion in (*batch, *base_batch))
            lines = "".join(_line(self.results[completion.index]) for completion in batch)
            if first and self.output is not None:
                with disk_errors(self.output):
                    append(self.output, lines.encode())
            elif first and not self.bare:
                typer.echo(lines, nl=False)
            show(0, len(batch))
        if first:
            self._rewrite()
        if first and self.bare and not streamed:
            for index in sorted(self.results):
                self._print(self.results[index])
        return tokens

    def _result(self, completion: "Completion", of_base: "Completion | None") -> dict[str, Any]:
        from lema.data.prompts import written

        of_both = {
            "index": completion.index,
            "completion": completion.text,
            "finish_reason": completion.finish,
        }
        if of_base is not None:
            of_both |= {OF_BASE: of_base.text, "base_finish_reason": of_base.finish}
        counts = {
            "prompt_tokens": completion.prompt_tokens,
            "completion_tokens": len(completion.tokens),
        }
        return {**written(self.rows[completion.index]), **of_both, **counts}

    def _print(self, result: dict[str, Any]) -> None:
        if self.compares:
            print_compared((result[OF_BASE], result["completion"]), draws_text())
        else:
            typer.echo(printable(result["completion"]))

    def _rewrite(self) -> None:
        from lema.storage.atomic import replace_file

        if self.output is not None:
            replace_file(
                self.output,
                "".join(_line(self.results[index]) for index in sorted(self.results)).encode(),
            )


def _line(result: dict[str, Any]) -> str:
    return json.dumps(result, ensure_ascii=False) + "\n"
