"""Images, videos and sounds that `lema generate`, `lema chat` and `lema eval` are given: the model
is opened for them where there are some, and paths of users lead wherever they lie.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from lema.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lema.data.files import Row
    from lema.data.images.reading import ImageReading
    from lema.train.model import LemaModel

__all__ = ["check_shown", "in_place", "reading_of", "with_images"]

SETTING = "modalities"
URLS = ("http://", "https://", "data:")
FILE = "file://"


def in_place(image: str) -> str:
    """Return an image as a row names it: its whole path, because the user has named it; a URL as it
    is."""
    if image.lower().startswith(URLS):
        return image
    path = image[len(FILE) :] if image.lower().startswith(FILE) else image
    return str(Path(path).expanduser().absolute())


def check_shown(shown: "Mapping[str, list[str] | None]", *, may_be: bool) -> None:
    """Refuse images, videos and sounds by their columns, with `ConfigError`, where no message has a
    place for them."""
    column = next((name for name, paths in shown.items() if paths), None)
    if column is not None and not may_be:
        raise ConfigError(
            f"{column} stand in messages of a chat",
            where=f"--{column.removesuffix('s')}",
            how=f"give --prompt TEXT without --raw; rows of a file name their {column} themselves",
        )


def with_images(settings: list[str] | None) -> list[str]:
    """Return settings that open a model for images, unless they say what it is opened for."""
    given = settings or []
    if any(setting.partition("=")[0].strip() == SETTING for setting in given):
        return given
    return [*given, f"{SETTING}=all"]


def reading_of(model: "LemaModel", rows: "list[Row]") -> "ImageReading | None":
    """Return what the images of rows are read with; None: the model is open for text alone.

    Args:
        model: the model, whose settings limit what is read.
        rows: those of files lie in the files' folders.
    """
    if model.config.modalities == "text":
        return None
    from lema.model.files import image_reading

    folders = {
        row.source: Path(row.source).parent
        if Path(row.source).is_file()
        else Path(Path().absolute().anchor)
        for row in rows
    }
    return image_reading(model.config, model.files).at(folders)
