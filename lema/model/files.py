"""The directory of a model, opened once: what is known of it before its weights or a device are."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase

from lema.compat import releases
from lema.config import LemaConfig
from lema.config.objective import OBJECTIVES
from lema.data import (
    TokenDataset,
    forms_of,
    longest_row,
    needs_tokenizer,
    num_positions,
    prepare_data,
)
from lema.data.cache import folder_of
from lema.data.chat.stop_tokens import stop_tokens_of
from lema.data.chat.template import date_for
from lema.data.dataset import first_rows
from lema.data.forms import with_chat_template
from lema.data.media.limits import MediaLimits
from lema.data.media.processor import MediaProcessor
from lema.data.media.reading import MediaReading
from lema.data.media.sources import Spool, check_folder
from lema.data.packed import PackedTokens
from lema.data.preference import PreferenceDataset, prepare_preferences
from lema.data.read import mixed
from lema.data.sets.preshuffle import last_rows_split
from lema.data.sets.sources import data_files, given_files, templates_of
from lema.data.templates.named import end_token
from lema.errors import DataError, ModelError, message_of
from lema.model.sequence.rope import read_rope, rope_of, set_rope, write_rope
from lema.storage import resolve_model
from lema.storage.hub import own_weights
from lema.storage.modelfiles import (
    check_code,
    keep_to_libraries,
    load_generation_config,
    load_processor,
    load_tokenizer,
    read_config_file,
)
from lema.storage.regular import check_inside, expanded, read_regular
from lema.storage.rendering import (
    GENERATION,
    read_row_forms,
    read_templates,
    write_generation,
    write_row_forms,
    write_templates,
)

if TYPE_CHECKING:
    from transformers import ProcessorMixin

    from lema.model.quantizable import QuantizedDirectory

__all__ = ["ModelFiles", "image_reading", "read_config", "read_data", "training_rows"]


class ModelFiles:
    """A model's directory, opened: its config and its tokenizer, without weights and without a
    device, and how texts of the model are written and end. `ModelError`: there is no model, or its
    config cannot be read.

    `trusted`: whether code that comes with the model may run. `adapter`: the directory of an
    adapter that the model has, or that training begins with, whose chat template and ends take the
    place of the model's; None: the one of the settings, if any. `weights`: where the weights are: a
    directory, one of its files, or an index. `quantized`: the directory with the weights in the
    form that `quantize_base` asks for; None: they are used as they are stored."""

    def __init__(
        self,
        settings: LemaConfig,
        *,
        trust_remote_code: bool = False,
        directory: Path | None = None,
        adapter: Path | None = None,
        quantized: QuantizedDirectory | None = None,
    ) -> None:
        self._settings = settings
        name = settings.model_name_or_path
        revision = settings.revision
        self.directory = directory or resolve_model(
            name, revision=revision, trust_remote_code=trust_remote_code
        )
        self.config = read_config(self.directory, trust_remote_code=trust_remote_code)
        self._adapter = adapter
        self._begun = settings.adapter_name_or_path
        override = settings.rope_parameters
        if override is None and self.adapter is not None:
            override = read_rope(self.adapter)
        if override is not None:
            set_rope(self.config, override)
        self._has_rope = override is not None
        self.trusted = trust_remote_code
        self.stop_tokens: tuple[int, ...] = ()  # tokens that ended the texts which were trained on
        self._noted_forms: tuple[str, ...] = ()  # of the rows that this process trains on
        self._forms = forms_of(settings)
        self.weights = Path(settings.gbi_path or own_weights(name, self.directory))
        self.quantized = quantized
        if quantized is not None:
            # Here, because it imports the models of transformers.
            from lema.model.quantizable import with_quantization

            self.weights = quantized.path
            self.config = with_quantization(self.config, quantized.path)

    def with_weights(self, quantized: QuantizedDirectory) -> ModelFiles:
        """Return the same model with weights that were quantised; all else stays as it is."""
        return ModelFiles(
            self._settings,
            trust_remote_code=self.trusted,
            directory=self.directory,
            adapter=self._adapter,
            quantized=quantized,
        )

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the tokenizer in the directory, with the chat template of the settings, or else of
        the adapter. `DataError`: there is none, or the template cannot be read."""
        how = (
            "put the tokenizer's files next to the weights, or train on rows of input_ids and "
            "labels; if it has code "
        )
        how += "of its own that you trust, add --trust-remote-code"
        tokenizer = load_tokenizer(self.directory, trusted=self.trusted, how=how)
        if self._settings.modalities == "all" and self._forms.chat_template is None:
            # which has places for images, and which some models have beside the tokenizer's
            template = getattr(self.processor, "chat_template", None)
            if template is not None and template != tokenizer.chat_template:
                tokenizer = with_chat_template(tokenizer, template)
        if self._forms.chat_template is None and self.adapter is not None:
            templates = read_templates(self.adapter)
            if templates is not None and templates != tokenizer.chat_template:
                tokenizer = with_chat_template(tokenizer, templates)
        return self._forms.with_template(tokenizer)

    @cached_property
    def processor(self) -> ProcessorMixin | None:
        """The processor in the directory, of text and images; None: there is none. Errors are those
        of `load_processor`."""
        return load_processor(self.directory, trusted=self.trusted)

    def image_processor(self) -> MediaProcessor:
        """Return what makes tokens and tensors of chats with images, videos and sounds.
        `DataError`: the directory has no processor of such."""
        processor = self.processor
        if processor is None:
            what = "the rows have images, and the model's directory has no processor of images"
            how = "put preprocessor_config.json and what was published with it next to the weights"
            raise DataError(what, where=str(self.directory), how=how)
        return MediaProcessor(processor, self.tokenizer, self.image_tokens)

    @property
    def image_tokens(self) -> list[int]:
        """The tokens that the model replaces by what its towers make of an image, a video or a
        sound."""
        kinds = ("image", "video", "audio")
        names = [f"{kind}_token_{end}" for kind in kinds for end in ("id", "index")]
        tokens = [getattr(self.config, name, None) for name in names]
        return [token for token in tokens if isinstance(token, int)]

    @cached_property
    def adapter(self) -> Path | None:
        """The directory of the adapter that the model has, or begins with; None: it has none of
        an earlier run.
        """
        if self._adapter is None and self._begun is not None:
            return resolve_model(self._begun)
        return self._adapter

    @property
    def rope_parameters(self) -> dict[str, object] | None:
        """The rotary parameters that take the place of the model's own, in full; None: it has
        these.
        """
        return rope_of(self.config) if self._has_rope else None

    def dated(self, settings: LemaConfig, then: str | None = None) -> LemaConfig:
        """Return the settings with the date of today where a chat template asks for it and they
        have none, so that the rows of a run stay the same when it is resumed on another day.
        `then`: the date when the run began, if it has begun."""
        with suppress(DataError):  # rows of token ids need no tokenizer
            names = templates_of(settings.train_data) | templates_of(settings.eval_data)
            forms = [replace(self._forms, chat_template=name) for name in sorted(names)]
            tokenizers = [form.with_template(self.tokenizer) for form in forms]
            for tokenizer in (self.tokenizer, *tokenizers):
                date = date_for(tokenizer, settings.template_date or then)
                if date != settings.template_date and date is not None:
                    return settings.model_copy(update={"template_date": date})
        return settings

    @property
    def row_forms(self) -> tuple[str, ...]:
        """The forms of the rows that were trained on, the most frequent first: as they were noted,
        or as the directory of the adapter, or else of the model, says it; empty: nothing is known.
        """
        if self._noted_forms:
            return self._noted_forms
        of_adapter = () if self.adapter is None else read_row_forms(self.adapter)
        return of_adapter or (read_row_forms(self.directory) if self.adapter is None else ())

    def end_turns_at(self, tokens: Sequence[int]) -> None:
        """Let texts end at these tokens, too: those in which a chat template ends a turn."""
        self.stop_tokens += tuple(end for end in tokens if end not in self.stop_tokens)

    def note_rows(self, rows: object) -> None:
        """Remember of the rows that are trained on in which tokens they end, and which form they
        have; of a data set of the caller's nothing is read.
        """
        rows = rows.rows if isinstance(rows, PreferenceDataset) else rows
        if isinstance(rows, TokenDataset):
            new = (form for form in rows.forms if form not in self._noted_forms)
            self._noted_forms += tuple(new)
        if not isinstance(rows, TokenDataset | PackedTokens | list) or not len(rows):
            return
        if isinstance(rows, list) and not {"input_ids", "labels"} <= rows[0].keys():
            return
        with suppress(DataError):  # rows of token ids need no tokenizer
            self.stop_tokens += tuple(
                end for end in stop_tokens_of(rows, self.tokenizer) if end not in self.stop_tokens
            )

    def generation_config(self) -> GenerationConfig | None:
        """Return the settings of generation: those beside the adapter, or the model's, and texts
        end also where those end that were trained on; None: there are none. Errors are those of
        `load_generation_config`."""
        source = self._generation_directory()
        settings = load_generation_config(source)
        if stop_tokens := self._stop_tokens():
            settings = settings or GenerationConfig.from_model_config(self.config)
            settings.eos_token_id = _with_stop_tokens(settings.eos_token_id, stop_tokens)
        return settings

    def _stop_tokens(self) -> tuple[int, ...]:
        """The tokens that texts end at besides those of the settings of generation: that ended the
        texts which were trained on, or that end a turn of a template with a name."""
        number = None
        with suppress(DataError):  # rows of token ids need no tokenizer
            number = end_token(self.tokenizer)[1]
        if number is None or number in self.stop_tokens:
            return self.stop_tokens
        return (*self.stop_tokens, number)

    def write_rendering(self, directory: Path) -> None:
        """Write into the directory of what was trained how its texts are written and end, where the
        model's own directory does not say the same: the chat template, and
        `generation_config.json`. `DiskError`: a file could not be written."""
        with suppress(DataError):
            templates = self.tokenizer.chat_template
            if templates is not None and templates != read_templates(self.directory):
                write_templates(directory, templates)
        if forms := self.row_forms:
            write_row_forms(directory, forms)
        write_rope(directory, self.rope_parameters)
        source = self._generation_directory()
        if not self.stop_tokens and source == self.directory:
            return
        file = source / GENERATION
        if file.is_symlink() or file.exists():
            load_generation_config(source)  # which refuses what is no such file
            values: dict[str, Any] = json.loads(read_regular(file, inside=True))
        else:
            values = GenerationConfig.from_model_config(self.config).to_diff_dict()
            # because transformers would make it of the model's config again
            values.pop("_from_model_config", None)
        if self.stop_tokens:
            values["eos_token_id"] = _with_stop_tokens(values.get("eos_token_id"), self.stop_tokens)
            pad = values.get("pad_token_id")
            vocab_size = getattr(self.config.get_text_config(), "vocab_size", None)
            if pad is None or not 0 <= pad < (vocab_size or pad + 1):
                named = (self.tokenizer.pad_token_id, self.stop_tokens[0])
                values["pad_token_id"] = next(
                    token_id
                    for token_id in named
                    if token_id is not None and token_id < (vocab_size or token_id + 1)
                )
        write_generation(directory, values)

    def _generation_directory(self) -> Path:
        """The directory whose settings of generation apply."""
        has_file = self.adapter is not None and (self.adapter / GENERATION).is_file()
        return self.adapter if has_file and self.adapter is not None else self.directory


def _with_stop_tokens(
    configured: int | list[int] | None, stop_tokens: Sequence[int]
) -> int | list[int]:
    """Return the tokens that texts end at, and further ones; one alone as a number, as it is
    published.
    """
    token_ids = (
        []
        if configured is None
        else [configured]
        if isinstance(configured, int)
        else list(configured)
    )
    token_ids += [end for end in stop_tokens if end not in token_ids]
    return token_ids[0] if len(token_ids) == 1 else token_ids


def read_config(directory: Path, *, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Read `config.json` of a model directory. `ModelError`: no config, one that this
    `transformers` cannot read, or one that needs code that is not trusted; `WeightsError`: trusted
    code is not there, or is a link out of the directory. `trust_remote_code`: run the model's own
    code where it has some; no code is run without it."""
    read_config_file(directory)
    _check_adapter(directory)
    check_code(directory, trusted=trust_remote_code)
    for file in sorted(directory.glob("*.py")) if trust_remote_code else ():
        check_inside(file)
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    # Catch any error: configs are code of others, run on a file from outside, and the message is
    # passed on.
    except Exception as error:
        raise ModelError(
            f"transformers cannot read this config: {message_of(error)}",
            where=str(directory / "config.json"),
            how=(
                "check the file, or upgrade transformers if the model is newer than it: "
                f"{releases('transformers')}"
            ),
        ) from error
    assert isinstance(config, PreTrainedConfig)
    keep_to_libraries(config, directory / "config.json")
    for part in filter(None, (config, getattr(config, "text_config", None))):
        # `lema.engine.head.routers` reads the file
        if getattr(part, "output_router_logits", False):
            # because no router runs where the model's own forward does
            part.output_router_logits = False
    return config


def _check_adapter(directory: Path) -> None:
    """Refuse, with `ModelError`, an adapter in the model's directory, which `from_pretrained`
    would attach.
    """
    file = directory / "adapter_config.json"
    if file.is_symlink() or file.exists():
        what = "there is an adapter beside the model, which from_pretrained would make a part of it"
        how = (
            "move the adapter's files to a directory of their own; to train it further, name "
            "that adapter_name_or_path"
        )
        raise ModelError(what, where=str(file), how=how)


def training_rows(
    config: LemaConfig, files: ModelFiles
) -> tuple[TokenDataset | PreferenceDataset, TokenDataset | PreferenceDataset | None]:
    """Read `train_data`; return the rows that a run trains on, and those that `eval_split` holds
    back, if it does.
    """
    rows = read_data(config, files, config.train_data)
    eval_rows: TokenDataset | PreferenceDataset | None = None
    if config.preshuffle:
        rows = rows.preshuffled(config.seed)
    if config.eval_split and config.preshuffle:
        rows, eval_rows = last_rows_split(rows, config.eval_split)
    elif config.eval_split:
        rows, eval_rows = rows.split(config.eval_split, config.seed)
    return first_rows(mixed(config, rows), config.max_train_samples), eval_rows


def image_reading(config: LemaConfig, files: ModelFiles) -> MediaReading:
    """Return what the images of rows are read with. `DataError`: their folder is not there."""
    folder = None if config.image_folder is None else expanded(config.image_folder)
    limits = MediaLimits(
        folder,
        config.image_urls,
        config.max_image_pixels,
        config.max_image_bytes,
        config.max_media_bytes,
        config.max_media_seconds,
        config.max_video_frames,
        config.video_fps,
    )
    check_folder(limits)
    spool = Spool(None if config.offload_dir is None else expanded(config.offload_dir))
    return MediaReading(files.image_processor, limits, spool, files.image_tokens)


def read_data(config: LemaConfig, files: ModelFiles, data: Any) -> Any:
    """Read and tokenise data files, or rows, with the tokenizer of a model and the config's limits.

    Returns a `TokenDataset`; for an objective of examples, a `PreferenceDataset`. Raises
    `ConfigError` where `max_length` is more than the model's positions, `DataError` where the data
    is missing or malformed.
    """
    if data is config.train_data or data is config.eval_data:
        first = config.max_train_samples if data is config.train_data else config.max_eval_samples
        data = data_files(cast("Any", data), first)  # of data sets by name, one after the other
    text = files.config.get_text_config()
    forms = replace(forms_of(config), chat_template=None)  # the tokenizer has it
    longest = longest_row(config.max_length, num_positions(text, config))
    options: dict[str, Any] = {
        "max_length": sys.maxsize
        if config.packing == "wrapped"
        else longest,  # which are cut into packs later
        "overlong": config.overlong,
        "vocab_size": getattr(text, "vocab_size", None),
        "forms": forms,
        "cache": folder_of(config.data_cache),
    }
    if config.modalities == "all":
        options["images"] = image_reading(config, files)
    examples = OBJECTIVES[config.objective].examples
    if examples != "rows":
        return prepare_preferences(
            data, files.tokenizer, labelled=examples == "labelled rows", **options
        )
    data = named if (named := given_files(data)) is not None else data
    has_texts = named is None or needs_tokenizer(named, forms)
    return prepare_data(data, files.tokenizer if has_texts else None, **options)
