"""Files of models and adapters from strangers, mutated by the thousand: each is refused in words,
or changes nothing.

A quarter of the cases each: the header of a safetensors file, the index of shards, `config.json`,
and the two files of an adapter. What is accepted must be what the unharmed file was: the same
tensors, of the same shapes and types, at the same places; for a config, a model whose every tensor
fits what is stored. What is refused is refused with a `LemaError` that names the file. Nothing runs
code, computes for 5 seconds, or doubles the memory of the process.

A header that is sound and says something else cannot be told from the original by itself: one that
exchanges two tensors of the same type and shape, for one. The fingerprint beside an adapter tells,
for it knows the bytes.
"""

import builtins
import json
import resource
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    PreTrainedConfig,
)
from transformers.utils import logging

from faults.mutations import mutate, mutate_bytes
from faults.outcome import Outcome
from faults.patience import TooLong, patience
from lema.errors import LemaError
from lema.lora import inject_lora_params
from lema.lora.attach import configured_lora
from lema.lora.files import CONFIG, WEIGHTS, load_weights, read_settings
from lema.model import meta_model, read_config
from lema.model.skeleton import find_layers
from lema.model.weight_names import map_names, match_names
from lema.storage import GlobalBinaryIndex
from lema.storage.index import INDEX_NAME, SINGLE_NAME

__all__ = ["KINDS", "run"]

SECONDS = 5.0
RAN = "lema_fault_ran_code"
CODE = (
    f"import builtins\nbuiltins.{RAN} = True\nfrom transformers import PreTrainedConfig as Evil\n"
)
SIZES = {"vocab_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
KEYS: tuple[tuple[str, Any], ...] = (
    ("auto_map", {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}),
    ("auto_map", {"AutoConfig": "someone/else--evil.Evil"}),
    ("auto_map", ["evil.Evil", None]),
    ("configuration_files", ["config.1.0.0.json"]),
    ("_attn_implementation_internal", "someone/kernel"),
    ("attn_implementation", {"": "someone/kernel"}),
    ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ("rope_parameters", {"rope_type": "linear", "factor": 1e12}),
    ("max_position_embeddings", 10**9),
    ("num_hidden_layers", 10**9),
    ("vocab_size", 10**12),
    ("hidden_size", 10**15),
    ("model_type", "mistral"),
    ("torch_dtype", "float16"),
    ("dtype", "float8_e4m3fn"),
    ("layer_types", ["full_attention"] * 3),
    ("tie_word_embeddings", True),
    ("is_encoder_decoder", True),
    ("base_model_pp_plan", {"layers": [["hidden_states"], ["hidden_states"]]}),
)
WORDS = ("F32", "F16", "BF16", "I32", "F8_E4M3", "U8", "BOOL", "llama", "gpt2", "mixtral", "lm_head.weight", "LORA",
         "model.safetensors", "lora_only", "all-linear", "(a+)+$", "float16", "gelu", "yarn", "evil.Evil")  # fmt: skip


class Subject:
    """A model or adapter on disk, one file of which is replaced by what a case makes of it."""

    def __init__(
        self, name: str, file: Path, open_it: Callable[[], None], header: bool = False
    ) -> None:
        self.name = name
        self.file = file
        self.open = open_it
        self.header = header
        self.original = file.read_bytes()

    def case(self, random: Random) -> bytes:
        """Return the file's content with something wrong."""
        keys = KEYS if self.file.name == "config.json" else ()
        if not self.header:
            return mutate(json.loads(self.original), random, WORDS, keys)
        length = int.from_bytes(self.original[:8], "little")
        data = self.original[8 + length :]
        if random.random() < 0.1:
            whole = mutate_bytes(self.original[: 8 + length], random) + data
            return whole[: random.randrange(len(whole))] if random.random() < 0.3 else whole
        text = mutate(json.loads(self.original[8 : 8 + length]), random, WORDS)
        claimed = (
            len(text)
            if random.random() < 0.97
            else random.choice((0, len(text) - 1, 2**40, 2**64 - 1))
        )
        return claimed.to_bytes(8, "little") + text + data


class WrongAccept(Exception):
    """What was opened is not what the unharmed file holds."""


def run(count: int, seed: int = 0, report: Callable[[str], None] | None = None) -> Outcome:
    """Open `count` mutated files, each drawn from the seed and its own number.

    Args:
        count: of cases; a quarter for each kind of file.
        seed: of all that is drawn.
        report: is told how far it is.
    """
    started = time.perf_counter()
    failures = []
    endings = Counter[str]()
    with tempfile.TemporaryDirectory() as name, _quiet():
        subjects = [make(Path(name) / kind) for kind, make in KINDS.items()]
        for kind in subjects:  # what is loaded once is not taken for growth
            for one in kind:
                one.open()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for number in range(count):
            kind = subjects[number % len(subjects)]
            random = Random(f"{seed}:{number}")
            subject = kind[random.randrange(len(kind))]
            ending = _ending(subject, random)
            endings[f"{subject.name}: {ending.split(':')[0]}"] += 1
            if not ending.startswith(("refused", "accepted")):
                failures.append(f"seed {seed}, case {number}, {subject.name}: {ending}")
            if report is not None and (number + 1) % 5000 == 0:
                report(f"{number + 1:,} mutated files, {len(failures)} failures")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / before
    if grown > 2:
        failures.append(f"the process grew to {grown:.1f} times its size")
    if report is not None:
        report("; ".join(f"{what} {number:,}" for what, number in sorted(endings.items())))
    return Outcome(
        "mutated safetensors headers, index, config, adapter config",
        "refused by name, or the same model; no crash, no hang over 5 s",
        count,
        count - min(count, len(failures)),
        tuple(failures),
        time.perf_counter() - started,
    )


def _ending(subject: Subject, random: Random) -> str:
    subject.file.write_bytes(subject.case(random))
    try:
        with patience(SECONDS):
            subject.open()
    except LemaError as error:
        named = str(subject.file.parent) in f"{error.what} {error.where}" or error.where.startswith(
            "lora_"
        )
        ending = "refused" if named else f"names no file: {error!r:.300}"
    except WrongAccept as error:
        ending = f"wrong accept: {error}"
    except TooLong:
        ending = f"took more than {SECONDS} s"
    except Exception as error:  # noqa: BLE001
        ending = f"crash: {type(error).__name__}: {error!s:.300}"
    else:
        ending = "accepted"
    finally:
        subject.file.write_bytes(subject.original)
    if hasattr(builtins, RAN):
        delattr(builtins, RAN)
        ending = "ran code of the model's"
    return ending


@contextmanager
def _quiet() -> Iterator[None]:
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)


def _write(config: PreTrainedConfig, directory: Path, shard: str = "1GB") -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory, max_shard_size=shard)
    (directory / "evil.py").write_text(CODE)
    (directory / "config.1.0.0.json").write_text("{}")
    return directory


def _llama() -> PreTrainedConfig:
    return LlamaConfig(**SIZES, **LLAMA, num_hidden_layers=2, max_position_embeddings=16)


def _described(index: GlobalBinaryIndex) -> dict[str, Any]:
    first = {
        file: min(one.offset for one in index.values() if one.file == file) for file in index.files
    }
    return {
        name: (one.file.name, one.offset - first[one.file], one.nbytes, one.dtype, one.shape)
        for name, one in index.items()
    }


def _headers(place: Path) -> list[Subject]:
    return [_model_file(_write(_llama(), place), SINGLE_NAME, header=True)]


def _indexes(place: Path) -> list[Subject]:
    return [_model_file(_write(_llama(), place, "2KB"), INDEX_NAME, header=False)]


def _model_file(directory: Path, name: str, *, header: bool) -> Subject:
    skeleton = meta_model(read_config(directory), torch.float32)
    original = _described(GlobalBinaryIndex(directory))

    def open_it() -> None:
        index = GlobalBinaryIndex(directory)
        match_names(skeleton, index)
        if (found := _described(index)) != original:
            raise WrongAccept(
                str(
                    [one for one in found if found[one] != original.get(one)]
                    or "tensors are missing"
                )
            )

    return Subject("header" if header else "index", directory / name, open_it, header)


def _configs(place: Path) -> list[Subject]:
    mixture = MixtralConfig(
        **SIZES, **LLAMA, num_hidden_layers=2, num_local_experts=2, max_position_embeddings=16
    )
    configs = {
        "llama": _llama(),
        "gpt2": GPT2Config(**SIZES, n_embd=8, n_layer=2, n_head=2, n_positions=16),
        "mixtral": mixture,
    }
    return [_config(_write(config, place / name)) for name, config in configs.items()]


def _config(directory: Path) -> Subject:
    index = GlobalBinaryIndex(directory)

    def open_it() -> None:
        config = read_config(directory)
        model = meta_model(config, torch.float32)
        names = map_names(model, index)
        find_layers(model)
        state: Mapping[str, Tensor] = model.state_dict()
        stored = {name: one.shape for name, one in names.stored.items()}
        stored |= {name: stored[source] for name, source in names.tied.items()}
        wrong = [
            name
            for name, tensor in state.items()
            if stored.get(name) != tuple(tensor.shape) and name not in names.unstored_buffers
        ]
        if wrong:
            raise WrongAccept(f"{wrong[0]} does not fit what is stored")

    return Subject("config", directory / "config.json", open_it)


def _adapters(place: Path) -> list[Subject]:
    base = _write(_llama(), place / "base")
    adapter = place / "adapter"
    torch.manual_seed(1)
    whole = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    get_peft_model(whole, config).save_pretrained(adapter)
    # Copied: what `load_file` gives is the file itself, mapped into memory, and that is written
    # over.
    original = {name: tensor.clone() for name, tensor in load_file(adapter / WEIGHTS).items()}
    read = read_config(base)

    def open_it() -> None:
        settings, saved = read_settings(adapter, model_name_or_path=str(base))
        skeleton = meta_model(read, torch.float32)
        adapted = inject_lora_params(
            skeleton, saved or configured_lora(skeleton, settings), torch.device("cpu"), seed=None
        )
        load_weights(adapted, adapter, find_layers(skeleton)[0])
        found = get_peft_model_state_dict(adapted, save_embedding_layers=False)
        if found.keys() != original.keys() or not all(
            torch.equal(found[name], original[name]) for name in original
        ):
            raise WrongAccept("the adapter's tensors are others")

    return [
        Subject("adapter config", adapter / CONFIG, open_it),
        Subject("adapter config", adapter / CONFIG, open_it),
        Subject("adapter header", adapter / WEIGHTS, open_it, header=True),
    ]


KINDS: Mapping[str, Callable[[Path], list[Subject]]] = {
    "headers": _headers,
    "indexes": _indexes,
    "configs": _configs,
    "adapters": _adapters,
}
