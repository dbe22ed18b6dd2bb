"""Lets `transformers` apply a chat template without compiling it: what it would write is asked of
somebody else.

`apply_chat_template` decides what a template sees: which of several it is, messages without empty
keys, schemas of tools, special tokens. All of that is asked of it. Only where it compiles the
template it is given a stand-in, which hands on the values that the template would get, so that they
can be rendered elsewhere (`lema.data.chat.process`).
"""

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Write", "applied"]

Write = Callable[[str, dict[str, Any]], str]
"""Returns what a template writes, of its text and the values that it gets by name."""

_LOCK = threading.Lock()  # the function of the module of `transformers` is replaced for all threads


class _StandIn:
    """Stands in for a compiled template."""

    def __init__(self, template: str, write: Write) -> None:
        self._template = template
        self._write = write

    def render(self, **values: Any) -> str:
        return self._write(self._template, values)


def applied(apply: Callable[[], Any], write: Write) -> Any:
    """Call what applies a chat template and return what it returns, where the template itself is
    written by `write`.
    """
    from transformers.utils import chat_template_utils

    module: Any = chat_template_utils
    with _LOCK:
        compile_template = module._compile_jinja_template
        module._compile_jinja_template = lambda template: _StandIn(template, write)
        try:
            return apply()
        finally:
            module._compile_jinja_template = compile_template
