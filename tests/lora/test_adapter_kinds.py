"""Adapters that train more than LoRA's matrices: what PEFT saved is read, says the same, is
saved again and merged.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from smallrun import VOCABULARY, streamed_logits, whole_logits, write_model
from transformers import AutoModelForCausalLM

from lema import LemaModel
from lema.convert import merge_adapter
from lema.errors import AdapterError
from lema.lora.files import WEIGHTS
from lema_cpu import CpuBackend

NAMES = {
    "llama": {"linear": "q_proj", "embeddings": "embed_tokens", "norm": "input_layernorm"},
    "gpt2": {"linear": "c_attn", "embeddings": "wte", "norm": "ln_1"},
}

# By the words of NAMES, which differ from model to model.
KINDS: dict[str, dict[str, Any]] = {
    "the head": {"modules_to_save": ["lm_head"]},
    "the embeddings": {"modules_to_save": ["embeddings"]},
    "both ends": {"modules_to_save": ["embeddings", "lm_head"]},
    "both ends, kept tied": {
        "modules_to_save": ["embeddings", "lm_head"],
        "ensure_weight_tying": True,
    },
    "norms": {"modules_to_save": ["norm"]},
    "all biases": {"bias": "all"},
    "biases of what is adapted": {"bias": "lora_only"},
    "magnitudes": {"use_dora": True},
    "LoRA of the head": {"target_modules": ["linear", "lm_head"]},
    "LoRA of the embeddings": {"target_modules": ["linear", "embeddings"]},
    "rows of the embeddings": {"trainable_token_indices": [7, 3, 5]},
}


@contextmanager
def unwarned() -> Iterator[None]:
    """PEFT warns of unusual wishes; what it does then is what is tested."""
    with warnings.catch_warnings():
        for words in (
            "Model has `tie_word_embeddings=True`",
            "Model with `tie_word_embeddings=True`",
            "Input and output embeddings are no longer tied",
            "Setting `save_embedding_layers` to `True`",
            "`lora_bias=True` was passed",
            "Adapter 'default': .* invalid shape",
            "fan_in_fan_out is set to",
        ):
            warnings.filterwarnings("ignore", message=words)
        yield


MODELS = {
    (name, tied): f"{name}, {'tied' if tied else 'untied'}"
    for name in NAMES
    for tied in (False, True)
}
# PEFT saves what it ties under the one name only, and of that of the other model it does not know
# that it is tied.
CASES = [
    (model, kind)
    for model in MODELS
    for kind in KINDS
    if kind != "both ends, kept tied" or model == ("llama", True)
]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, bool]], Path]:
    return cache(
        lambda key: write_model(
            tmp_path_factory.mktemp("model"), key[0], tie_word_embeddings=key[1]
        )
    )


def in_turn(model: tuple[str, bool], kind: str) -> bool:
    """Whether a session of `tox` has a case: every kind with both architectures, with tied and
    untied embeddings.
    """
    place = list(MODELS).index(model)
    return place in ((0, 3), (1, 2))[list(KINDS).index(kind) % 2]


@pytest.fixture(
    params=[
        pytest.param(case, marks=() if in_turn(*case) else pytest.mark.exhaustive) for case in CASES
    ],
    ids=lambda case: f"{MODELS[case[0]]}, {case[1]}",
)
def case(request: pytest.FixtureRequest) -> tuple[tuple[str, bool], str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture
def base(model_of: Callable[[tuple[str, bool]], Path], case: tuple[tuple[str, bool], str]) -> Path:
    return model_of(case[0])


@pytest.fixture
def adapter(base: Path, case: tuple[tuple[str, bool], str], tmp_path: Path) -> Path:
    """Write an adapter with PEFT alone, every number of it moved."""
    (name, _), kind = case
    options = {"target_modules": ["linear"], **KINDS[kind]}
    for key in ("target_modules", "modules_to_save"):
        if key in options:
            options[key] = [NAMES[name].get(word, word) for word in options[key]]
    return save(
        base, LoraConfig(r=3, lora_alpha=6, task_type="CAUSAL_LM", **options), tmp_path / "adapter"
    )


def save(base: Path, config: LoraConfig, directory: Path) -> Path:
    generator = torch.Generator().manual_seed(5)
    with unwarned():
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        model.save_pretrained(directory)
    return directory


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (3, 11), generator=torch.Generator().manual_seed(9))


def loaded_by_peft(base: Path, adapter: Path) -> PeftModel:
    with unwarned():
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()


@pytest.mark.sampled(3)
def test_what_peft_saved_says_the_same_and_is_saved_again(
    base: Path, adapter: Path, ids: torch.Tensor, tmp_path: Path
) -> None:
    with unwarned():
        model = LemaModel.from_pretrained(adapter, device="cpu", backend=CpuBackend(poison=True))
    said = streamed_logits(model, ids)
    assert torch.equal(said, whole_logits(loaded_by_peft(base, adapter), ids))
    model.save_pretrained(tmp_path / "again")
    model.close()
    saved = load_file(tmp_path / "again" / WEIGHTS)
    given = load_file(adapter / WEIGHTS)
    assert all(torch.equal(saved[key], given[key]) for key in saved)
    # PEFT adds frozen embeddings, to be safe
    assert all("base_layer" in key for key in given.keys() - saved.keys())
    assert torch.equal(whole_logits(loaded_by_peft(base, tmp_path / "again"), ids), said)


@pytest.mark.sampled(4)
def test_merging_gives_what_peft_gives(
    base: Path, adapter: Path, case: tuple[tuple[str, bool], str], ids: torch.Tensor, tmp_path: Path
) -> None:
    (_, tied), kind = case
    whole = loaded_by_peft(base, adapter)
    said = whole_logits(whole, ids)
    with unwarned():
        out = merge_adapter(adapter, tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(out)
        expected = whole.merge_and_unload()
    found = merged.state_dict()
    wanted = expected.state_dict()
    assert found.keys() == wanted.keys()
    differing = [key for key in wanted if not torch.equal(found[key], wanted[key])]
    if tied and kind.startswith("LoRA of"):
        # PEFT merges into the one tensor, and so into the other end as well.
        assert set(differing) <= {
            "lm_head.weight",
            f"{merged.base_model_prefix}.{embeddings(merged)}.weight",
        }
        assert len(differing) == 1
    else:
        assert differing == []
        assert merged.config.tie_word_embeddings == expected.config.tie_word_embeddings
    torch.testing.assert_close(whole_logits(merged, ids), said)


def embeddings(model: Any) -> str:
    found = [
        name
        for name, part in model.base_model.named_modules()
        if part is model.get_input_embeddings()
    ]
    return found[0]


def test_a_bias_of_b_that_nothing_can_take_up_is_not_merged(
    model_of: Callable[[tuple[str, bool]], Path], tmp_path: Path
) -> None:
    base = model_of(("llama", False))
    config = LoraConfig(r=3, target_modules=["q_proj"], task_type="CAUSAL_LM", lora_bias=True)
    adapter = save(base, config, tmp_path / "adapter")
    with unwarned(), pytest.raises(AdapterError, match="B has a bias") as caught:
        merge_adapter(adapter, tmp_path / "merged")
    assert caught.value.where == "model.layers.0.self_attn.q_proj"
    assert not (tmp_path / "merged").exists()
