"""Renders the part of Go's `text/template` that LEMA writes for Ollama, and all of it where Go is installed.

The part: constants in quotes, fields of a message, one variable, `range` over messages, `if` with `eq`, `and`, `len`
and `slice`. Every action trims the blanks around it, so that nothing between actions is written.
"""

import ast
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["HAS_GO", "render", "render_with_go"]

HAS_GO = shutil.which("go") is not None
ACTION = re.compile(r'\{\{-\s*((?:"(?:[^"\\]|\\.)*"|[^{}"])*?)\s*-\}\}', re.S)
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[()]|[^\s()]+')
PROGRAM = Path(__file__).with_name("rendergo.go")
Chat = Sequence[tuple[str, str]]


class Evaluator:
    """A template of actions, and what its variables are."""

    def __init__(self, text: str, chat: Chat) -> None:
        between = ACTION.sub("", text)
        assert not between.strip(), f"a text stands between actions: {between!r}"
        self.actions = ACTION.findall(text)
        self.messages = [{".Role": role, ".Content": words} for role, words in chat]
        self.variables: dict[str, Any] = {"$.Messages": self.messages}
        self.written: list[str] = []

    def run(self, start: int, message: dict[str, str], *, writes: bool) -> int:
        """Do actions from one on, up to the `else` or `end` of their block; return which that is."""
        at = start
        while at < len(self.actions):
            action = self.actions[at]
            if action == "end" or action.startswith("else"):
                return at
            if action.startswith("range "):
                match = re.fullmatch(r"range (\$\w+), (\$\w+) := \.Messages", action)
                assert match, action
                end = self.run(at + 1, {}, writes=False)
                for number, each in enumerate(self.messages if writes else []):
                    self.variables[match[1]] = number
                    assert self.run(at + 1, each, writes=True) == end
                assert self.actions[end] == "end"
                at = end + 1
            elif action.startswith("if "):
                at = self._branches(at, message, writes=writes)
            else:
                if writes:
                    self._single(action, message)
                at += 1
        return at

    def _branches(self, start: int, message: dict[str, str], *, writes: bool) -> int:
        at, taken = start, False
        while self.actions[at] != "end":
            condition = self.actions[at].removeprefix("else").strip().removeprefix("if").strip()
            chosen = writes and not taken and (not condition or self.value(condition, message))
            taken = taken or bool(chosen)
            at = self.run(at + 1, message, writes=bool(chosen))
        return at + 1

    def _single(self, action: str, message: dict[str, str]) -> None:
        if match := re.fullmatch(r"(\$\w+) :?= (.+)", action):
            self.variables[match[1]] = self.value(match[2], message)
        else:
            self.written.append(str(self.value(action, message)))

    def value(self, expression: str, message: dict[str, str]) -> Any:
        words = WORD.findall(expression)
        value = self._called(words, message)
        assert not words, expression
        return value

    def _called(self, words: list[str], message: dict[str, str]) -> Any:
        name = words.pop(0)
        if name not in ("eq", "and", "len", "slice"):
            return self._operand(name, words, message)
        operands = []
        while words and words[0] != ")":
            operands.append(self._operand(words.pop(0), words, message))
        match name, operands:
            case "eq", [left, right]:
                return left == right
            case "and", [left, right]:
                return left and right
            case "len", [several]:
                return len(several)
            case "slice", [several, first]:
                return several[first:]
        raise AssertionError(f"{name} with {len(operands)} operands")

    def _operand(self, word: str, words: list[str], message: dict[str, str]) -> Any:
        if word == "(":
            value = self._called(words, message)
            assert words.pop(0) == ")"
            return value
        if word.startswith('"'):
            return ast.literal_eval(word)
        if word.isdecimal():
            return int(word)
        return message[word] if word.startswith(".") else self.variables[word]


def render(template: str, chat: Chat) -> str:
    """Return what a template makes of a chat."""
    evaluator = Evaluator(template, chat)
    assert evaluator.run(0, {}, writes=True) == len(evaluator.actions)
    return "".join(evaluator.written)


def render_with_go(cases: Sequence[tuple[str, Chat]], folder: Path) -> list[str]:
    """Return what Go makes of templates and chats."""
    requests = [
        {
            "Template": template,
            "Messages": [{"Role": role, "Content": words} for role, words in chat],
        }
        for template, chat in cases
    ]
    copy = shutil.copy(PROGRAM, folder / "main.go")
    done = subprocess.run(
        ["go", "run", str(copy)],
        input=json.dumps(requests).encode(),
        capture_output=True,
        check=True,
        cwd=folder,
    )
    rendered: list[str] = json.loads(done.stdout)
    return rendered
