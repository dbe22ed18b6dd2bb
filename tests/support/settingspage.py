"""Makes docs/settings.md, the reference of settings, from the schema of `LemaConfig`.

    PYTHONPATH=.:backends:tests/support python tests/support/settingspage.py > docs/settings.md

A setting that no group names stands in the last one.
"""

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from lema.config import LemaConfig
from lema.config.backendsettings import backend_settings
from lema.config.settings import Change

GROUPS = {
    "Model": (
        "model_name_or_path revision model_type gbi_path dtype attn_implementation "
        "rope_parameters modalities check_base_weights"
    ),
    "Data": "train_data eval_data eval_split mixture columns chat_template train_on max_length "
    "overlong packing image_folder image_urls max_image_pixels max_image_bytes "
    "max_media_bytes max_media_seconds max_video_frames video_fps "
    "group_by_length shuffle max_train_samples max_eval_samples data_cache pad_to_multiple_of",
    "Steps and batches": "batch_size gradient_accumulation_steps micro_batch_size tokens_per_step "
    "micro_batch_tokens "
    "num_train_epochs max_steps seed",
    "Optimizer and learning rate": "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio "
    "optim optim_args loraplus_lr_ratio weight_decay adam_beta1 adam_beta2 adam_epsilon "
    "max_grad_norm "
    "neftune_noise_alpha",
    "Objective": "objective loss_type beta label_smoothing label_smoothing_factor router_aux_loss_coef "
    "simpo_gamma "
    "cpo_alpha desirable_weight undesirable_weight",
    "Adapters": "adapter_name_or_path",
    "Memory": "device_memory host_memory experts_per_slot strategy gradient_checkpointing "
    "activation_offloading "
    "boundary_activations offload_dir embeddings head towers tower_cache tower_cache_size prefetch_depth loss_chunk_tokens "
    "sequence_chunk keys_values mlp_tile_tokens "
    "page_locked cache_frozen_prefix",
    "Device and processes": "device tf32 deterministic torch_compile arithmetic shard_weights "
    "tensor_parallel_size sequence_parallel context_parallel_size",
    "What a run leaves": "output_dir save_steps",
}
LAST = "What a run leaves"

_RESUMED = {
    Change.REFUSED: "refused",
    Change.ADAPTER: "compared",
    Change.DATA: "compared",
    Change.REPORTED: "taken, and said",
    Change.SILENT: "taken",
}

_HEAD = """# Settings

This page lists every setting of a run. A setting is in a YAML file, after `--set NAME=VALUE`, or in the arguments of `LemaConfig`. `python tests/support/settingspage.py >
docs/settings.md` generates the page from the schema. `lema config schema` prints the schema, from which editors complete YAML. *Resumed* says what `--resume` does if the value
has changed. *Refused*: the run ends. *Taken*: the run continues with the new value, and no number changes; LEMA compares the files of model and adapter in any case. *Taken, and
said*: the run continues with the new value, and prints a line, because later numbers may change. *Compared*: LEMA compares the result of the setting, which is the rows or the
adapter. `null` stands for none."""


def page() -> Iterator[str]:
    """Yield the lines of the page."""
    yield from _HEAD.splitlines()
    properties = LemaConfig.json_schema()["properties"]
    for title, names in grouped(list(properties)).items():
        yield from ("", f"## {title}", "")
        yield "| setting | values | default | meaning | resumed |"
        yield "|---|---|---|---|---|"
        for name in names:
            yield _row(name, properties[name])


def grouped(names: list[str]) -> dict[str, list[str]]:
    """Return the names by the title of their group: those a group names, then what no group
    names.
    """
    groups = {
        title: [name for name in listed.split() if name in names]
        for title, listed in GROUPS.items()
    }
    named = {name for listed in groups.values() for name in listed}
    for name in names:
        if name not in named:
            groups["Adapters" if name.startswith("lora_") else _rest(name)].append(name)
    return groups


def _rest(name: str) -> str:
    return "Device and processes" if name in {*backend_settings(), "backend_settings"} else LAST


def _row(name: str, schema: Mapping[str, Any]) -> str:
    field = LemaConfig.model_fields[name if name in LemaConfig.model_fields else "backend_settings"]
    change = next(one for one in field.metadata if isinstance(one, Change))
    default = (
        f"`{_written(schema['default'])}`"
        if "default" in schema
        else "none"
        if field.default_factory
        else ""
    )
    meaning = re.sub(r"\bNone\b", "null", " ".join(schema["description"].split()))
    cells = (f"`{name}`", ", ".join(_values(schema)), default, meaning, _RESUMED[change])
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _written(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _values(schema: Mapping[str, Any]) -> list[str]:
    """Return what a value may be, in words, each once."""
    if "$ref" in schema:
        reference = schema["$ref"].rpartition("/")[2]
        return _values(LemaConfig.json_schema()["$defs"][reference])
    if "const" in schema:
        return [f"`{_written(schema['const'])}`"]
    if "enum" in schema:
        return [f"`{_written(value)}`" for value in schema["enum"]]
    if "anyOf" in schema:
        return list(dict.fromkeys(text for part in schema["anyOf"] for text in _values(part)))
    kind = schema.get("type", "any")
    if not isinstance(kind, str):
        return [_WORDS[one] for one in kind]
    if kind == "array":
        return [
            "list of "
            + " or ".join(
                re.sub(r"^(text|whole number|number)", r"\1s", one)
                for one in _values(schema["items"])
            )
        ]
    return [_WORDS.get(kind, kind) + _bounds(schema)]


_WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "`true`, `false`",
    "null": "`null`",
    "object": "names with values",
}


def _bounds(schema: Mapping[str, Any]) -> str:
    words = {
        "minimum": "at least",
        "exclusiveMinimum": "above",
        "maximum": "at most",
        "exclusiveMaximum": "below",
    }
    found = [f"{word} {schema[key]}" for key, word in words.items() if key in schema]
    return f" ({', '.join(found)})" if found else ""


if __name__ == "__main__":
    sys.stdout.write("\n".join(page()) + "\n")
