"""The `Modelfile` that Ollama makes a model from: where the weights are, how a chat is written, at
which words an answer ends, and the system message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lema.convert.gguf.gotemplate import go_template
from lema.convert.gguf.roletexts import NoTable, RoleTexts, read_role_texts
from lema.data.chat.stop_tokens import answer_stop_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Modelfile", "modelfile_for", "stop_words"]

QUOTES = '"""'


@dataclass(frozen=True)
class Modelfile:
    """What a `Modelfile` says.

    Attributes:
        base: the model, as a file beside the `Modelfile`, or a name that Ollama knows.
        adapter: the file of an adapter of it; None: there is none.
        template: in Go's syntax; None: Ollama chooses one by the template in the file.
        system: the system message of chats that have none; None: there is none.
        stops: at these words an answer ends.
        notes: what a user should know of it, in sentences.
    """

    base: str
    adapter: str | None = None
    template: str | None = None
    system: str | None = None
    stops: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def text(self) -> str:
        """Return it as Ollama reads it."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        for note in self.notes:
            yield f"# {' '.join(note.split())}"
        yield f"FROM {self.base}"
        if self.adapter is not None:
            yield f"ADAPTER {self.adapter}"
        if self.template is not None:
            yield f"TEMPLATE {QUOTES}{self.template}{QUOTES}"
        for stop in self.stops:
            yield f"PARAMETER stop {_quoted(stop)}"
        if self.system is not None:
            yield f"SYSTEM {_quoted(self.system)}"


def modelfile_for(
    tokenizer: PreTrainedTokenizerBase,
    base: str,
    *,
    adapter: str | None = None,
    end_tokens: Sequence[int] = (),
    system: str | None = None,
    date: str | None = None,
) -> Modelfile:
    """Return the `Modelfile` of a model.

    Args:
        tokenizer: with the chat template.
        base: the model, as `FROM` names it.
        adapter: the file of an adapter of it.
        end_tokens: numbers of tokens at which texts end, those of `generation_config.json`.
        system: the system message.
        date: YYYY-MM-DD, that a template is told which writes the date; None: today's.

    Returns:
        It. Where the chat template is more than texts around messages, it has no `TEMPLATE`, and a
        note says why.
    """
    notes = list[str]()
    texts: RoleTexts | None = None
    try:
        texts = read_role_texts(tokenizer, date)
    except NoTable as error:
        notes.append(
            f"No TEMPLATE is written, and Ollama chooses one itself: {error}. llama-server takes "
            "the chat template that is in the GGUF file."
        )
    stops = stop_words(tokenizer, end_tokens, texts)
    if texts is not None and texts.dated:
        day = f"the date {date}" if date else "the date of the day on which it was written"
        notes.append(f"The chat template writes the date of the day; this TEMPLATE has {day}.")
    if texts is not None and texts.trims:
        notes.append(
            "The chat template leaves out blanks around the words of messages; Ollama does not."
        )
    if system is not None and texts is not None and not texts.has_system:
        notes.append("SYSTEM is left out: the chat template takes no system message.")
        system = None
    if system is not None and not _can_be_quoted(system):
        notes.append(f"SYSTEM is left out: it has {QUOTES}, which a Modelfile cannot quote.")
        system = None
    unwritable = [stop for stop in stops if not _can_be_quoted(stop)]
    if unwritable:
        notes.append(f"A stop word is left out: it has {QUOTES}, which a Modelfile cannot quote.")
    written = tuple(stop for stop in stops if stop not in unwritable)
    template = None if texts is None else go_template(texts)
    return Modelfile(base, adapter, template, system, written, tuple(notes))


def stop_words(
    tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int], texts: RoleTexts | None
) -> tuple[str, ...]:
    """Return the words at which an answer ends: tokens that end texts, and where no such token
    stands between an answer and the next question, the first line of what does.

    Args:
        tokenizer: with the chat template.
        end_tokens: numbers of tokens.
        texts: of the chat template; None: it has no table of texts.
    """
    numbers = [*end_tokens, *answer_stop_tokens(tokenizer)]
    if tokenizer.eos_token_id is not None:
        numbers.append(tokenizer.eos_token_id)
    words = [str(tokenizer.convert_ids_to_tokens(number)) for number in dict.fromkeys(numbers)]
    between = "" if texts is None else texts.before.get(("assistant", "user"), "")
    first_line = next((line for line in between.split("\n") if line.strip()), "")
    if first_line and not any(word in between for word in words):
        words.append(first_line.strip())
    return tuple(dict.fromkeys(words))


def _can_be_quoted(text: str) -> bool:
    return QUOTES not in text and not text.endswith('"')


def _quoted(text: str) -> str:
    """Return a text in quotes. A Modelfile has no escapes; within three quotes, all stands as it
    is.
    """
    plain = '"' not in text and "\n" not in text
    return f'"{text}"' if plain else f"{QUOTES}{text}{QUOTES}"
