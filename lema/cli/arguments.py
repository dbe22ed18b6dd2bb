"""The arguments that several commands share, and how they become settings and models."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from lema.cli.kernels import allow_kernels
from lema.errors import ConfigError

if TYPE_CHECKING:
    from lema.config import LemaConfig
    from lema.train.phases.file import PhaseFile

__all__ = ["ConfigFile", "PhaseNamed", "Revision", "Settings", "Source", "Trust", "Verb", "Verbs"]
__all__ += ["check_written", "config_of", "phase_file_of", "phase_of", "settings_of"]


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of settings.")]

Source = Annotated[
    Path,
    typer.Argument(metavar="CONFIG|ADAPTER_DIR", help="YAML file or directory of a saved adapter."),
]

Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Override one setting of the file; the same as --KEY VALUE.",
    ),
]

PhaseNamed = Annotated[
    str | None,
    typer.Option(
        "--phase", metavar="NAME", help="The phase to use, by name or number. Default: the last."
    ),
]

# No setting: a file must not decide what code is run.
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run the model's own code, from a directory or from a commit of a hub id.",
    ),
]

Revision = Annotated[
    str | None, typer.Option(metavar="COMMIT", help="Branch, tag or commit of a hub id.")
]


LARGEST_NUMBER = 2**32 - 1  # of an option: seeds are as large; counts and measures are smaller


USAGE: Any = typer.BadParameter.__base__  # typer's error of wrong use, which it does not export
MOST_REPEATED = 500  # characters of what was given


def _shorten(error: Any) -> None:
    """Let an error of wrong use repeat less of what was given."""
    error.message = error.message[:MOST_REPEATED]


class Verbs(TyperGroup):
    """Commands by name; one that is none is not repeated whole."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first word names, and the other words."""
        try:
            return super().resolve_command(ctx, args)
        except USAGE as error:
            _shorten(error)
            raise


class Verb(TyperCommand):
    """A command; where it takes settings, `--KEY VALUE` and `--KEY=VALUE` stand for `--set
    KEY=VALUE`.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments; options of the command's own go before settings of the same name.
        `ConfigError`: a number is none, or larger than any that means something."""
        try:
            left = super().parse_args(ctx, self._with_settings(ctx, args))
        except USAGE as error:  # any wrong use, which repeats what was given
            _shorten(error)
            raise
        for name, value in ctx.params.items():
            if type(value) in (int, float) and not abs(value) <= LARGEST_NUMBER:  # NaN, too
                what = (
                    f"{str(value)[:40]} is not a number between {-LARGEST_NUMBER:,} and "
                    f"{LARGEST_NUMBER:,}"
                )
                raise ConfigError(
                    what, where=f"--{name.replace('_', '-')}", how="give a smaller number"
                )
        return left

    def _with_settings(self, ctx: "typer.Context", args: list[str]) -> list[str]:
        options = {
            *ctx.help_option_names,
            *(option for parameter in self.params for option in parameter.opts),
        }
        if "--set" not in options or not any(
            argument.startswith("--") and argument.partition("=")[0] not in options
            for argument in args
        ):
            return args
        from lema.config import LemaConfig

        defaults = LemaConfig.defaults()
        rewritten = list[str]()
        remaining = iter(args)
        for argument in remaining:
            name, equals, value = argument.partition("=")
            key = name.removeprefix("--").replace("-", "_")
            if not name.startswith("--") or name in options or key not in defaults:
                rewritten.append(argument)
            else:
                rewritten += ["--set", f"{key}={value if equals else next(remaining, '')}"]
        return rewritten


def check_written(
    option: str,
    target: Path | None,
    config: "LemaConfig",
    *reads: Path | None,
    begins: Iterable[bytes] = (b"",),
) -> None:
    """Make sure that the file which an option names to be written is no link and no device, and
    neither is nor lies in anything that the command reads: `reads`, or what the settings name.
    `begins`: how a file begins that it may replace; any may be, unless given. `ConfigError` says
    what it is."""
    if target is None:
        return
    from lema.errors import named_in
    from lema.storage.regular import check_kind, check_separate, check_target
    from lema.train.inputs import inputs_of

    with named_in(option):
        check_target(target)
        check_separate(target, [*(path for path in reads if path is not None), *inputs_of(config)])
        check_kind(target, *begins)


def settings_of(assignments: list[str] | None) -> dict[str, Any]:
    """Return what `--set` gives, or raise a ConfigError: it is not KEY=VALUE."""
    from lema.config.yaml import parse_value

    pairs = {}
    for item in assignments or []:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                "a setting is given as KEY=VALUE", where=f"--set {item}", how="--set lora_rank=8"
            )
        if len(parts := re.split(r"[.\[]", key.strip(), maxsplit=1)) > 1:
            what = "--set replaces a whole setting, and this names a part of one"
            how = (
                f"change it in the file, or give all of {parts[0]}: --set '{parts[0]}=[...]', "
                f"or {{...}}, as in YAML"
            )
            raise ConfigError(what, where=f"--set {item}", how=how)
        pairs[key.strip()] = parse_value(text, f"--set {item}")
    allow_kernels(pairs.get("attn_implementation"))
    return pairs


def config_of(path: Path, settings: list[str] | None) -> "LemaConfig":
    """Return the settings of a file, those of `--set` in place of its own; a ConfigError says
    where each was given.
    """
    from lema.config import LemaConfig
    from lema.config.problems import SettingsError

    overrides = settings_of(settings)
    try:
        config = LemaConfig.from_yaml(path, **overrides)
    except SettingsError as error:
        raise error.located({key: f"--set {key}" for key in overrides}) from error
    allow_kernels(config.attn_implementation)
    return config


def phase_file_of(path: Path, settings: list[str] | None) -> "PhaseFile":
    """Return a file of phases, its settings replaced by those of `--set`; a ConfigError says
    where each was given.
    """
    from lema.train.phases.file import read_phase_file

    file = read_phase_file(path, **settings_of(settings))
    allow_kernels(file.config.attn_implementation)
    return file


def phase_of(
    source: Path, settings: list[str] | None, phase: str | None
) -> "tuple[PhaseFile, int] | None":
    """Return a file of phases and the place of the one that is meant, the last if none is; None:
    it is no such file.
    """
    from lema.train.phases.file import has_phases, phase_named

    if not source.is_dir() and has_phases(source):
        file = phase_file_of(source, settings)
        return file, phase_named(file.plan, phase)
    if phase is not None:
        how = "leave it out, or name the file of phases"
        raise ConfigError("only a file of phases has any", where=f"--phase {phase}", how=how)
    return None
