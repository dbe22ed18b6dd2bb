"""`lema report`: a run on one HTML page, which needs neither network nor script, and escapes
what comes from files.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lema.config.units import MEMORY_PARTS, human_bytes, human_count, human_duration
from lema.storage.regular import check_kind, check_separate, check_target, read_regular
from lema_tools.page import BEGIN, escape, page, table, tiles
from lema_tools.rundir import TIMES, Run, amount, by_step, read_json, read_run
from lema_tools.steptrace import find_trace, read_step
from lema_tools.svg import Bar, Series, bars, chart, columns, timeline

__all__ = ["html", "report"]

MANY = 40  # points from which on a curve is smoothed, over about a twentieth of them
LONG = 20_000  # characters of a file that are shown


def report(
    output_dir: Annotated[
        Path, typer.Argument(metavar="OUTPUT_DIR", help="The output_dir of the run.")
    ],
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File to write. Default: report.html in OUTPUT_DIR."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Trace of `lema train --trace`. Default: a *trace*.json in OUTPUT_DIR.",
        ),
    ] = None,
) -> None:
    """Write one HTML page about a run: curves, timeline of a step, memory, settings,
    environment, certificates.
    """
    from lema.storage.atomic import replace_file

    file = output or output_dir / "report.html"
    check_target(file)
    reads = [path for path in output_dir.glob("*") if path.suffix != ".html"]
    check_separate(file, reads if trace is None else [*reads, trace])
    check_kind(file, BEGIN.encode())
    replace_file(file, html(read_run(output_dir), trace).encode("utf-8", "replace"))
    typer.echo(f"report: {file}")


def html(run: Run, trace: Path | None = None) -> str:
    """Return the page of a run; `trace`: the file of its trace, None: one of its directory, if
    there is one.
    """
    settings = _settings(run)
    name = settings.get("run_name") or run.directory.absolute().name
    device = str(settings.get("device") or "")
    if device == "auto":  # what it came to is known of the plan
        device = _machine(run) or str((run.about.get("plan") or {}).get("device") or "")
    about = [str(settings.get("model_name_or_path") or ""), _objective(settings, device)]
    about += [name for name in [_machine(run)] if name not in ("cpu", device)]
    head = f'<h1>{escape(str(name))}<span class="chip {run.state}">{run.state}</span></h1>'
    head += f"<p>{escape(' · '.join(filter(None, about)))}</p>"
    sections = [
        *([("signs", "This run may have learnt nothing", _signs(run))] if run.signs else []),
        ("summary", "Summary", tiles(_tiles(run)) + _phases(run)),
        ("curves", "Curves", _curves(run)),
        ("time", "Where a step's time goes", _times(run)),
        ("timeline", "Timeline of a step", _timeline(run, trace)),
        ("memory", "Memory", _memory(run)),
        ("results", "Results", _card(run)),
        ("certificates", "Certificates", _certificates(run)),
        ("settings", "Settings", _settings_table(run, settings)),
        ("environment", "Environment", table(_environment(run))),
    ]
    return page(f"{name}: LEMA", head, sections, "Written by <code>lema report</code>.")


def _settings(run: Run) -> Mapping[str, Any]:
    """Return the settings, of plan.json, or of the adapter or the newest checkpoint."""
    if settings := run.about.get("settings"):
        return dict(settings)
    directories = (run.directory, *reversed(run.checkpoints))
    return next(
        filter(None, (read_json(directory / "lema_config.json") for directory in directories)), {}
    )


def _objective(settings: Mapping[str, Any], device: str) -> str:
    rank = settings.get("lora_rank")
    where = f", on {device}" if device else ""
    return f"{settings.get('objective', 'sft')}, rank {rank}{where}" if settings else ""


def _machine(run: Run) -> str:
    machine = (run.about.get("plan") or {}).get("machine") or ""
    return str(machine.get("name", "") if isinstance(machine, Mapping) else machine)


def _tiles(run: Run) -> Iterator[tuple[str, str, str]]:
    yield "steps", f"{run.step:,}", "" if run.steps is None else f"of {run.steps:,}"
    losses = by_step(run.trained, "loss")
    evaluations = by_step(run.evaluated, "eval_loss")
    if losses:
        yield (
            "loss",
            f"{losses[-1][1]:.4f}",
            f"at step {losses[-1][0]:,}; {losses[0][1]:.4f} at first",
        )
    if finite := [point for point in evaluations if math.isfinite(point[1])]:
        step, best = min(finite, key=lambda point: point[1])
        yield "best evaluation", f"{best:.4f}", f"at step {step:,}, of {len(evaluations)}"
    if rates := [rate for _, rate in by_step(run.trained, "tokens_per_second")]:
        yield "tokens/s", human_count(sum(rates) / len(rates)), f"{human_count(rates[-1])} at last"
    total = sum(sum(parts.values()) for _, _, parts in run.seconds)
    if (took := amount(run.summary, "train_runtime")) is not None:
        yield "time", human_duration(took), _step_time(run)
    elif total:
        yield "time", human_duration(total), _step_time(run)
    for memory in run.memories:
        if memory.measured is not None:
            yield memory.name, human_bytes(memory.measured), f"plan: {human_bytes(memory.planned)}"
    read = sum(value for _, value in by_step(run.trained, "bytes_read"))
    uploaded = sum(value for _, value in by_step(run.trained, "bytes_uploaded"))
    if run.trained:
        yield "read from disk", human_bytes(read), f"{human_bytes(uploaded)} to the device"
    if (left := run.seconds_left) is not None:
        yield "time left", human_duration(left), run.holder


def _signs(run: Run) -> str:
    """Return what was odd, after which steps."""
    rows = [
        (f"{int(amount(row, 'step') or 0):,}", row.get("phase", ""), str(row.get("why")))
        for row in run.signs
    ]
    count = run.dead_steps
    note = f"The last {count:,} steps were so." if count else "The last step was not so."
    return (
        f'<div class="card">{table(rows, ("step", "phase", "what was odd"))}<p '
        f'class="note">{note}</p></div>'
    )


def _step_time(run: Run) -> str:
    return "" if (seconds := run.seconds_per_step) is None else f"{seconds:.3g} s a step at last"


def _phases(run: Run) -> str:
    rows = []
    for phase in (run.about.get("plan") or {}).get("phases") or ():
        ended = any(
            row.get("event") == "phase_end" and row.get("phase") == phase["name"]
            for row in run.rows
        )
        begun = any(name == phase["name"] for name, _ in run.phases)
        losses = by_step([row for row in run.trained if row.get("phase") == phase["name"]], "loss")
        loss_range = f"{losses[0][1]:.4f} to {losses[-1][1]:.4f}" if losses else ""
        state = "ended" if ended else "begun" if begun else "to come"
        steps = f"{phase['first_step']:,} to {phase['last_step']:,}"
        peak = f"{phase['rates']['peak']:.3g}"
        rows.append(
            (
                phase["name"],
                phase["trains"],
                human_count(phase["trainable"]),
                steps,
                peak,
                loss_range,
                state,
            )
        )
    headers = ("phase", "trains", "parameters", "steps", "highest learning rate", "loss", "state")
    return f'<div class="card" style="margin-top:14px">{table(rows, headers)}</div>' if rows else ""


def _smoothed(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the exponential means, without the pull of the first; what is not finite is passed
    over.
    """
    total = 0.0
    weight = 0.0
    stays = 1 - min(0.5, 20 / len(points))
    means = list[tuple[float, float]]()
    for step, value in points:
        if math.isfinite(value):
            total = stays * total + value
            weight = stays * weight + 1.0
            means.append((step, total / weight))
    return means


def _curves(run: Run) -> str:
    marks = [(step, name) for name, step in run.phases] if len(run.phases) > 1 else []
    losses = by_step(run.trained, "loss")
    many = len(losses) >= MANY
    loss = [Series("training", losses, 0, "faint" if many else "line")]
    loss += [Series("training, smoothed", _smoothed(losses), 0)] if many else []
    loss.append(Series("evaluation", by_step(run.evaluated, "eval_loss"), 1, "dots"))
    figures = [chart("loss", loss, marks=marks)]
    quantities = (
        ("learning rate", "learning_rate", 4),
        ("tokens per second", "tokens_per_second", 3),
    )
    for title, key, colour in (*quantities, ("gradient norm", "grad_norm", 2)):
        figures.append(
            chart(
                title,
                [Series(title, by_step(run.trained, key), colour)],
                marks=marks,
                from_zero=True,
            )
        )
    figures += _more(run, marks)
    return f'<div class="grid2">{"".join(figures)}</div>'


KNOWN = re.compile(
    r"(step|bytes_|layers_|seconds_|tokens).*|epoch|loss|dead_steps|learning_rate|grad_norm|memory"
    r"|phase|stage|time|num_tokens|total_flos"
)


def _more(run: Run, marks: Sequence[tuple[float, str]]) -> Iterator[str]:
    """Yield curves of what an objective has measured, beside the evaluations' of the same name."""
    names = sorted({key for row in run.trained for key in row if not KNOWN.fullmatch(key)})
    for name in names:
        points = by_step(run.trained, name)
        evaluations = by_step(run.evaluated, f"eval_{name}")
        if points:
            yield chart(
                name,
                [Series("training", points, 6), Series("evaluation", evaluations, 1, "dots")],
                marks=marks,
            )


def _times(run: Run) -> str:
    sums: dict[str, float] = {}
    for _, _, parts in run.seconds:
        for name, value in parts.items():
            sums[name] = sums.get(name, 0.0) + value
    sums = {name: value for name, value in sums.items() if value}
    total = sum(sums.values())
    colours = {name: at for at, name in enumerate(TIMES) if name in sums}
    if not total:
        return '<p class="none">The lines of metrics have no seconds of steps.</p>'
    labels = {name: f"{value:.3g} s, {100 * value / total:.1f}%" for name, value in sums.items()}
    steps = sum(count for _, count, _ in run.seconds)
    note = (
        f"{steps:,} steps in {human_duration(total)}. Computing is the rest, with all that is "
        "not measured."
    )
    per_step = [
        (step, {name: value / count for name, value in parts.items()})
        for step, count, parts in run.seconds
    ]
    drawn = columns("seconds of a step", per_step, colours)
    summed = (
        f'<div class="card"><h3>all steps</h3>{bars(Bar(sums, colours), labels, note=note)}</div>'
    )
    return f'<div class="grid2">{summed}{drawn}</div>'


def _timeline(run: Run, trace: Path | None) -> str:
    file = trace or find_trace(run.directory)
    spans_and_tracks = None if file is None else read_step(file, inside=trace is None)
    if file is not None and spans_and_tracks is not None:
        name = escape(file.name)
        return (
            f'<div class="card">{timeline(*spans_and_tracks)}<p class="note">The step of '
            f"median length in {name}.</p></div>"
        )
    if not run.seconds:
        return '<p class="none">There is no trace and no line of metrics with seconds.</p>'
    parts = {name: value for name, value in _mean(run).items() if value}
    labels = {name: f"{value:.3g} s" for name, value in parts.items()}
    how = "This is the mean of the latest steps. lema train --trace FILE records a timeline."
    colours = {name: at for at, name in enumerate(TIMES)}
    return f'<div class="card">{bars(Bar(parts, colours), labels, note=how)}</div>'


def _mean(run: Run) -> dict[str, float]:
    recent = run.seconds[-10:]
    steps = sum(count for _, count, _ in recent)
    return {name: sum(parts[name] for _, _, parts in recent) / steps for name in recent[0][2]}


def _memory(run: Run) -> str:
    cards = []
    for memory in run.memories:
        ordered = dict(sorted(memory.parts.items(), key=lambda part: -part[1]))
        parts = {MEMORY_PARTS.get(name, name): float(size) for name, size in ordered.items()}
        labels = {name: human_bytes(size) for name, size in parts.items()}
        limit = f"The plan takes {human_bytes(memory.planned)}" + (
            f" of {human_bytes(memory.limit)}." if memory.limit else "."
        )
        if memory.name == "memory":
            limit += (
                " The device computes in host memory, so the measured memory is that of the "
                "whole process."
            )
        if (run.about.get("plan") or {}).get("activations") is False:
            limit += (
                " It does not include activations, because no limit required counting them "
                "before the run."
            )
        if memory.measured is not None and memory.measured > memory.planned:
            limit += (
                " More was measured than planned, because the plan leaves out what libraries "
                "allocate for themselves, and memory that was freed and not given back."
            )
        measured = None if memory.measured is None else float(memory.measured)
        mark = "" if measured is None else f"{human_bytes(measured)} measured at most"
        bar = Bar(parts, {name: at for at, name in enumerate(parts)}, measured)
        cards.append(
            f'<div class="card"><h3>{memory.name}</h3>{bars(bar, labels, mark=mark, note=limit)}</div>'
        )
    if points := by_step(run.trained, "memory"):
        curve = [Series("GB measured", [(step, value / 1e9) for step, value in points], 8)]
        cards.append(chart("memory in use after a step, GB", curve, from_zero=True))
    if not run.memories:
        cards.append('<p class="none">The run has no plan.json, so the plan is not known.</p>')
    return f'<div class="grid2">{"".join(cards)}</div>'


def _card(run: Run) -> str:
    """Return the tables of the model card, data and results; of a run without one its last line
    of metrics.
    """
    text = ""
    if (card := run.directory / "README.md").is_file():
        text = _text_of(card)
    parts = []
    for title in ("Results", "Data"):
        match = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        rows = re.findall(r"^\| ([^|\n]+) \| (.*) \|$", match[1], re.MULTILINE) if match else []
        if rows:
            parts.append(f'<div class="card"><h3>{title}</h3>{table(rows)}</div>')
    if not parts and run.summary:
        parts.append(
            f'<div class="card">{table((name, _text(value)) for name, value in run.summary.items())}</div>'
        )
    finished_phases = [row for row in run.rows if row.get("event") == "phase_end"]
    if not parts and finished_phases:
        cells = (
            (row.get("phase"), row.get("step"), _text(row.get("final_eval_loss")))
            for row in finished_phases
        )
        parts.append(
            f'<div class="card">{table(cells, ("phase", "ended after step", "loss on held-out rows"))}</div>'
        )
    none = '<p class="none">There is no model card. A run without phases writes one at its end.</p>'
    return f'<div class="grid2">{"".join(parts)}</div>' if parts else none


def _text_of(file: Path) -> str:
    """Return the beginning of a text of the run's directory."""
    return read_regular(file, inside=True).decode("utf-8", errors="replace")[:LONG]


def _certificates(run: Run) -> str:
    cards = []
    for file in run.certificates:
        name = escape(file.name)
        if file.suffix == ".json" and (certificate := read_json(file)):
            chips = "".join(_chips(certificate))
            tables = "".join(
                _rows(key, value) for key, value in certificate.items() if _is_table(value)
            )
            cards.append(
                f'<div class="card"><h3>{name}{chips}</h3>{tables}{table(_flat(certificate))}</div>'
            )
        else:
            text = escape(_text_of(file))
            cards.append(
                f'<details class="card"><summary>{name}</summary><pre>{text}</pre></details>'
            )
    none = (
        "The directory has no certificate. lema prove compares a run with transformers and "
        "PEFT, and writes one."
    )
    return "".join(cards) or f'<p class="none">{none}</p>'


def _chips(certificate: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a certificate says in a word."""
    words = {
        "holds": ("the promise holds", "the promise does not hold"),
        "bitwise": ("bitwise equal", "not bitwise"),
    }
    for name, (yes, no) in words.items():
        if isinstance(verdict := certificate.get(name), bool):
            yield (
                f'<span class="chip {"good" if verdict else "bad"}">{yes if verdict else no}</span>'
            )


def _rows(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a list of objects as a table, a column for each of their names."""
    names = list({key: None for row in rows[:200] for key in row})
    cells = ([_text(row.get(key)) for key in names] for row in rows[:200])
    return f"<h3>{escape(name)}</h3>{table(cells, [column.replace('_', ' ') for column in names])}"


def _flat(
    content: Mapping[str, Any], before: str = "", depth: int = 0
) -> Iterator[tuple[str, str]]:
    """Yield the numbers and texts of nested objects, each by its way there; lists of objects are
    tables elsewhere.
    """
    for key, value in content.items():
        name = f"{before}{key}".replace("_", " ")
        if isinstance(value, Mapping) and depth < 4:
            yield from _flat(value, f"{name}: ", depth + 1)
        elif not _is_table(value):
            yield name, _size(name, value)


def _is_table(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)
    )


def _size(key: str, value: Any) -> str:
    counts = isinstance(value, int) and not isinstance(value, bool)
    return human_bytes(value) if counts and re.search(r"bytes|memory|peak", key) else _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list) and all(isinstance(entry, int | float | str) for entry in value):
        return ", ".join(map(_text, value[:50])) + (
            f" and {len(value) - 50} more" if len(value) > 50 else ""
        )
    return value if isinstance(value, str) else json.dumps(value)[:LONG]


def _settings_table(run: Run, settings: Mapping[str, Any]) -> str:
    if not settings:
        return '<p class="none">The settings of the run are not known.</p>'
    rows = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in sorted(settings.items())
    }
    given_names = {str(name): True for name in run.about.get("given") or ()}
    chosen = [(name, value) for name, value in rows.items() if name in given_names]
    every = (
        f"<details><summary>all {len(rows)} "
        f"settings</summary>{table(rows.items(), marked=given_names)}</details>"
    )
    if not chosen:
        return (
            '<div class="card"><p class="note">It is not known which of them were '
            f"given.</p>{every}</div>"
        )
    note = (
        f"The {len(chosen)} that were given are marked; the others have their defaults, or the "
        "plan chose them."
    )
    note = f'<p class="note">{note}</p>'
    return f'<div class="card">{table(chosen, marked=given_names)}{note}{every}</div>'


def _environment(run: Run) -> Iterator[tuple[str, str]]:
    versions = run.about.get("versions") or {}
    for checkpoint in reversed(run.checkpoints):
        saved_versions = read_json(checkpoint / "state.json").get("versions")
        versions = versions or (saved_versions if isinstance(saved_versions, Mapping) else {})
    yield from ((str(name), str(version)) for name, version in versions.items())
    plan = run.about.get("plan") or {}
    if name := _machine(run):
        yield "machine", name
    machine = plan["machine"] if isinstance(plan.get("machine"), Mapping) else plan
    for key in ("device_memory", "host_memory"):
        if isinstance(size := machine.get(key), int) and size:
            yield key.replace("_", " "), human_bytes(size)
    for key, unit in (("disk", "B/s"), ("link", "B/s")):
        speed = (
            (machine.get("speeds") or {}).get(key)
            if isinstance(machine.get("speeds"), Mapping)
            else None
        )
        if isinstance(speed, int | float) and speed > 1:
            yield key, f"{human_count(speed)}{unit}"
    yield "directory", str(run.directory)
    if run.checkpoints:
        yield (
            "checkpoints",
            ", ".join(str(checkpoint.relative_to(run.directory)) for checkpoint in run.checkpoints),
        )
