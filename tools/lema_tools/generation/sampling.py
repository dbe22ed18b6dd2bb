"""The options of sampling that `lema generate` and `lema chat` share."""

from typing import Annotated, Any

import typer

from lema.errors import ConfigError

__all__ = [
    "DoSample",
    "Keys",
    "MinP",
    "RepetitionPenalty",
    "Seed",
    "Stop",
    "Temperature",
    "TopK",
    "TopP",
    "check_keys_values",
    "sampling",
]

COLDEST = 1e-4
HOTTEST = 1e4  # divisors of logits, of which none overflows in bfloat16

DoSample = Annotated[
    bool,
    typer.Option(
        "--do-sample",
        help="Sample tokens instead of taking the most likely one; --temperature implies it.",
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=HOTTEST, help="Temperature of sampling; 0 takes the most likely token."
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=1.0, help="Sample from the most likely tokens up to this probability mass."
    ),
]
TopK = Annotated[
    int | None, typer.Option(min=1, help="Sample from this many of the most likely tokens.")
]
MinP = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Sample from tokens with this fraction of the highest probability.",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(min=COLDEST, max=HOTTEST, help="Above 1: repeat tokens less often."),
]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Seed of sampling. Default: the seed of the settings.")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Stop before this text; may be repeated."),
]
Keys = Annotated[str, typer.Option(metavar="device|host", help="Where keys and values are kept.")]


def check_keys_values(kv: str) -> None:
    """Refuse, with `ConfigError`, a place for keys and values that is none."""
    if kv not in ("device", "host"):
        raise ConfigError(
            f"{kv!r} is not a place for keys and values", where="--kv", how="use device or host"
        )


def sampling(
    *,
    do_sample: bool,
    temperature: float | None,
    repetition_penalty: float | None,
    stop: list[str] | None,
    **options: float | None,
) -> dict[str, Any]:
    """Return the settings of sampling as `transformers` names them; a ConfigError: with them
    nothing would be drawn.
    """
    others: dict[str, Any] = {}
    if repetition_penalty is not None:
        others["repetition_penalty"] = repetition_penalty
    if stop:
        others["stop_strings"] = stop
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
        return {"do_sample": False, **others}
    return {
        "do_sample": True,
        **({} if temperature is None else {"temperature": temperature}),
        **chosen,
        **others,
    }
