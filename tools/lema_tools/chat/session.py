"""A chat at a terminal, or over a pipe: lines in, answers out."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lema.backend.signalwatch import SignalWatch
from lema.errors import LemaError, printable
from lema_tools.chat.conversation import Conversation, save
from lema_tools.chat.model import ChatModel
from lema_tools.generation.compared import TITLES, print_compared, width_of_two
from lema_tools.generation.stream import print_text

__all__ = ["Session"]

HELP = """\
/help           this list
/reset, /clear  forget the chat; the system message stays
/system TEXT    begin again with another system message; without TEXT, show it
/system -       begin again without a system message
/image PATH     show an image with the next message; several, one line each
/undo           take the last message and its answer back
/save [FILE]    save the chat as a row of training data (chat.jsonl, to which it is added)
/exit, /quit    end, as Ctrl-D does
Ctrl-C stops an answer; what it has said so far stays in the chat."""


class Session:
    """Reads messages and commands until there are no more.

    Args:
        model: makes the answers.
        conversation: the chat, which the session continues.
        compares: show the base model's answer, too; the adapter's goes on in the chat.
        name: of the model, for the first line.
    """

    def __init__(
        self, model: ChatModel, conversation: Conversation, *, compares: bool, name: str
    ) -> None:
        self._model = model
        self._conversation = conversation
        self._compares = compares
        self._name = name
        self._stopped = threading.Event()
        self._answering = False
        self._terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> int:
        """Answer line after line; an error of one line ends that line alone.

        Returns:
            0 at a terminal. For a pipe the exit code of the first line that could not be done.
        """
        if self._terminal:
            with suppress(ImportError):  # a system without it edits lines in its own way
                import readline  # noqa: F401 - which gives `input` its history
            print_text(f"{self._name}: /help lists the commands, Ctrl-D ends\n")
        code = 0
        with self._interrupts():
            while (line := self._line()) is not None:
                if not line.strip():
                    continue
                try:
                    if line.startswith("/"):
                        if not self._command(line.strip()):
                            break
                    else:
                        self._answer(line)
                except LemaError as error:
                    self._note(f"error: {error}")
                    code = code or error.exit_code
        return 0 if self._terminal else code

    def _line(self) -> str | None:
        """Return the next line; None: there is none."""
        while True:
            try:
                if self._terminal:
                    return input("> ")
                return next(iter(sys.stdin.readline, ""), None)
            except EOFError:
                print_text("\n")
                return None
            except KeyboardInterrupt:
                if not self._terminal:
                    raise
                self._note("\n(Ctrl-D or /exit ends)")

    def _command(self, line: str) -> bool:
        """Do what a line that begins with / says; return whether the chat goes on."""
        word, _, text = line.partition(" ")
        text = text.strip()
        chat = self._conversation
        match word:
            case "/exit" | "/quit":
                return False
            case "/help":
                self._note(HELP)
            case "/reset" | "/clear":
                chat.reset()
                self._note("(the chat is forgotten)")
            case "/undo":
                undone = chat.undo()
                self._note(f"({'taken back' if undone else 'there is nothing to take back'})")
            case "/system" if not text:
                self._note(chat.system or "(there is no system message)")
            case "/system" if text == "-":
                chat.system = None
                chat.reset()
                self._note("(a new chat, without a system message)")
            case "/system":
                self._model.answers.check_system(text, "/system")
                chat.system = text
                chat.reset()
                self._note("(a new chat, with this system message)")
            case "/image":
                chat.images.append(self._model.image(text))
                self._note("(the next message has it)")
            case "/save":
                file = Path(text or "chat.jsonl")
                save(chat, file)
                self._note(f"(saved to {file})")
            case _:
                self._note(f"(there is no command {word}; /help lists them)")
        return True

    def _answer(self, line: str) -> None:
        chat = self._conversation
        chat.ask(line.rstrip("\r\n"))
        self._stopped.clear()
        self._answering = True
        try:
            text = self._compared() if self._compares else self._streamed()
        except BaseException:
            chat.turns.pop()  # so that the next message is not a second one in a row
            raise
        finally:
            self._answering = False
        chat.answer(text)
        if self._stopped.is_set():
            self._note("(stopped)")

    def _streamed(self) -> str:
        answer = self._model.answers.answer(self._conversation, self._stopped, print_text)
        self._note_left_out(answer.left_out)
        return answer.text

    def _compared(self) -> str:
        """Show both answers, and return the adapter's. They stand side by side where the terminal
        is wide enough, which a text that is still being made cannot."""
        wide = width_of_two(self._terminal) is not None
        texts = []
        left_out = 0
        for title, of_base in zip(TITLES, (True, False), strict=True):
            if not wide:
                print_text(f"{title}: ")
            show: Callable[[str], object] = (lambda _: None) if wide else print_text
            answer = self._model.answers.answer(
                self._conversation, self._stopped, show, of_base=of_base
            )
            texts.append(answer.text)
            left_out = answer.left_out
        if wide:
            print_compared((texts[0], texts[1]), terminal=True)
        self._note_left_out(left_out)
        return texts[-1]

    def _note_left_out(self, messages: int) -> None:
        if messages:
            self._note(f"(the chat is too long: its first {messages} messages were left out)")

    def _note(self, text: str) -> None:
        """Say something that is no answer: on standard error, where answers go to a pipe."""
        stream = sys.stdout if self._terminal else sys.stderr
        stream.write(printable(text) + "\n")
        stream.flush()

    @contextmanager
    def _interrupts(self) -> Iterator[None]:
        """Let Ctrl-C stop an answer; a second one in the same answer, or one at no answer of a
        pipe, ends the program. The watch takes signals from the one that ends every other command
        soon after the first."""

        def note(_: int, __: FrameType | None) -> None:
            if not self._answering or self._stopped.is_set():
                raise KeyboardInterrupt
            self._stopped.set()

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGINT, note)
        try:
            with SignalWatch(lambda _: None):
                yield
        finally:
            signal.signal(signal.SIGINT, before)
