"""What a run reads by the names that its settings give, which is never what it writes."""

from pathlib import Path

from lema.config import LemaConfig
from lema.data.files import local_places
from lema.errors import named_in
from lema.storage.regular import check_apart, expanded
from lema.train.metrics import METRICS_NAME, PLAN_NAME, SAMPLES

__all__ = ["check_output_dir", "inputs_of"]


def inputs_of(config: LemaConfig) -> list[Path]:
    """Return the files and directories of this machine that the settings name: of the model, of the adapter that the
    run begins with, and of the data. Some may not be there, because a hub id is no path."""
    named = (config.model_name_or_path, config.gbi_path, config.adapter_name_or_path)
    places = [expanded(name) for name in named if name is not None]
    return [*places, *_data_of(config)]


def check_output_dir(config: LemaConfig) -> None:
    """Make sure that `output_dir` is no directory that the run reads: that of its model, of the adapter it begins with
    or of its data, nor the place of a file that is read and would be written. `ConfigError`: it is."""
    output = Path(config.output_dir)
    with named_in("output_dir"):
        data = _data_of(config)
        others = [place for place in inputs_of(config) if place not in data]
        check_apart(output, [*(place.parent if place.is_file() else place for place in others), *data])
        for name in (METRICS_NAME, SAMPLES, PLAN_NAME):
            check_apart(output / name, data)


def _data_of(config: LemaConfig) -> list[Path]:
    return [*local_places(config.train_data), *local_places(config.eval_data)]
