"""The small files next to a model's weights that `transformers` reads, code among them: checked
first, then loaded.

A tokenizer's files and `config.json` come from the same strangers as the weights. A link may not
lead out of the model's directory, and a pipe or a device, which would block or never end, is not
read. `transformers` counts layers in loops and makes tables as long as the config says, so a number
that no model has would cost hours or all memory, and is refused; so is a config that sends
`transformers` to other files, which were not checked.

Code runs only where the user allowed it, from a directory or one fixed commit of a hub repository:
what the user can have read. Settings come from files, and files come from strangers, so this is no
setting. It is a flag, or an argument.
"""

import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lema.compat import without_video
from lema.config.acting import LIBRARY_ATTENTION
from lema.errors import ConfigError, DataError, ModelError, WeightsError, unreadable
from lema.storage.header import read_json, regular_size
from lema.storage.index import MAX_CONFIG_BYTES
from lema.storage.regular import check_inside, read_regular

if TYPE_CHECKING:
    from transformers import (
        GenerationConfig,
        PreTrainedConfig,
        PreTrainedTokenizerBase,
        ProcessorMixin,
    )

__all__ = [
    "TEMPLATES",
    "check_code",
    "check_companions",
    "keep_to_libraries",
    "known_types",
    "load_generation_config",
]
__all__ += [
    "has_processor",
    "load_processor",
    "load_tokenizer",
    "parts_of",
    "read_config_file",
    "require_commit",
]

# tokenizer, templates, settings
COMPANIONS = (
    "*.json",
    "*.model",
    "*.txt",
    "*.jinja",
    "*.tiktoken",
)
CODE = ("*.py",)
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")  # one of these is there
TEMPLATES = "additional_chat_templates"
MAX_BYTES = 500_000_000  # ten times the largest tokenizers
# thirty times the longest published; what is longer takes Jinja seconds to compile
MAX_TEMPLATE_BYTES = 1 << 20


def check_companions(directory: Path) -> None:
    """Make sure that the files `transformers` may open in a model's directory are files, and lie in
    it. `WeightsError`: one is a link that leaves the directory, no regular file, or enormous."""
    folder = directory / TEMPLATES
    if folder.is_symlink() or folder.exists():
        check_inside(folder)
    for parent in (directory, folder):
        for file in sorted(
            {file for pattern in COMPANIONS + CODE for file in parent.glob(pattern)}
        ):
            check_inside(file)
            most = MAX_TEMPLATE_BYTES if file.suffix == ".jinja" else MAX_BYTES
            if not file.is_dir() and regular_size(file) > most:
                what = f"{file.name} is larger than the {most:,} bytes that such a file may have"
                raise DataError(what, where=str(file))


def load_tokenizer(directory: Path, *, trusted: bool, how: str) -> "PreTrainedTokenizerBase":
    """Load the tokenizer of a model's directory, and run code that comes with it if `trusted`.
    `DataError`: there is none, it cannot be loaded, or one of its files is not what it should be;
    `how` says what to do."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    check_companions(directory)
    _check_growth(directory / "tokenizer.json")
    _check_arguments(directory / "tokenizer_config.json")
    with library_errors(directory, "the model has no tokenizer that can be loaded", how):
        tokenizer: Any = AutoTokenizer.from_pretrained(directory, trust_remote_code=trusted)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        what = f"the model has no tokenizer that can be loaded: {type(tokenizer).__name__} is none"
        raise DataError(what, where=str(directory), how=how)
    templates = tokenizer.chat_template
    for text in templates.values() if isinstance(templates, dict) else [templates or ""]:
        if len(text) > MAX_TEMPLATE_BYTES:
            what = (
                f"the chat template has {len(text):,} characters, more than the "
                f"{MAX_TEMPLATE_BYTES:,} it may have"
            )
            raise DataError(what, where=str(directory), how=how)
    return tokenizer


def has_processor(directory: Path) -> bool:
    """Whether a model's directory has the file of a processor."""
    return any((directory / name).is_file() for name in PROCESSOR_FILES)


def load_processor(directory: Path, *, trusted: bool) -> "ProcessorMixin | None":
    """Load the processor of a model's directory, and run code that comes with it if `trusted`.
    None: there is none, as beside models of text. `DataError`: it cannot be loaded, or one of its
    files is not what it should be."""
    if not has_processor(directory):
        return None
    check_companions(directory)
    _check_growth(directory / "tokenizer.json")
    _check_arguments(directory / "tokenizer_config.json")
    from transformers import AutoProcessor, ProcessorMixin

    how = "use the processor's files that were published with the model"
    with (
        library_errors(directory, "the model has no processor that can be loaded", how),
        without_video(),
    ):
        processor = AutoProcessor.from_pretrained(directory, trust_remote_code=trusted)
    return processor if isinstance(processor, ProcessorMixin) else None


@contextmanager
def library_errors(
    location: str | Path,
    what: str = "the tokenizer fails on a text",
    how: str = "use the tokenizer that was published with the model",
    kinds: type[BaseException] | tuple[type[BaseException], ...] = BaseException,
) -> Iterator[None]:
    """Have any error of a tokenizer be a `DataError` that names its `location`: the files are from
    outside, and the library that reads them raises plain `Exception`, and panics that are not even
    that; or these `kinds` alone."""
    try:
        yield
    except kinds as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # somebody interrupts
        message = str(error) or type(error).__name__
        raise unreadable(
            location or "tokenizer", error, DataError, f"{what}: {message}", how
        ) from error


def _check_growth(file: Path) -> None:
    """Refuse a tokenizer that makes much more text of a text than there was: what it replaces, puts
    before and puts around. The library that runs it has no limit, and ends the process where memory
    ends. `DataError`."""
    # what cannot be read is told where the file is loaded, as are forms that are none
    content = _read(file)
    factor = 1
    left = [content.get(key) for key in GROWING]
    while left and factor <= MAX_GROWTH:
        step = left.pop()
        if isinstance(step, list):
            left += step
        elif isinstance(step, dict):
            left += [inner for inner in step.values() if isinstance(inner, dict | list)]
            texts = [step.get(key) for key in ("content", "prepend", "replacement")]
            factor *= max(1, *(len(text) for text in texts if isinstance(text, str)), 1)
    if factor > MAX_GROWTH:
        what = f"the tokenizer may make more than {MAX_GROWTH:,} times as much text of a text"
        raise DataError(
            what, where=str(file), how="use the tokenizer that was published with the model"
        )


def _check_arguments(file: Path) -> None:
    """Refuse the settings of a tokenizer that give its class arguments by position, which may be
    paths of other files: of those by name `transformers` takes none from there. `DataError`."""
    if arguments := _read(file).get("init_inputs"):
        what = (
            "the tokenizer's settings give its class arguments that may name other files: "
            f"{arguments!r}"
        )
        raise DataError(what, where=f"{file}: init_inputs", how="remove init_inputs from the file")


def load_generation_config(directory: Path) -> "GenerationConfig | None":
    """Load a model's own settings of generation as `from_pretrained` does: where they have no file
    of their own, from `config.json`, in which older models have them; None: there is neither. What
    would choose how keys and values are kept, or start a compiler, is ignored with a warning: LEMA
    and the user decide that. `ModelError`: the file cannot be read; `WeightsError`: it is a link
    that leaves the directory, or no regular file."""
    from transformers import GenerationConfig

    file = directory / "generation_config.json"
    options = dict[str, Any]()
    if not file.is_symlink() and not file.exists():
        file = directory / "config.json"
        options = {"config_file_name": file.name, "_from_model_config": True}
        if not file.is_symlink() and not file.exists():
            return None
    check_inside(file)
    regular_size(file)
    asked = {
        name: value
        for name, value in _read(file).items()
        if name in MACHINERY and value is not None
    }
    options = options or dict.fromkeys(MACHINERY)
    try:
        settings: GenerationConfig = GenerationConfig.from_pretrained(directory, **options)
    except Exception as error:
        what = f"transformers cannot read these settings of generation: {error}"
        raise ModelError(what, where=str(file), how="correct the file, or delete it") from error
    # In config.json a part of the model may have some as well.
    asked |= {name: value for name in MACHINERY if (value := getattr(settings, name)) is not None}
    for name in MACHINERY:
        setattr(settings, name, None)
    # an old word for the usual cache
    if acting := [name for name, value in asked.items() if value != "hybrid"]:
        what = f"{file} has {' and '.join(acting)}, which act on the machine; they are ignored"
        warnings.warn(f"{what}. In Python, an option of generate can set them", stacklevel=2)
    for name, value in vars(settings).items():
        token_ids = value if isinstance(value, list) else [] if value is None else [value]
        if name.endswith("_token_id") and any(
            type(token_id) is not int or abs(token_id) >= 2**63 for token_id in token_ids
        ):
            raise ModelError(
                f"{name} is no token: {value}",
                where=str(file),
                how="correct the file, or delete it",
            )
    return settings


# Settings of generation that say how it is computed, and not what is generated.
MACHINERY = ("cache_implementation", "cache_config", "compile_config", "continuous_batching_config")
GROWING = ("normalizer", "pre_tokenizer")  # the parts of tokenizer.json that write text
MAX_GROWTH = 1000
MAX_LAYERS = 2048  # an order of magnitude beyond the deepest models there are
MAX_LABELS = 1_000_000  # transformers makes a table of as many names
MAX_DEPTH = 32  # of objects and lists in each other
COUNTS = re.compile(r"(layers?|blocks)$")  # how a key ends that says how often something is made


def read_config_file(directory: Path) -> dict[str, Any]:
    """Return what a model's `config.json` says. `ModelError`: there is none, it is damaged, a link
    out of the directory or no regular file, it holds numbers that no model has, or it sends its
    readers to other files."""
    file = directory / "config.json"
    if not file.is_symlink() and not file.exists():
        how = "point model_name_or_path at a directory written by save_pretrained, or at a hub id"
        raise ModelError("the model directory has no config.json", where=str(directory), how=how)
    try:
        check_inside(file)
        config = read_json(file, MAX_CONFIG_BYTES, "a config")
    except WeightsError as error:
        raise ModelError(error.what, where=error.where, how=error.how) from error
    for location, what in _absurd(config, "", MAX_DEPTH):
        raise ModelError(
            f"config.json is not that of a model: {what}",
            where=f"{file}: {location}",
            how="correct it",
        )
    for location in _fetching(config):
        what = "config.json makes a library load files or repositories that LEMA does not check"
        raise ModelError(what, where=f"{file}: {location}", how="remove it from the file")
    if "configuration_files" in config:
        what = "config.json refers to other files, which LEMA does not check"
        raise ModelError(
            what,
            where=f"{file}: configuration_files",
            how="replace config.json by one that you trust",
        )
    return config


def _absurd(value: object, location: str, depth: int) -> Iterator[tuple[str, str]]:
    """Yield where a number is that no model has, or where a value is nested too deep, and what
    is wrong.
    """
    if depth == 0:
        yield location, "it is nested too deep"
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _absurd(inner, f"{location}.{key}" if location else key, depth - 1)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from _absurd(inner, f"{location}[{number}]", depth - 1)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        yield location, "a number of more than 64 bits"
    elif isinstance(value, int | float) and value > MAX_LAYERS and COUNTS.search(location):
        yield location, f"{value} of them, and {MAX_LAYERS} is the most that is built"
    elif isinstance(value, int | float) and value > MAX_LABELS and location.endswith("num_labels"):
        yield location, f"{value} labels, and {MAX_LABELS} are the most there are names for"


LOADED = frozenset(
    {"checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
)


def _fetching(value: dict[str, Any] | list[Any], location: str = "") -> Iterator[str]:
    """Yield where a config, or one inside it, has the classes of `transformers` load a part of the
    model from elsewhere as they make it: a pretrained backbone, or what timm is told of its model.
    """
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        here = (
            f"{location}[{key}]" if isinstance(key, int) else f"{location}.{key}".removeprefix(".")
        )
        of_timm = isinstance(value, dict) and "timm" in str(value.get("model_type"))
        if (key == "use_pretrained_backbone" and inner) or (
            of_timm and key == "architecture" and ":" in str(inner)
        ):
            yield here
        elif isinstance(inner, dict | list):
            if of_timm and key == "model_args":
                yield from (f"{here}.{name}" for name in inner if name in LOADED)
            yield from _fetching(inner, here)


COMMIT = re.compile("[0-9a-f]{40}")
REFERENCE = re.compile(r"([\w./-]+--)?\w+\.\w+")  # of a file beside the weights, or of a repository
USED = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")


def require_commit(name: str, revision: str | None) -> None:
    """Raise `ConfigError` unless code of the hub is pinned by a full commit: a branch may hold
    other code tomorrow.
    """
    if revision is None or not COMMIT.fullmatch(revision):
        what = (
            f"code of {name} is run only from a commit, and the revision is "
            f"{revision or 'not given'}"
        )
        page = f"https://huggingface.co/{name}/tree/main"
        how = f"read the code at {page}, then set revision to that commit's 40 hexadecimal digits"
        raise ConfigError(what, where="revision", how=how)


def check_code(directory: Path, *, trusted: bool) -> None:
    """Check, before anything of it is imported, that the code a model needs may run: the user
    `trusted` it, or it needs none. `ModelError`: the model is made of code of its own, and is not
    trusted; or its config asks for code of the hub; `WeightsError`: it is trusted, but the code is
    not there, or lies in a repository that nothing pins."""
    file = directory / "config.json"
    config = _read(file)
    for key, kernel in _kernels(config):
        what = (
            f"the model's config requests a kernel of the hub, {kernel!r}, which is code "
            "without a fixed version"
        )
        how = "remove it from the file; your setting attn_implementation can choose one"
        raise ModelError(what, where=f"{file}: {key}", how=how)
    if trusted:
        for source in (file, directory / "tokenizer_config.json"):
            _check_references(source)
    elif modules := _needed(config):
        raise ModelError(
            (
                "the model needs its own code, because transformers has none for type "
                f"{config.get('model_type')!r}"
            ),
            where=f"{file}: auto_map names {', '.join(modules)}",
            how="read that code; if you trust it, add --trust-remote-code (in Python: "
            "trust_remote_code=True), "
            "and for a hub id the commit you read as revision",
        )


def _needed(config: dict[str, Any]) -> list[str]:
    """The files without which the model cannot be made, as `transformers` has no classes for it."""
    from transformers import CONFIG_MAPPING

    kind = config.get("model_type")
    classes = config.get("auto_map")
    if not isinstance(classes, dict):
        return []
    types_by_class = {"AutoConfig": CONFIG_MAPPING, "AutoModelForCausalLM": known_types()}
    missing = [
        name
        for name, types in types_by_class.items()
        if not (isinstance(kind, str) and kind in types)
    ]
    return sorted({_file(str(classes[name])) for name in missing if name in classes})


def known_types() -> set[str]:
    """Return every type of causal, or image and text, model in the installed `transformers`,
    without importing them.
    """
    from transformers.models.auto import modeling_auto as auto

    return {
        *auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        *auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }


def _kernels(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """What a config, or one inside it, would have computed by a repository `owner/name`; for a
    part of it, or all.
    """
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _kernels(inner, key if key.endswith("_implementation") else name)
    elif isinstance(value, list):
        for inner in value:
            yield from _kernels(inner, key)
    elif key.endswith("_implementation") and "/" in str(value):
        yield key, str(value)


# These are torch's; the others fetch kernels of the hub when they are called.
EXPERTS = ("eager", "batched_mm", "grouped_mm")


def parts_of(config: "PreTrainedConfig") -> "list[PreTrainedConfig]":
    """Return a config and the configs of its parts."""
    from transformers import PreTrainedConfig

    inner = (getattr(config, name, None) for name in config.sub_configs)
    return [
        config,
        *(
            part
            for sub_config in inner
            if isinstance(sub_config, PreTrainedConfig)
            for part in parts_of(sub_config)
        ),
    ]


def keep_to_libraries(config: "PreTrainedConfig", file: Path) -> None:
    """Leave attention and experts to `transformers` where a config, or a part of it, chooses such
    as may fetch code of the hub or start a compiler, and warn of them in one line; the user's own
    settings may choose them. `file`: where the config comes from."""
    left = dict[str, str]()
    for part in parts_of(config):
        for name, library in (
            ("attn_implementation", LIBRARY_ATTENTION),
            ("experts_implementation", EXPERTS),
        ):
            if (value := getattr(part, f"_{name}")) is not None and value not in library:
                left[f"{name}: {value}"] = name
                setattr(part, f"_{name}_internal", None)
    if left:
        how = (
            ". Your own setting attn_implementation can choose it"
            if "attn_implementation" in left.values()
            else ""
        )
        what = (
            f"{file} has {' and '.join(left)}, which may run code that is not on this machine; "
            "it is ignored"
        )
        warnings.warn(f"{what}{how}", stacklevel=3)


def _check_references(source: Path) -> None:
    for reference in _used(_read(source).get("auto_map") or {}):
        if not isinstance(reference, str) or not REFERENCE.fullmatch(reference):
            what = (
                f"the model's code is named {reference!r}, which is no class in a file next to "
                "the weights"
            )
            how = 'write "file.Class" there; do not use this model unless you trust it'
        elif "--" in reference:
            repository = reference.partition("--")[0]
            what = (
                f"the model's code is in another repository, {repository}, at whatever it is today"
            )
            how = (
                "put that repository's .py files next to the weights, and take its name out of "
                "auto_map"
            )
        elif not (source.parent / _file(reference)).is_file():
            what = f"the model's code is not there: {_file(reference)}"
            how = (
                "copy the model's .py files into its directory; of a hub id, go online to "
                "fetch them"
            )
        else:
            continue
        raise WeightsError(what, where=f"{source}: auto_map", how=how)


def _used(auto_map: object) -> Iterator[str]:
    """The requested classes, as `module.Class`; a tokenizer may have two, or none, under one
    name.
    """
    for named in (
        [auto_map.get(name) for name in USED] if isinstance(auto_map, dict) else [auto_map]
    ):
        yield from filter(None, named if isinstance(named, list | tuple) else [named])


def _file(reference: str) -> str:
    return reference.rpartition("--")[2].partition(".")[0] + ".py"


def _read(file: Path) -> dict[str, Any]:
    """Read a JSON object; any other file counts as empty here, and fails where it is used."""
    try:
        values = json.loads(read_regular(file, MAX_BYTES))
    except (OSError, DataError, ValueError, RecursionError):
        return {}
    return values if isinstance(values, dict) else {}
