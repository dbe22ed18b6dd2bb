"""Writes an adapter in the layout that a server reads.

What changes is names and the order of numbers, and never a number. Modules have the names of
published files, which servers know. Experts that `transformers` keeps in one parameter get an
adapter each (`lema.lora.serving.experts`), but where a server has them in one tensor, too.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from torch import nn

from lema.convert.adapted import SavedAdapter, open_adapter
from lema.convert.serving.layouts import split_files, stacked_files
from lema.errors import ConfigError
from lema.lora.serving.checks import (
    PublishedNames,
    check_served,
    first_of,
    published_names,
    stacks,
)
from lema.lora.serving.experts import WEIGHT
from lema.lora.serving.servers import SERVERS, Server, ServerName, not_factors
from lema.model.sequence.rope import rope_of, write_rope
from lema.storage.atomic import appearing, free_directory
from lema.storage.regular import check_separate
from lema.storage.rendering import carry_rendering

__all__ = ["LAYOUTS", "Exported", "Layout", "export_adapter"]

Layout: TypeAlias = ServerName | Literal["peft", "per-expert"]
LAYOUTS: tuple[Layout, ...] = ("vllm", "sglang", "peft", "per-expert")
"""Whose layout: of a server; PEFT's own, as LEMA writes it; one adapter for each published
expert."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    directory: Path
    experts: int  # adapters of single experts
    line: str  # that starts the server; empty: no server was named


def export_adapter(
    adapter_dir: str | os.PathLike[str],
    out_dir: str | os.PathLike[str],
    layout: Layout,
    *,
    base_dir: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
    note: Callable[[str], object] = lambda _: None,
) -> Exported:
    """Write an adapter in a layout, as a directory that appears when it is complete.

    Args:
        adapter_dir: a saved adapter; it names its base model, of which no weight is read.
        out_dir: a new or empty directory.
        layout: one of `LAYOUTS`.
        base_dir: where the base is by now; None: where the adapter says.
        trust_remote_code: whether code beside the base may run.
        note: takes a sentence on what was found.

    Returns:
        What was written.

    Raises:
        ConfigError: there is no such layout, `out_dir` is not empty, or the server does not take
            the adapter; all that it does not take is named.
        AdapterError: there is no adapter, or it does not fit the model.
        DiskError: a file could not be written; nothing is left behind.
    """
    if layout not in LAYOUTS:
        what = f"there is no layout {layout!r}"
        raise ConfigError(what, where="--for", how=f"choose {', '.join(LAYOUTS)}")
    out = free_directory(out_dir, 1)
    if base_dir is not None:
        base_dir = _from_anywhere(base_dir)
    opened = open_adapter(adapter_dir, base_dir, trust_remote_code=trust_remote_code, note=note)
    check_separate(out, [opened.directory, opened.base.directory])
    names = published_names(opened.base.skeleton, opened.lora)
    if layout == "vllm" or layout == "sglang":
        check_served(layout, opened.base.skeleton, opened.lora, names, where=f"--for {layout}")
    elif layout == "per-expert":
        _check_factors(opened, names)
    server = SERVERS[layout] if layout == "vllm" or layout == "sglang" else None
    stacked = layout == "peft" or (server is not None and stacks(server, opened.base.skeleton))
    model = opened.attach()
    files = stacked_files(model, layout) if stacked else split_files(model, names)
    line = (
        "" if server is None else _server_line(server, opened, out, files.config, stacked=stacked)
    )
    with appearing(out) as partial:
        files.write(partial)
        carry_rendering(opened.directory, partial)
        write_rope(partial, opened.settings.rope_parameters)
        if line:
            text = f"```bash\n{line}\n```\n"
            (partial / "SERVE.md").write_text(text, encoding="utf-8", newline="\n")
    return Exported(out, files.experts, line)


def _check_factors(opened: SavedAdapter, names: PublishedNames) -> None:
    """Make sure that an adapter is factors of published matrices, and nothing else; `ConfigError`:
    all that it is besides is named."""
    problems = [*not_factors(opened.lora)]
    owners = [name.removesuffix(WEIGHT) for name in names.adapted if name.endswith(WEIGHT)]
    skeleton = opened.base.skeleton
    if tables := [
        name for name in owners if isinstance(skeleton.get_submodule(name), nn.Embedding)
    ]:
        problems.append(f"adapters of embeddings ({first_of(tables)})")
    if names.missing:
        problems.append(
            f"modules that have no published matrices of their own ({first_of(names.missing)})"
        )
    if problems:
        what = f"an adapter of each published matrix has no place for {'; '.join(problems)}"
        how = "--for peft writes them as PEFT has them; `lema merge` writes them into the model"
        raise ConfigError(what, where="--for per-expert", how=how)


def _from_anywhere(model: str | os.PathLike[str]) -> str:
    """Return the whole path of a directory, because servers are started elsewhere, and a relative
    one may be taken for a hub id; a hub id as it is."""
    return str(Path(model).absolute()) if Path(model).is_dir() else str(model)


def _rope_overrides(opened: SavedAdapter) -> str:
    """Return the rotary parameters that a server is to take for the base's, as a word of a shell;
    empty: the base's own."""
    parameters = opened.settings.rope_parameters
    if parameters is None:
        return ""
    overrides: dict[str, object] = {"rope_parameters": rope_of(opened.base.skeleton.config)}
    if "text_config" in opened.base.skeleton.config.sub_configs:
        overrides = {"text_config": overrides}
    return shlex.quote(json.dumps(overrides))


def _server_line(
    server: Server, opened: SavedAdapter, out: Path, config: Mapping[str, Any], *, stacked: bool
) -> str:
    """Return the line that starts a server with this adapter."""
    base = shlex.quote(_from_anywhere(opened.settings.model_name_or_path))
    named = shlex.quote(f"{out.name}={out}")
    rank = max([config["r"], *config["rank_pattern"].values()])
    rope = _rope_overrides(opened)
    if server is SERVERS["sglang"]:
        flag = f" --json-model-override-args {rope}" if rope else ""
        return (
            f"python -m sglang.launch_server --model-path {base}{flag} --enable-lora "
            f"--max-lora-rank {rank} --lora-paths {named}"
        )
    largest = next(allowed for allowed in server.ranks if allowed >= rank)
    flag = f" --hf-overrides {rope}" if rope else ""
    start = f"vllm serve {base}{flag} --enable-lora --max-lora-rank {largest} --lora-modules "
    if not stacked or not opened.lora.target_parameters:
        return f"{start}{named}"
    # Only a server with --enable-mixed-moe-lora-format reads the declaration.
    declared = {"name": out.name, "path": str(out), "is_3d_lora_weight": True}
    return start + shlex.quote(json.dumps(declared))
