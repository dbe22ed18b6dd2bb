"""Chats: their messages as data sets write them, their template, and where in what it writes the answers are."""

from typing import TYPE_CHECKING

from lema import lazy_exports

if TYPE_CHECKING:
    from lema.data.chat.messages import Chat
    from lema.data.chat.tokens import Chats, tokenize_spans

__all__ = ["Chat", "Chats", "tokenize_spans"]

__getattr__, __dir__ = lazy_exports(__name__, {"Chat": "messages", "Chats": "tokens", "tokenize_spans": "tokens"})
