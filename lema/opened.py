"""The backend that settings name, opened with what they say about it."""

from __future__ import annotations

from lema.backend import Backend, BackendOptions, Parallel, SingleProcess, load, planned
from lema.config import LemaConfig

__all__ = ["open_backend", "planned_parallel"]


def open_backend(config: LemaConfig) -> Backend:
    """Open the device of a run.

    Raises:
        BackendUnavailable: it is not installed, or cannot run here.
        ConfigError: it cannot do what the settings ask for.
    """
    return load(config.device, _options(config))


def planned_parallel(config: LemaConfig) -> Parallel:
    """Return how the layers of a run would lie over its processes, as one of them sees it; none has to be there.

    Raises:
        BackendUnavailable, ConfigError: as `open_backend`.
    """
    if config.tensor_parallel_size in (None, 1) and not config.sequence_parallel:
        return SingleProcess()
    return planned(config.device, _options(config))


def _options(config: LemaConfig) -> BackendOptions:
    return BackendOptions(
        config.page_locked, config.tensor_parallel_size, config.sequence_parallel, config.backend_settings
    )
