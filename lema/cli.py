"""The `lema` command: each verb reads its arguments and calls the library; errors become exit codes."""

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from lema.arguments import (
    ConfigFile,
    Revision,
    Settings,
    Source,
    Trust,
    config_of,
    evaluation_rows,
    model_of,
    settings_of,
)
from lema.errors import BackendUnavailable, ConfigError
from lema.exits import run
from lema.quiet import hush

__all__ = ["app", "main", "run"]

_EPILOG = (
    "Exit codes: 0 done, 2 config, 3 data, 4 memory, 5 non-finite, 6 disk, 75 stopped with a checkpoint, 130 Ctrl-C."
)

app = typer.Typer(
    name="lema",
    help="Fine-tune language models larger than the device's memory.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
config_app = typer.Typer(
    help="Show the settings of a run, or of all runs.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(config_app, name="config")


def main() -> NoReturn:
    """Run the command line and leave the process with its exit code."""
    hush()  # `peft` and `transformers` import what they find installed
    sys.exit(run(app, sys.argv[1:]))


def _print_version(wanted: bool) -> None:
    if wanted:
        import lema

        typer.echo(f"lema {lema.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Fine-tune language models larger than the device's memory."""


@app.command()
def demo(
    directory: Annotated[Path, typer.Argument(help="Where to put the model, data and adapter.")] = Path("lema-demo"),
) -> None:
    """Make a small model, fine-tune it by streaming, and check the adapter; no network, no GPU."""
    from lema.demo import run_demo

    run_demo(directory)


@app.command()
def train(
    config: ConfigFile,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest valid checkpoint.")] = False,
    settings: Settings = None,
    trust_remote_code: Trust = False,
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write what was read, uploaded and computed when, for ui.perfetto.dev."),
    ] = None,
) -> None:
    """Fine-tune as a YAML file says; one with `phases` goes through them in order."""
    from lema.phasefile import has_phases

    if has_phases(config):
        if trace is not None or trust_remote_code:
            raise ConfigError(
                "a file of phases is run without a trace, and without code of the model's own",
                where="--trace" if trace is not None else "--trust-remote-code",
                how="leave it out, or train one phase by a file of its own",
            )
        _train_phases(config, settings, resume=resume)
        return
    checked = config_of(config, settings)
    from lema.progress import ProgressDisplay, progress_callback
    from lema.trace import tracing
    from lema.train import train as train_model

    with contextlib.closing(ProgressDisplay()) as display, tracing(trace) as recorded:
        train_model(
            checked,
            resume=resume,
            callbacks=[progress_callback(display)],
            trust_remote_code=trust_remote_code,
            trace=recorded,
        )


def _train_phases(config: Path, settings: list[str] | None, *, resume: bool) -> None:
    from lema.phasefile import read_phase_file

    file = read_phase_file(config, **settings_of(settings))
    from lema.train import train_phases

    train_phases(file, resume=resume)


@app.command()
def plan(
    config: ConfigFile,
    profile: Annotated[
        str | None, typer.Option(help="A machine to plan for (t4, 4090, h200, trn1, cpu); else this one is measured.")
    ] = None,
    price: Annotated[float | None, typer.Option(min=0.0, help="Of an hour, to price an epoch.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw step time against tokens per step.")] = None,
    settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:
    """Tell memory, time and what limits a run, before it starts; no weights are read."""
    checked = config_of(config, settings)
    from lema.plan.machine import profile as find_profile

    machine = None if profile is None else find_profile(profile)
    from rich.console import Console

    from lema.plan.outlook import make_plan
    from lema.plan.picture import draw
    from lema.plan.show import show

    made, planner = make_plan(checked, machine, price=price, trust_remote_code=trust_remote_code)
    if as_json:
        typer.echo(json.dumps(made.to_dict(), indent=2))
    else:
        show(made, Console(highlight=False))
    if plot is not None:
        draw(made, planner, plot)


@app.command(name="eval")
def evaluate(
    source: Source,
    data: Annotated[list[str] | None, typer.Option(metavar="FILE", help="Data to use instead of the config's.")] = None,
    settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:
    """Measure loss and perplexity of a trained adapter."""
    model = model_of(source, settings, trust_remote_code)
    with contextlib.closing(model):
        rows = evaluation_rows(model, data)
        measured = model.get_trainer().evaluate(rows)
        if model.backend.replicas.rank == 0:
            for name, value in measured.items():
                typer.echo(f"{name} {value:.6g}")


@app.command()
def prepare(
    model: Annotated[str, typer.Argument(help="Model directory or hub id.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="A directory, or one .safetensors file.", show_default=False)],
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16 or float16; the checkpoint's by default.")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(metavar="int8|fp8|nf4", help="Store the layers' linear weights quantised.", show_default=False),
    ] = None,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """Rewrite a model as one file in the order in which layers are visited."""
    from lema.config import LemaConfig

    checked = LemaConfig(model, dtype=dtype, revision=revision)
    from lema.hub import own_weights, resolve_model
    from lema.prepare import prepare as prepare_model
    from lema.progress import ByteProgress

    directory = resolve_model(model, revision=revision, trust_remote_code=trust_remote_code)
    with contextlib.closing(ByteProgress()) as display:
        weights, dtype = own_weights(model, directory), checked.dtype
        prepared = prepare_model(
            weights, out, dtype, quantize=quantize, trust_remote_code=trust_remote_code, progress=display
        )
    for note in prepared.notes():
        typer.echo(note)
    if prepared.precision:
        from rich.console import Console

        from lema.quantize import show

        show(prepared.precision, Console(highlight=False))
    typer.echo(f"wrote {out}: {display.summary()}")


@app.command()
def generate(
    source: Source,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Text to go on from; may be repeated.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sample among the likeliest, up to this mass.")] = 1.0,
    settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:
    """Continue prompts with base model and adapter, streaming."""
    model = model_of(source, settings, trust_remote_code)
    # transformers warns of a temperature given where nothing is sampled.
    sampling: dict[str, Any] = {"temperature": temperature, "top_p": top_p} if temperature > 0 else {}
    with contextlib.closing(model):
        for text in model.generate(prompt, max_new_tokens=max_new_tokens, do_sample=temperature > 0, **sampling):
            typer.echo(text)


@app.command()
def merge(
    adapter: Annotated[Path, typer.Argument(help="Directory of a saved adapter.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Directory for the merged model.", show_default=False)],
    max_shard_size: Annotated[str, typer.Option(help="Largest file, e.g. 5GB.")] = "5GB",
    trust_remote_code: Trust = False,
) -> None:
    """Write the model with the adapter merged into its weights, in the hub's format."""
    from lema.config import parse_memory

    size = parse_memory(max_shard_size, 0)
    from lema.merge import merge_adapter

    merge_adapter(adapter, out, max_shard_size=size, trust_remote_code=trust_remote_code)
    typer.echo(f"wrote {out}")


@app.command()
def models(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="TYPE|MODEL", help="Types, or directories and cached hub ids.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the page docs/models.md.")] = False,
    revision: Revision = None,
    trust_remote_code: Trust = False,
) -> None:
    """List the types of models: which stream, what adapters train in them, and why one does not stream."""
    from rich.console import Console

    from lema.modeltable import json_text, markdown, show, survey_all

    rows = survey_all(names or [], revision=revision, trust_remote_code=trust_remote_code)
    if as_json or as_markdown:
        typer.echo((json_text if as_json else markdown)(rows), nl=as_json)
    else:
        show(rows, Console(highlight=False))


@app.command()
def backends() -> None:
    """List the devices lema can run on, and why one cannot run here."""
    from lema.backend import available

    known = list(available())
    if not known:
        raise BackendUnavailable("no backend is installed", how="pip install lema brings one for the CPU")
    for backend in known:
        typer.echo(f"{backend.name}  {'ok' if backend.ok else 'unavailable: ' + str(backend.reason)}")


@app.command()
def doctor(
    directory: Annotated[
        Path,
        typer.Option(metavar="DIR", exists=True, file_okay=False, help="Whose disk is measured; nothing stays there."),
    ] = Path(),
    quick: Annotated[bool, typer.Option("--quick", help="Leave out what takes seconds: timing disk and link.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Tell whether this machine is ready: versions, limits, devices, link, disk, and how to mend what is not."""
    from rich.console import Console

    from lema.doctor import examine
    from lema.doctor import show as show_report

    waiting = Console(stderr=True)
    with waiting.status("looking") if waiting.is_terminal else contextlib.nullcontext():
        report = examine(directory, measure=not quick)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=2))
    else:
        show_report(report, Console(highlight=False))
    raise typer.Exit(report.exit_code)


@config_app.command()
def show(config: ConfigFile, settings: Settings = None) -> None:
    """Print every setting of a run as YAML, defaults included."""
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment] # its annotation is narrower than its use
    yaml.dump(config_of(config, settings).to_dict(), sys.stdout)


@config_app.command()
def schema() -> None:
    """Print the JSON schema of all settings, from which editors complete YAML."""
    from lema.config import LemaConfig

    typer.echo(json.dumps(LemaConfig.json_schema(), indent=2))
