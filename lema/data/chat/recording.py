"""What `transformers` would hand to a compiled chat template: the data are its own, and no template is compiled.

`apply_chat_template` decides what a template sees: which of several it is, messages without empty keys, schemas of
tools, special tokens. All of that is asked of it. Only where it compiles the template it is given a stand-in, which
notes the values that the template would get, so that they can be rendered elsewhere (`lema.data.chat.process`).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Recorded", "recorded"]

_LOCK = threading.Lock()  # the function of the module of `transformers` is replaced for all threads
RENDERED = "a rendered chat"


@dataclass
class Recorded:
    """Stands in for a compiled template.

    Attributes:
        returned: what the call came to.
        template: the text of the template; None: none was asked for, because the tokenizer writes chats by itself.
        values: what the template would have got, by name.
    """

    text: str
    returned: Any = None
    template: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def render(self, **values: Any) -> str:
        """Note the values; return the text that stands in for the rendered chat."""
        self.values = values
        return self.text

    @property
    def is_plain(self) -> bool:
        """Whether the call came to what the template writes, and to nothing that was made of it."""
        return self.returned is self.text


def recorded(apply: Callable[[], Any], text: str = RENDERED) -> Recorded:
    """Call what applies a chat template, and return what the template would have got. The call goes on with `text` as
    what the template wrote."""
    from transformers.utils import chat_template_utils

    stand_in = Recorded(text)

    def compiled(template: str) -> Recorded:
        stand_in.template = template
        return stand_in

    module: Any = chat_template_utils
    with _LOCK:
        own = module._compile_jinja_template
        module._compile_jinja_template = compiled
        try:
            stand_in.returned = apply()
        finally:
            module._compile_jinja_template = own
    return stand_in
