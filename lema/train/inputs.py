"""What a run reads by the names that its settings give, which is never what it writes."""

from pathlib import Path

from lema.config import LemaConfig
from lema.data.sets.sources import local_paths
from lema.errors import named_in
from lema.storage.regular import check_directory, check_separate, expanded
from lema.train.metrics import METRICS_NAME, PLAN_NAME, SAMPLES

__all__ = ["check_output_dir", "inputs_of"]


def inputs_of(config: LemaConfig) -> list[Path]:
    """Return the files and directories of this machine that the settings name: of the model, of the
    adapter that the run begins with, and of the data. Some may not be there, because a hub id is no
    path."""
    return [*_models_of(config), *_data_of(config)]


def check_output_dir(config: LemaConfig) -> None:
    """Make sure that `output_dir` is a directory, if it is anything, and neither is nor lies in one
    that the run reads: that of its model, of the adapter it begins with or of its data; that no
    file of the data is one that the run writes there; and that the other directories it writes to
    lie in none of these, either. `ConfigError`: it is not so."""
    output = Path(config.output_dir)
    data = _data_of(config)
    model_directories = [path.parent for path in _models_of(config) if path.is_file()]
    with named_in("output_dir"):
        check_directory(output)
        check_separate(output, inputs_of(config))
        # a file of weights may well lie above the places of its runs
        check_separate(output, model_directories, below=False)
        for name in (METRICS_NAME, SAMPLES, PLAN_NAME):
            check_separate(output / name, data)
    for setting in ("offload_dir", "data_cache"):
        if isinstance(directory := getattr(config, setting), str):
            with named_in(setting):
                check_separate(expanded(directory), inputs_of(config))


def _models_of(config: LemaConfig) -> list[Path]:
    named = (config.model_name_or_path, config.gbi_path, config.adapter_name_or_path)
    return [expanded(name) for name in named if name is not None]


def _data_of(config: LemaConfig) -> list[Path]:
    return [*local_paths(config.train_data), *local_paths(config.eval_data)]
