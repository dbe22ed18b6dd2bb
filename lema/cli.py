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
    start: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="PATH", help="Of phases: go on from this checkpoint, or begin adapters on this model."
        ),
    ] = None,
) -> None:
    """Fine-tune as a YAML file says; one with `phases` goes through them in order."""
    from lema.phasefile import has_phases, read_phase_file

    if phased := has_phases(config):
        file = read_phase_file(config, **settings_of(settings))
    elif start is not None:
        raise ConfigError(
            "only a file of phases begins from a checkpoint elsewhere",
            where=f"--from {start}",
            how="use --resume for the newest checkpoint in output_dir",
        )
    else:
        checked = config_of(config, settings)
    from rich.console import Console

    from lema.progress import ProgressDisplay, progress_callback
    from lema.trace import tracing

    console = Console(highlight=False)  # one for both: a bar makes room for the lines
    with contextlib.closing(ProgressDisplay(console)) as display, tracing(trace) as recorded:
        shared: dict[str, Any] = {
            "resume": resume,
            "callbacks": [progress_callback(display)],
            "console": console,
            "trust_remote_code": trust_remote_code,
            "trace": recorded,
        }
        if phased:
            from lema.trainphases import train_phases

            train_phases(file, start=start, **shared)
        else:
            from lema.train import train as train_model

            train_model(checked, **shared)


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
    """Tell memory, time and what limits a run, before it starts; no weights are read. Of phases, tell each."""
    from lema.phasefile import has_phases, read_phase_file

    if phased := has_phases(config):
        if plot is not None:
            raise ConfigError("phases have no picture", where="--plot", how="leave it out")
        file = read_phase_file(config, **settings_of(settings))
    else:
        checked = config_of(config, settings)
    from lema.plan.machine import profile as find_profile

    machine = None if profile is None else find_profile(profile)
    from rich.console import Console

    if phased:
        from lema.phasereport import phase_report
        from lema.phasetable import show_report

        report = phase_report(
            file.config, file.plan, machine=machine, measure=True, price=price, trust_remote_code=trust_remote_code
        )
        if as_json:
            typer.echo(json.dumps(report.to_dict(), indent=2))
        else:
            show_report(report, Console(highlight=False))
        return

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
        if model.backend.replicas.first:
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
    adapter: Annotated[Path, typer.Argument(help="Directory of a saved adapter, or of a delta.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Directory for the merged model.", show_default=False)],
    max_shard_size: Annotated[str, typer.Option(help="Largest file, e.g. 5GB.")] = "5GB",
    rounding: Annotated[
        str, typer.Option(metavar="nearest|stochastic", help="Of an adapter's sums; stochastic keeps small changes.")
    ] = "nearest",
    seed: Annotated[int, typer.Option(min=0, help="Of stochastic rounding.")] = 0,
    base: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where a delta's base is now.", show_default=False)
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Write the model with an adapter merged into its weights, or with a delta's tensors, in the hub's format."""
    from lema.config import parse_memory

    size = parse_memory(max_shard_size, 0)
    from lema.delta import apply_delta, is_delta

    if is_delta(adapter):
        if rounding != "nearest":
            raise ConfigError("a delta holds weights as they are", where="--rounding", how="leave it out")
        apply_delta(adapter, out, base, size, trust_remote_code=trust_remote_code)
    else:
        if base is not None:
            raise ConfigError(
                "an adapter names its base itself",
                where="--base",
                how="leave it out, or change model_name_or_path in its lema_config.json",
            )
        from lema.merge import merge_adapter

        merge_adapter(
            adapter,
            out,
            max_shard_size=size,
            rounding=rounding,  # type: ignore[arg-type] # checked there
            seed=seed,
            trust_remote_code=trust_remote_code,
        )
    typer.echo(f"wrote {out}")


@app.command()
def consolidate(
    shards: Annotated[
        Path, typer.Argument(metavar="IN", help="Directory of a sharded adapter, or above it.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Directory for the adapter in PEFT's format.", show_default=False)],
    kv_layout: Annotated[
        str | None,
        typer.Option(
            metavar="tile|interleave", help="How replicas of keys lie, if the shards do not say.", show_default=False
        ),
    ] = None,
    take_first: Annotated[
        bool, typer.Option("--take-first", help="Where replicas differ, take the first rank's; it is told where.")
    ] = False,
) -> None:
    """Put the shards of an adapter together, as files that PEFT loads."""
    from lema.consolidate import consolidate_adapter

    made = consolidate_adapter(shards, out, kv_layout=kv_layout, check=not take_first)
    for name, found in made.differing.items():
        typer.echo(f"replicas differ in {name}: {'; '.join(map(str, found))}", err=True)
    typer.echo(f"wrote {out}: {made.num_tensors} tensors, of {made.tp} ranks")


@app.command()
def shard(
    adapter: Annotated[
        Path, typer.Argument(metavar="IN", help="Directory of an adapter in PEFT's format.", show_default=False)
    ],
    out: Annotated[Path, typer.Argument(help="Directory for the shards.", show_default=False)],
    tp: Annotated[int, typer.Option(min=1, help="Ranks of the tensor-parallel group.", show_default=False)],
    kv_layout: Annotated[
        str, typer.Option(metavar="tile|interleave", help="How keys lie that are replicated for want of heads.")
    ] = "tile",
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The base model; by default the one the adapter names.")
    ] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Cut an adapter up for a tensor-parallel group, along the plan of its base model."""
    from lema.consolidate import shard_adapter

    shard_adapter(adapter, out, tp, kv_layout=kv_layout, model=model, trust_remote_code=trust_remote_code)
    typer.echo(f"wrote {out}: {tp} ranks")


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
