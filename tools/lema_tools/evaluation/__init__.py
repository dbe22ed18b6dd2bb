"""`lema eval`: the loss of a trained model on rows, or the results of tasks of
lm-evaluation-harness.
"""

import contextlib
import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from lema.cli.arguments import PhaseNamed, Settings, Source, Trust, check_written
from lema.config.units import human_bytes, human_duration
from lema.errors import ConfigError, DataError
from lema_tools.generation.images import with_images
from lema_tools.loading import model_of, outcome_of

__all__ = ["evaluate"]

RESULTS = b'{\n  "results": '  # how each file of results begins


def evaluate(
    source: Source,
    data: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="Data to use instead of the config's.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Tasks of lm-evaluation-harness, separated by commas."),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(min=0.0, help="Examples per task; a number below 1 is a fraction."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in the prompt of a task.")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of your own tasks.")
    ] = None,
    apply_chat_template: Annotated[
        bool,
        typer.Option(
            "--apply-chat-template", help="Render the questions of tasks with the chat template."
        ),
    ] = False,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Rows computed or texts generated at once.")
    ] = None,
    rows_per_pass: Annotated[
        int | None,
        typer.Option(min=1, help="Rows per pass over the weights. Default: as many as fit."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the results of tasks as JSON.")
    ] = None,
    phase: PhaseNamed = None,
    settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:
    """Measure loss and perplexity of a trained adapter, or tasks of lm-evaluation-harness."""
    of_tasks = {
        "--limit": limit,
        "--num-fewshot": num_fewshot,
        "--include-path": include_path,
        "--output": output,
    }
    of_tasks |= {"--batch-size": batch_size, "--rows-per-pass": rows_per_pass}
    task_options = [name for name, value in of_tasks.items() if value is not None]
    task_options += ["--apply-chat-template"] * apply_chat_template
    if tasks is None and task_options:
        raise ConfigError(
            "only --tasks uses this",
            where=", ".join(task_options),
            how="give --tasks NAMES, or leave it out",
        )
    if tasks is not None and data:
        raise ConfigError(
            "tasks have their own data", where="--data", how="leave it out, or leave --tasks out"
        )
    if data and _has_images(data):
        settings = with_images(settings)
    outcome = outcome_of(source, settings, phase)
    model = model_of(source, settings, trust_remote_code, outcome)
    with contextlib.closing(model):
        check_written("--output", output, model.config, source, include_path, begins=[RESULTS])
        if tasks is not None:
            from lema_tools.evaluation.harness import Harness

            names = [name.strip() for name in tasks.split(",") if name.strip()]
            how = Harness(
                limit, num_fewshot, include_path, apply_chat_template, batch_size, rows_per_pass
            )
            _run_tasks(model, names, how, output)
            return
        rows_by_name = _rows(model, data, outcome)
        trainer = model.get_trainer()
        for name, rows in rows_by_name.items():
            for key, value in trainer.evaluate(rows).items():
                if model.backend.replicas.first:
                    several = len(rows_by_name) > 1
                    label = key.replace("eval", f"eval_{name}", 1) if several else key
                    typer.echo(f"{label} {value:.6g}")


def _has_images(data: list[str]) -> bool:
    """Whether some rows are chats with images, for which the model is opened with its towers."""
    from lema.data.prompts import is_chat_with_images
    from lema.data.sets.sources import read_rows

    return any(map(is_chat_with_images, read_rows(data)))


def _rows(model: Any, data: list[str] | None, outcome: Any) -> dict[str, Any]:
    """Return the rows of `data`, or those that the model's config holds back, or those of each data
    set of a phase; a DataError: there are none."""
    from lema.model.files import read_data
    from lema.train.run import load_data

    rows_by_name: dict[str, Any]
    if data is None and outcome is not None:
        rows_by_name = outcome.eval_sources(model)
    elif paths := data or model.config.eval_data:
        rows_by_name = {"": read_data(model.config, model.files, paths)}
    else:
        eval_rows = load_data(model)[1] if model.config.train_data else None
        rows_by_name = {} if eval_rows is None else {"": eval_rows}
    if not rows_by_name:
        raise DataError(
            "there is no evaluation data", how="give --data FILE, or set eval_data or eval_split"
        )
    return rows_by_name


def _run_tasks(model: Any, names: list[str], how: Any, output: Path | None) -> None:
    from lema.storage.atomic import replace_file
    from lema_tools.evaluation.harness import evaluate_tasks, table_of

    began = time.monotonic()
    first = model.backend.replicas.first

    def report(text: str) -> None:
        if first:
            read = human_bytes(model.memory.counters.bytes_read)
            typer.echo(
                f"{text}, {read} of weights read, {human_duration(time.monotonic() - began)}",
                err=True,
            )

    results = evaluate_tasks(model, names, how, report)
    if not first:
        return
    typer.echo(table_of(results))
    if output is not None:
        # in this order, by which the file is known again
        results = {
            "results": results["results"],
            **results,
        }
        replace_file(output, (json.dumps(results, indent=2, default=str) + "\n").encode())
