"""The model card and the tokenizer in the directory of a run's adapter, and the copy of all three
on the hub.

The card names directories and files of this machine by their last part, because it is made to be
published.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from pprint import pformat
from typing import Any

from huggingface_hub import HfApi, ModelCardData, errors
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled

from lema.backend.findings import program_versions
from lema.config import LemaConfig, markdown
from lema.errors import ConfigError, DataError
from lema.model.files import ModelFiles
from lema.model.sequence.rope import ROPE
from lema.storage.regular import is_path

__all__ = ["CARD", "make_repository", "model_card", "upload", "write_card"]

CARD = "README.md"
HTTPError = errors.HTTPError  # type: ignore[attr-defined] # httpx's or httpx2's, by the version of the library
PUBLISHED = (
    *(
        "adapter_*",
        CARD,
        "token*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab*",
        "merges.txt",
        "*.jinja",
    ),
    "generation_config.json",
    "row_forms.json",
    ROPE,
)
OF_THIS_MACHINE = {
    "model_name_or_path",
    "output_dir",
    "offload_dir",
    "gbi_path",
    "quantize_base_cache",
    "train_data",
    "eval_data",
    "run_name",
}

USE = """\
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}), {name})
tokenizer = AutoTokenizer.from_pretrained({name})
```"""


USE_ROPE = """\
```python
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

config = AutoConfig.from_pretrained({base})
# the adapter was trained with these instead of the model's own
config.get_text_config().rope_parameters = {rope}
base = AutoModelForCausalLM.from_pretrained({base}, config=config)
model = PeftModel.from_pretrained(base, {name})
tokenizer = AutoTokenizer.from_pretrained({name})
```"""


def model_card(
    config: LemaConfig, base: str, data: Mapping[str, str], results: Mapping[str, Any]
) -> str:
    """Return the README.md of an adapter: `base` model, data, settings, and the results, where
    there are any.
    """
    name = _repository(config)
    local = is_path(base)
    shown = Path(base).name if local else base  # the hub takes nothing but ids for a base model
    tags = ["lema", "lora", *([] if local else [f"base_model:adapter:{base}"])]
    about = ModelCardData(
        base_model=None if local else base,
        library_name="peft",
        pipeline_tag="text-generation",
        tags=tags,
    )
    settings = {
        name: value
        for name, value in config.model_dump(
            mode="json", exclude_unset=True, exclude=OF_THIS_MACHINE
        ).items()
        if value not in (None, [], {}, "")
    }
    versions = ", ".join(map(" ".join, program_versions("peft", "transformers", "torch").items()))
    parts = [
        f"---\n{about.to_yaml()}\n---",
        f"# {markdown.text(name.rpartition('/')[2])}",
        (
            f"An adapter (LoRA) of {markdown.code(shown)}, trained with LEMA; the objective is "
            f"{config.objective}."
        ),
        (USE if config.rope_parameters is None else USE_ROPE).format(
            # a path as it was given, because the code shall run where the model is; what is
            # published has none
            base=markdown.python_text(shown if config.push_to_hub else base),
            name=markdown.python_text(
                config.output_dir if local and not config.push_to_hub else name
            ),
            rope=pformat(config.rope_parameters, width=88),
        ),
        markdown.table("Adapter", _adapter(config)),
        markdown.table("Data", data),
        markdown.table(
            "Results",
            {
                metric: f"{value:.6g}" if isinstance(value, float) else value
                for metric, value in results.items()
            },
        ),
        markdown.table("Settings", {setting: _plain(value) for setting, value in settings.items()}),
        f"Made with {versions}.",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def _adapter(config: LemaConfig) -> dict[str, object]:
    """Return what was trained: rank, alpha and targets, also where they are the defaults."""
    targets = config.lora_target_modules
    return {
        "objective": config.objective,
        "rank": config.lora_rank,
        "alpha": config.lora_alpha,
        "dropout": config.lora_dropout,
        "target modules": targets
        if isinstance(targets, str)
        else ", ".join(targets or ["all linear layers of the decoder"]),
        "learning rate": config.learning_rate,
    }


def _plain(value: object) -> object:
    """Return a value without data of this machine: only the last part of a path that exists."""
    if not isinstance(value, str) or "/" not in value:
        return value
    return Path(value).name if is_path(value) else value


def write_card(directory: Path, *, files: ModelFiles | None, card: str) -> None:
    """Write the card, and, of a model that has one, the tokenizer with the chat template that it
    was used with, and the settings of generation with the tokens in which the texts ended."""
    (directory / CARD).write_text(card, encoding="utf-8", newline="\n")
    if files is not None:
        with suppress(DataError):  # rows of token ids need no tokenizer
            files.tokenizer.save_pretrained(str(directory))
        files.write_rendering(directory)


def make_repository(config: LemaConfig) -> None:
    """Make the repository on the hub, if there is none; or `ConfigError`, before a run begins
    that cannot upload.
    """
    try:
        HfApi().create_repo(_repository(config), private=config.hub_private_repo, exist_ok=True)
    except (HTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        how = (
            "log in with `hf auth login` or set HF_TOKEN, and check hub_model_id; or leave "
            "push_to_hub out"
        )
        raise ConfigError(
            f"the hub refused the adapter: {error}", where="push_to_hub", how=how
        ) from error


def upload(config: LemaConfig) -> str:
    """Upload adapter, card and tokenizer from `output_dir`, and nothing else; return the
    address, or `ConfigError`.
    """
    api = HfApi()
    directory = config.output_dir
    try:
        name = api.create_repo(
            _repository(config), private=config.hub_private_repo, exist_ok=True
        ).repo_id
        api.upload_folder(
            repo_id=name,
            folder_path=directory,
            allow_patterns=list(PUBLISHED),
            commit_message="Adapter",
        )
    except (HTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        how = (
            f"the adapter is in {directory}: `hf upload {_repository(config)} {directory}` "
            "uploads it"
        )
        raise ConfigError(
            f"the adapter was not uploaded: {error}", where="push_to_hub", how=how
        ) from error
    return f"{api.endpoint}/{name}"


def _repository(config: LemaConfig) -> str:
    return config.hub_model_id or Path(config.output_dir).absolute().name
