"""lm-evaluation-harness (https://github.com/EleutherAI/lm-evaluation-harness) on a streamed model.

The harness asks for all log-likelihoods of all tasks at once, so that they share passes over the
weights. Texts are taken apart and results put together by its own base class and functions, so that
both are as with its `HFLM`.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lema.data.chat.template import open_template
from lema.data.files import Row
from lema.data.forms import num_positions
from lema.errors import ConfigError, installing
from lema.train.inference.texts import completions, plan_of
from lema_tools.evaluation.scores import Scored, scores

if TYPE_CHECKING:
    from lema.train.model import LemaModel

__all__ = ["Harness", "evaluate_tasks", "harness_model", "table_of"]

POSITIONS = 2048  # where the model says nothing; the harness's own
NEW_TOKENS = 256  # where a task says nothing; the harness's own


@dataclass(frozen=True)
class Harness:
    """How tasks are run."""

    limit: float | None = None  # examples of each task, or if below 1 the part of them; None: all
    num_fewshot: int | None = None  # examples that are shown; None: as each task has it
    include_path: Path | None = None  # a directory of further tasks
    apply_chat_template: bool = False  # put what is asked through the tokenizer's template
    batch_size: int | None = None  # rows computed, and texts made, at once; None: as memory allows
    # that one pass over the weights scores; None: as many as there is room for
    rows_per_pass: int | None = None


def evaluate_tasks(
    model: "LemaModel",
    tasks: Sequence[str],
    harness: Harness,
    on_progress: Callable[[str], object] = lambda _: None,
) -> dict[str, Any]:
    """Return the harness's results of some tasks; `on_progress` is called after each pass over
    rows, and batch of texts. Raises `ConfigError` where the harness is not installed, or knows no
    such task."""
    lm_eval = _harness()
    include_path = None if harness.include_path is None else str(harness.include_path)
    manager = lm_eval.tasks.TaskManager(include_path=include_path)
    if unknown := [task for task in tasks if not manager.match_tasks([task])]:
        how = "`lm_eval ls tasks` lists them; --include-path DIR adds your own"
        raise ConfigError(
            f"the harness has no task of this name: {', '.join(unknown)}", where="--tasks", how=how
        )
    limit = harness.limit
    results = lm_eval.simple_evaluate(
        model=harness_model(model, harness, on_progress),
        tasks=list(tasks),
        num_fewshot=harness.num_fewshot,
        limit=int(limit) if limit is not None and limit >= 1 else limit,
        task_manager=manager,
        apply_chat_template=harness.apply_chat_template,
        log_samples=False,
    )
    assert results is not None, "one process has the results"
    return dict(results)


def table_of(results: Mapping[str, Any]) -> str:
    """Return the results as the harness prints them."""
    tables = [_harness().utils.make_table(results)]
    if results.get("groups"):
        tables.append(_harness().utils.make_table(results, "groups"))
    return "\n".join(tables)


def _harness() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import lm_eval
            import lm_eval.tasks
            import lm_eval.utils
    except ImportError as error:
        how = installing("eval")
        raise ConfigError(
            f"tasks need lm-evaluation-harness: {error}", where="--tasks", how=how
        ) from error
    return lm_eval


def harness_model(
    model: "LemaModel",
    harness: Harness | None = None,
    on_progress: Callable[[str], object] = lambda _: None,
) -> Any:
    """Return a model as the harness takes it, an `lm_eval.api.model.LM`."""
    _harness()
    # The class is made here, because its base is imported only where somebody evaluates tasks.
    from lm_eval.api.model import TemplateLM

    tokenizer = model.tokenizer
    config = model.skeleton.config.get_text_config()
    attributes = {
        "tokenizer": tokenizer,
        "tokenizer_name": str(model.config.model_name_or_path).replace("/", "__"),
        "max_length": num_positions(config, model.config) or POSITIONS,
        "eot_token_id": tokenizer.eos_token_id,
        "prefix_token_id": int(
            tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        ),
    }
    return type("StreamedLM", (_Answers, TemplateLM), attributes)(
        model, harness or Harness(), on_progress
    )


class _Answers:
    """What the harness asks of a model, answered by passes over the layers; the names are those
    of its base class.
    """

    tokenizer: Any
    max_length: int  # tokens that the model has positions for
    prefix_token_id: int  # the token before the first of a text

    def __init__(
        self, model: "LemaModel", harness: Harness, on_progress: Callable[[str], object]
    ) -> None:
        super().__init__()
        self._model = model
        self._harness = harness
        self._on_progress = on_progress

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the token ids of a text; None: special tokens are added unless it has the first
        of them.
        """
        if add_special_tokens is None and string.startswith(
            self.tokenizer.decode(self.prefix_token_id)
        ):
            add_special_tokens = False
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **special))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat as the tokenizer's template writes it."""
        row = Row({}, "the harness's request", 1)
        template = open_template(self.tokenizer, None, row)
        return template.render(
            chat_history, row, prompt=add_generation_prompt, continued=not add_generation_prompt
        )

    def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
        """Return how likely each continuation is after its context, which is cut at its
        beginning if it is too long.
        """
        most = self.max_length + 1
        done = 0
        rows: list[Scored] = [
            ((context + answer)[-most:], len(answer)) for _key, context, answer in requests
        ]

        def scored(count: int) -> None:
            nonlocal done
            done += count
            self._on_progress(f"{done:,} of {len(rows):,} rows scored")

        sizes = {
            "batch_size": self._harness.batch_size,
            "rows_per_pass": self._harness.rows_per_pass,
        }
        row_likelihoods = scores(self._model, rows, **sizes, choose=True, on_pass=scored)
        return [(likelihood.log_likelihood, likelihood.greedy) for likelihood in row_likelihoods]

    def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
        """Return the log-likelihood of each whole text, cut into windows where it is too long;
        all share passes.
        """
        from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

        windows = []
        owners = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            parts = get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, context_len=1
            )
            for part in map(make_disjoint_window, parts):
                windows.append((None, *part))
                owners.append(number)
        sums = [0.0] * len(requests)
        for number, (value, _greedy) in zip(
            owners, self._loglikelihood_tokens(windows), strict=True
        ):
            sums[number] += value
        return sums

    def generate_until(self, requests: Any, **_: Any) -> list[str]:
        """Return what follows each text, up to a string it stops at; those with the same
        settings are made together.
        """
        text_by_number: dict[int, str] = {}
        asked = [request.args for request in requests]
        keys = [json.dumps(settings, sort_keys=True, default=str) for _context, settings in asked]
        order = sorted(range(len(asked)), key=keys.__getitem__)
        for _same, group in groupby(order, key=keys.__getitem__):
            numbers = list(group)
            texts = self._followed([asked[number][0] for number in numbers], asked[numbers[0]][1])
            text_by_number.update(zip(numbers, texts, strict=True))
        return [text_by_number[number] for number in range(len(asked))]

    def _followed(self, contexts: Sequence[str], settings: Mapping[str, Any]) -> list[str]:
        """Return what follows contexts that have the same settings."""
        from lm_eval.models.utils import (
            handle_stop_sequences,
            normalize_gen_kwargs,
            postprocess_generated_text,
        )

        model = self._model
        options = dict(normalize_gen_kwargs(dict(settings), NEW_TOKENS))
        end = model.tokenizer.decode(model.tokenizer.eos_token_id)
        until = [
            string
            for string in handle_stop_sequences(options.pop("until", None), eos=end)
            if string
        ]
        new = int(options.pop("max_gen_toks"))
        if new >= self.max_length:
            what = f"{new} new tokens are requested, but the model has {self.max_length} positions"
            raise ConfigError(what, where="max_gen_toks", how="lower it in the task")
        if not options.get("do_sample"):
            options.pop("temperature", None)
        ids = [self.tok_encode(context)[-(self.max_length - new) :] for context in contexts]
        plan = plan_of(model, ids, new, self._harness.batch_size, choose=True)
        size = plan.rows if plan is not None else self._harness.batch_size or 1
        text_by_index: dict[int, str] = {}
        for batch in completions(model, ids, new, size, {**options, "stop_strings": until}):
            for completion in batch:
                text = model.tokenizer.decode(list(completion.tokens), skip_special_tokens=True)
                text_by_index[completion.index] = postprocess_generated_text(text, until, None)
            self._on_progress(f"{len(text_by_index):,} of {len(contexts):,} texts made")
        return [text_by_index[number] for number in range(len(contexts))]
