"""`lema serve-learner`: a server with the Tinker API, by which reinforcement learning code trains a
model that fits in nobody's memory.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lema.cli.arguments import Settings, Trust, settings_of
from lema.errors import ConfigError
from lema.storage.regular import check_separate

if TYPE_CHECKING:
    from lema_tools.learner.sampling import ServedSampler
    from lema_tools.learner.service import Limits, Service

__all__ = ["serve_learner"]

LOOPBACK = "127.0.0.1"
MEGABYTE = 1_000_000


def serve_learner(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Model directory or hub id.")],
    directory: Annotated[
        Path,
        typer.Option(
            "--directory",
            metavar="DIR",
            help="Where adapters, checkpoints and the secret are kept.",
        ),
    ] = Path("learner"),
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen. Others than loopback are told.")
    ] = LOOPBACK,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Secrets of clients. Default: DIR/token, made with one."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="What clients call the model. Default: MODEL."),
    ] = None,
    sampler: Annotated[
        str | None,
        typer.Option(metavar="URL", help="vLLM that samples. Default: the model itself."),
    ] = None,
    adapters: Annotated[
        int, typer.Option(min=1, max=1024, help="Adapters on the device at once.")
    ] = 4,
    max_rank: Annotated[
        int, typer.Option(min=1, max=4096, help="Rank of an adapter, at most.")
    ] = 64,
    no_head: Annotated[
        bool, typer.Option("--no-head", help="Adapters leave the head out, also where clients ask.")
    ] = False,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of a row, at most.")] = 4096,
    micro_batch_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens that are computed at once; a row is not divided.")
    ] = 4096,
    pass_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of a pass over the layers, at most.")
    ] = 524_288,
    waiting: Annotated[
        int, typer.Option(min=1, help="Requests of an adapter that may wait.")
    ] = 256,
    max_request: Annotated[int, typer.Option(min=1, help="Megabytes of a request, at most.")] = 64,
    check: Annotated[
        bool, typer.Option("--check", help="Open all that is served, say so, and end.")
    ] = False,
    settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:
    """Serve the Tinker API: clients train adapters of one model, whose layers stream.

    Requests that wait go through the layers in one pass, whichever adapters they are of.
    """
    try:
        from lema_tools.learner.app import application
        from lema_tools.learner.listening import bound, listen
    except ImportError as error:
        raise ConfigError(
            f"a library of this command is missing: {error.name}",
            how='pip install "lema-lora[learner]"',
        ) from error
    from lema_tools.learner.access import Tokens
    from lema_tools.learner.service import Limits

    if sampler is not None and not sampler.startswith(("http://", "https://")):
        raise ConfigError("this is no URL of a server", where="--sampler", how="http://HOST:PORT")
    check_separate(directory, [Path(model)])
    listening = None if check else bound(host, port)
    file = token_file or directory / "token"
    tokens = Tokens.of(file)
    service = _service(
        model,
        directory,
        name=name or model,
        server=_sampler(sampler),
        adapters=adapters,
        limits=Limits(rank=max_rank, head=not no_head),
        max_length=max_length,
        micro_batch_tokens=micro_batch_tokens,
        pass_tokens=pass_tokens,
        most_waiting=waiting,
        trust_remote_code=trust_remote_code,
        settings=settings_of(settings),
    )
    try:
        if listening is None:
            typer.echo(f"{service.name} can be served; the secret is in {file}", err=True)
            if (budget := service.learner.budget) is not None:
                typer.echo(budget.summary(service.learner.opened), err=True)
            return
        where = f"http://{host}:{listening.getsockname()[1]}"
        typer.echo(f"{where} serves {service.name}; the secret is in {file}", err=True)
        if host not in (LOOPBACK, "::1", "localhost"):
            typer.echo(
                "whoever reaches this address can try secrets, and what is sent can be read on the "
                "way: put a proxy with TLS before it (docs/learner.md)",
                err=True,
            )
        listen(application(service, tokens, most_bytes=max_request * MEGABYTE), listening)
    finally:
        service.learner.close()


def _sampler(url: str | None) -> "ServedSampler | None":
    from lema_tools.learner.sampling import ServedSampler

    return None if url is None else ServedSampler.at(url)


def _service(
    model: str,
    directory: Path,
    *,
    name: str,
    server: "ServedSampler | None",
    adapters: int,
    limits: "Limits",
    max_length: int,
    micro_batch_tokens: int,
    pass_tokens: int,
    most_waiting: int,
    trust_remote_code: bool,
    settings: dict[str, Any],
) -> "Service":
    """Return the server's work, with the model open."""
    from lema.train.learner.learner import Learner
    from lema_tools.learner.service import Service
    from lema_tools.learner.store import Store

    store = Store(directory)
    learner = Learner.open(
        model,
        micro_batch_tokens=micro_batch_tokens,
        longest=max_length,
        reserve=(adapters, limits.rank),
        trust_remote_code=trust_remote_code,
        **({} if server is None else {"lora_serving": "vllm"}) | settings,
    )
    return Service(
        name,
        learner,
        store,
        limits,
        pass_tokens=pass_tokens,
        most_waiting=most_waiting,
        server=server,
    )
