"""`lema generate`: continues prompts with a trained model, and writes what it makes as batches
end.
"""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lema.cli.arguments import PhaseNamed, Settings, Source, Trust, check_written
from lema.errors import ConfigError
from lema_tools.generation.compared import Base, check_compared
from lema_tools.generation.images import check_shown, in_place, with_images
from lema_tools.generation.merged import Merged, check_merged, merged_model
from lema_tools.generation.results import ResultWriter, saved_results
from lema_tools.generation.sampling import (
    DoSample,
    Keys,
    MinP,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TopK,
    TopP,
    check_keys_values,
    sampling,
)
from lema_tools.loading import model_of, outcome_of

if TYPE_CHECKING:
    from lema.data.files import Row
    from lema.data.row_forms import PromptForm
    from lema.train.model import LemaModel

__all__ = ["generate"]

DESCRIBED: dict[str, tuple[str, str]] = {
    "chat": ("prompts are messages of a chat", "; --raw continues them as they are"),
    "alpaca": ("prompts are instructions", "; --raw continues them as they are"),
    "text": ("prompts are continued as they are", "; --chat writes them as messages"),
}


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
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help=(
                "Image before the text of every --prompt, for models that see images; may be "
                "repeated. Rows of --prompts name their own."
            ),
        ),
    ] = None,
    video: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Video before the text of every --prompt, as --image."),
    ] = None,
    audio: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Sound before the text of every --prompt, for models that hear, as --image.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the results, one JSON object per line."),
    ] = None,
    base: Base = False,
    merged: Merged = None,
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
    do_sample: DoSample = False,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Write texts as messages of the user, whatever the training read."
        ),
    ] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue texts as they are, without a chat template.")
    ] = False,
    kv: Keys = "device",
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
    if chat and raw:
        raise ConfigError(
            "a text is written as a message, or as it is", where="--chat, --raw", how="give one"
        )
    shown = {"images": image, "videos": video, "audios": audio}
    check_shown(shown, may_be=prompts is None and not raw)
    check_merged(base, merged)
    check_keys_values(kv)
    options = sampling(
        do_sample=do_sample,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        stop=stop,
    )
    from lema.config.acting import OF_TRAINING
    from lema.data.files import Row
    from lema.data.prompts import has_images, read_prompts

    columns = {name: [in_place(path) for path in paths] for name, paths in shown.items() if paths}
    rows = [
        Row({"prompt": text, **columns}, "--prompt", number)
        for number, text in enumerate(prompt or [], 1)
    ]
    rows = rows or read_prompts(prompts or Path("-"))
    if any(map(has_images, rows)):
        settings = with_images(settings)
    results = saved_results(output, rows, resume=resume, compares=base)
    if merged is not None:
        source = merged_model(source, merged, settings, trust_remote_code)
    outcome = outcome_of(source, settings, phase)
    model = model_of(source, settings, trust_remote_code, outcome, unread=OF_TRAINING)
    with contextlib.closing(model):
        if base:
            check_compared(model)
        check_written("--output", output, model.config, source, prompts)
        bare = prompts is None and output is None
        writer = ResultWriter(model, rows, results, output, bare=bare, compares=base)
        form = _form(model, rows, True if chat else False if raw else None)
        writer.run(options, form=form, new=max_new_tokens, batch_size=batch_size, kv=kv, seed=seed)


def _form(model: "LemaModel", rows: list["Row"], chat: bool | None) -> "PromptForm":
    """Return how texts are written, and say it where the user has not chosen it."""
    from lema.data.prompts import has_images, written
    from lema.train.inference.prompt_form import choose_form

    prompts = [values.get("messages", values.get("prompt")) for values in map(written, rows)]
    if chat is None and all(isinstance(prompt, list) for prompt in prompts):
        return "chat"
    if chat is None and all(map(has_images, rows)):
        return "chat"
    chosen = choose_form(model.files, model.config, chat)
    if chosen.reason and model.backend.replicas.first:
        how, other = DESCRIBED[chosen.form]
        typer.echo(f"{how}, because {chosen.reason}{other}", err=True)
    return chosen.form
