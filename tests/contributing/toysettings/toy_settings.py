"""A setting that only one backend has. This module imports no heavy library."""

from lema.config.backendsettings import BackendSetting

LAYOUT = BackendSetting(
    choices=("flat", "tiled"),
    default="flat",
    meaning="How a weight lies on the toy: `flat` as on disk, `tiled` in squares.",
)
