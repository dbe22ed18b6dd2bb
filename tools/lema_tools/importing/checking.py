"""Checks a translated run as a file of settings is checked, so that what is written can be read."""

from lema.config import LemaConfig
from lema.config.problems import SettingsError
from lema_tools.importing.translation import Note, Translation

__all__ = ["checked"]


def checked(translation: Translation) -> Translation:
    """Return the translation without settings that LEMA refuses; each is a note on what is lost.

    Raises:
        ConfigError: the settings are refused together, and no single one is at fault.
    """
    known = LemaConfig.defaults()
    plain = {name: value for name, value in translation.settings.items() if name in known}
    try:
        LemaConfig(**plain)
    except SettingsError as error:
        faults = {
            problem.key.partition(".")[0].partition("[")[0]: str(problem)
            for problem in error.problems
        }
        if not faults.keys() & plain.keys():
            raise
    else:
        return translation
    settings = {name: value for name, value in translation.settings.items() if name not in faults}
    sources = {text.partition(":")[0]: key for key, text in translation.same.items()}
    lost = [Note(sources.get(name, name), why) for name, why in faults.items() if name in plain]
    removed = {note.key for note in lost}
    return checked(
        Translation(
            settings,
            {key: text for key, text in translation.same.items() if key not in removed},
            translation.differs,
            [*translation.lost, *lost],
        )
    )
