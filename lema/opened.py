"""The backend that settings name, opened with what they say about it."""

from __future__ import annotations

from lema.backend import Backend, BackendOptions, load
from lema.config import LemaConfig

__all__ = ["open_backend"]


def open_backend(config: LemaConfig) -> Backend:
    """Open the device of a run.

    Raises:
        BackendUnavailable: it is not installed, or cannot run here.
        ConfigError: it cannot do what the settings ask for.
    """
    options = BackendOptions(
        config.page_locked, config.tensor_parallel_size, config.sequence_parallel, config.backend_settings
    )
    return load(config.device, options)
