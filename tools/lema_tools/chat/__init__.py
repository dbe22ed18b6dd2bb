"""`lema chat`: talks with a model in a terminal, or answers the lines of a pipe."""

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lema.cli.arguments import PhaseNamed, Settings, Trust
from lema.errors import ConfigError
from lema_tools.generation.compared import Base, check_compared
from lema_tools.generation.merged import Merged, check_merged, merged_model
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
    from lema.train.model import LemaModel
    from lema_tools.chat.answers import Answers

__all__ = ["chat"]


def chat(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="ADAPTER_DIR|CONFIG|MODEL",
            help="Directory of a run or adapter, YAML file, model directory or hub id.",
        ),
    ],
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System message that every chat begins with.")
    ] = None,
    base: Base = False,
    merged: Merged = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of an answer at most. Default: 512, or half of the model's positions.",
        ),
    ] = None,
    do_sample: DoSample = False,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    kv: Keys = "device",
    phase: PhaseNamed = None,
    settings: Settings = None,
    trust_remote_code: Trust = False,
) -> None:
    """Chat with a model: each line is a message, and the answer is shown as it is made. /help lists
    what else a line may be. Lines of a pipe are answered one after the other."""
    check_keys_values(kv)
    check_merged(base, merged)
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

    if merged is not None:
        source = merged_model(source, merged, settings, trust_remote_code)
    directory = source

    def opened(chosen: list[str] | None) -> "Answers":
        outcome = outcome_of(directory, chosen, phase)
        model = model_of(directory, chosen, trust_remote_code, outcome, unread=OF_TRAINING)
        with contextlib.ExitStack() as failing:
            failing.callback(model.close)
            if base:
                check_compared(model)
            _check(model)
            from lema_tools.chat.answers import Answers

            answers = Answers(
                model,
                options,
                max_new_tokens=max_new_tokens,
                keys_values=kv,
                seed=model.config.seed if seed is None else seed,
            )
            failing.pop_all()
        return answers

    from lema_tools.chat.conversation import Conversation
    from lema_tools.chat.model import ChatModel
    from lema_tools.chat.session import Session

    with contextlib.closing(ChatModel(opened, settings)) as model:
        if system is not None:
            model.answers.check_system(system, "--system")
        code = Session(model, Conversation(system), compares=base, name=str(directory)).run()
    if code:
        raise typer.Exit(code)


def _check(model: "LemaModel") -> None:
    """Refuse, with `ConfigError`, a model that cannot chat."""
    if model.backend.replicas.num_processes > 1:
        raise ConfigError(
            "several processes cannot read one terminal",
            where="lema chat",
            how="start one process, or use lema generate",
        )
    from lema.train.inference.prompt_form import choose_form

    choose_form(model.files, model.config, chat=True)  # which has the template end the answers
