"""A chat template is a program from outside: it runs in a sandbox, and here it is given a bounded time.

`transformers` renders in jinja's sandbox, which keeps a template from files, modules and attributes that lead to them,
and bounds `range`. It does not bound loops within loops, nor powers: https://jinja.palletsprojects.com/en/stable/sandbox
says that the caller must. What a product of texts takes in memory is not bounded here either.
"""

from contextlib import AbstractContextManager
from functools import lru_cache

import jinja2

from lema import timelimit

__all__ = ["MAX_SECONDS", "check_template", "limited"]

MAX_SECONDS = 3.0  # for one chat; a long one takes thousandths
MAX_NUMBER = 1_000_000  # to be multiplied by, or padded to


@lru_cache(maxsize=16)
def check_template(template: str) -> str:
    """Say what in a template is never needed to write a chat, and could take all time or memory; empty: nothing.

    Only the words of the template are looked at: constants are computed as soon as it is compiled.
    """
    try:
        for line, kind, word in jinja2.Environment(autoescape=True).lex(template):
            if kind == "operator" and word == "**":
                return f"line {line} of the chat template raises a number to a power"
            if kind in ("integer", "float") and float(word.replace("_", "")) > MAX_NUMBER:
                return f"line {line} of the chat template has the number {word[:20]}"
    except (jinja2.TemplateError, ValueError):
        return ""  # it will not compile either, and that is said by whoever compiles it
    return ""


def limited() -> AbstractContextManager[None]:
    """Let what is inside a `with` block compute for `MAX_SECONDS` of the processor's time.

    Inside, `TemplateError` is raised when it goes on for longer.
    """
    seconds = MAX_SECONDS
    return timelimit.limited(
        seconds, lambda: jinja2.TemplateError(f"it takes more than {seconds:g} seconds"), file="<template>"
    )
