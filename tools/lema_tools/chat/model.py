"""The model of a chat, which is opened with its towers when the first image is shown."""

from collections.abc import Callable

from lema.errors import LemaError
from lema_tools.chat.answers import Answers
from lema_tools.generation.images import with_images

__all__ = ["ChatModel"]


class ChatModel:
    """Opens the model for text, and once more for images, whose towers take memory and a start.

    Args:
        opened: opens the model with these settings of the user, and returns its answers.
        settings: the settings; those that say `modalities` are never changed.

    Attributes:
        answers: of the model as it is open now.
    """

    def __init__(
        self, opened: Callable[[list[str] | None], Answers], settings: list[str] | None
    ) -> None:
        self._opened = opened
        self._settings = settings
        self.answers = opened(settings)

    def image(self, path: str) -> str:
        """Make sure that an image can be shown, and return its whole path, or its URL. A model that
        is open for text alone is closed before it is opened for images, because both may not fit.

        Raises:
            LemaError: as `Answers.image`, and where the model cannot be opened for images; it is
                then open for text as before.
        """
        seeing = with_images(self._settings)
        if path and not self.answers.sees and seeing != (self._settings or []):
            self.answers.model.files.image_processor()  # which a model of text does not have
            self.close()
            try:
                self.answers = self._opened(seeing)
            except LemaError:
                self.answers = self._opened(self._settings)
                raise
            self._settings = seeing
        return self.answers.image(path)

    def close(self) -> None:
        """Close the model."""
        self.answers.model.close()
