"""Writes a translated run as a file of settings, with three lists of comments: what is the same,
what differs, and what is not carried.
"""

import io
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from lema.config import LemaConfig
from lema.errors import printable
from lema_tools.importing.translation import Note, Translation

__all__ = ["notes_of", "settings_text"]

ALWAYS = (
    *("model_name_or_path", "train_data", "output_dir"),
    *("learning_rate", "lora_alpha", "warmup_steps", "warmup_ratio"),
)
"""Settings that a file has even where they equal LEMA's defaults: what a reader looks for, and
those whose defaults depend on other settings.
"""
WIDTH = 98


def settings_text(translation: Translation, origin: str) -> str:
    """Return the text of the file: settings that differ from LEMA's defaults, then comments.

    Args:
        translation: the run.
        origin: the trainer with version and date, for the heading of the lists.
    """
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment] # its annotation is narrower than its use
    yaml.representer.add_representer(str, _text)
    stream = io.StringIO()
    yaml.dump(_to_write(translation.settings), stream)
    return stream.getvalue() + "".join(f"{line}\n" for line in notes_of(translation, origin))


def _text(representer: Any, text: str) -> Any:
    """Write a text of several lines, such as a chat template, line by line."""
    style = "|" if "\n" in text else None
    return representer.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _to_write(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that are not as LEMA has them by default, in LEMA's order; those that a
    plain run has not (phases) come last. Of the two of a warm-up one is written, because files of
    phases refuse both.
    """
    defaults = LemaConfig.defaults()
    ordered = [name for name in defaults if name in settings]
    ordered += [name for name in settings if name not in defaults]
    has_steps = not settings.get("warmup_ratio") and "warmup_steps" in settings
    idle = "warmup_ratio" if has_steps else "warmup_steps"
    return {
        name: settings[name]
        for name in ordered
        if name != idle
        and (name in ALWAYS or name not in defaults or settings[name] != defaults[name])
    }


def notes_of(translation: Translation, origin: str) -> list[str]:
    """Return the three lists as lines of comments."""
    same = "; ".join(f"{key} = {text}" for key, text in translation.same.items())
    return [
        f"# Same as there ({_line(origin)}):",
        *_comment(_line(same) or "nothing"),
        "# Differs:",
        *_items(translation.differs),
        "# Not carried:",
        *_items(translation.lost),
    ]


def _items(notes: Sequence[Note]) -> Iterator[str]:
    if not notes:
        yield "#   nothing"
    for note in notes:
        effect = "" if note.changes_numbers else " (the numbers stay the same)"
        yield from _comment(_line(f"{note.key}: {note.why}{effect}"))


def _comment(text: str) -> list[str]:
    """Return a text in lines of comments."""
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent="#   ",
        subsequent_indent="#     ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _line(text: str) -> str:
    """Return a text in one line, because a second one would be a setting."""
    return " ".join(printable(text).split())
