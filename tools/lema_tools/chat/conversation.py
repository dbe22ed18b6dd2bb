"""The messages of a chat, and the file that they are saved to."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lema.errors import ConfigError
from lema.storage.atomic import replace_file
from lema.storage.regular import check_target

__all__ = ["Conversation", "Message", "save"]

Message: TypeAlias = dict[str, Any]
"""A `role` and its `content`: words, or parts where there are images."""


@dataclass
class Conversation:
    """A system message, if there is one, the turns of user and assistant, and the paths of the
    images that the next message has."""

    system: str | None = None
    turns: list[Message] = field(default_factory=list)
    images: list[str] = field(default_factory=list)

    def messages(self, left_out: int = 0) -> list[Message]:
        """Return the messages for a template, without that many of the oldest turns."""
        first = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*first, *self.turns[left_out:]]

    def ask(self, text: str) -> None:
        """Add a message of the user, with the images that were shown before it."""
        parts = [{"type": "image", "path": path} for path in self.images]
        content = [*parts, {"type": "text", "text": text}] if parts else text
        self.turns.append({"role": "user", "content": content})
        self.images.clear()

    def answer(self, text: str) -> None:
        """Add the answer to the last message; without words the message is taken back, too,
        because no template writes a turn without them."""
        if text.strip():
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()

    def undo(self) -> bool:
        """Take back the last message and its answer; return whether there was one."""
        if not self.turns:
            return False
        del self.turns[-2:]
        return True

    def reset(self) -> None:
        """Forget all turns and images; the system message stays."""
        self.turns.clear()
        self.images.clear()


def save(conversation: Conversation, file: Path) -> None:
    """Write the chat as a file of rows that `lema train` reads: one row, `messages`.

    Raises:
        ConfigError: there is nothing to save, or the file's name is not that of such a file.
        DiskError: the file could not be written.
    """
    if not conversation.turns:
        raise ConfigError("there is nothing to save yet", where="/save", how="ask something first")
    if file.suffix not in (".json", ".jsonl"):
        raise ConfigError(
            f"a chat is saved as JSON, not as {file.suffix or 'a file without an ending'}",
            where=f"/save {file}",
            how="name a .json or .jsonl file",
        )
    check_target(file)
    row = {"messages": conversation.messages()}
    text = json.dumps([row] if file.suffix == ".json" else row, ensure_ascii=False)
    if file.suffix == ".jsonl" and file.exists():
        text = file.read_text(encoding="utf-8").rstrip("\n") + "\n" + text
    replace_file(file, (text + "\n").encode())
