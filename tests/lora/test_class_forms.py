"""What opens an adapter of a model whose published class sees images: which program, on which
class, by which names.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from clirun import assert_refused, lema
from everytype import opened
from parity import draw_b
from peft import PeftConfig, PeftModel
from publishedclass import TWO_CLASSES, logits, publish, published_class
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from lema import LemaModel
from lema.lora.files import CONFIG, WEIGHTS
from lema.model.skeleton import auto_class
from lema.plan.blueprint import draw_up
from lema.train.checkpoint import format
from lema.train.reference import REFERENCE
from lema_cpu import CpuBackend
from lema_tools.shards.convert import SHARDS, consolidate_adapter, rename_adapter, shard_adapter

# As docs/adapters.md has it.
KEY_MAPPING = {r"^model\.language_model\.": "model.", r"^language_model\.": ""}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tensors on disk are not used"),
    pytest.mark.filterwarnings("ignore:You have passed exclude_modules"),
    pytest.mark.filterwarnings("ignore:PEFT does not adapt these linear modules"),
    pytest.mark.filterwarnings("ignore:weights of experts are not adapted by default"),
]
types = pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(kind, marks=() if kind == "qwen3_5_moe" else pytest.mark.exhaustive)
        for kind in TWO_CLASSES
    ],
)


def by_peft(model: Any, directory: Path, **options: Any) -> tuple[Tensor, list[str], list[str]]:
    """The logits with an adapter that PEFT loads, and the keys that it missed and did not
    expect.
    """
    adapted = PeftModel(model, PeftConfig.from_pretrained(str(directory)))
    report = adapted.load_adapter(str(directory), "default", **options)
    return logits(adapted), report.missing_keys, report.unexpected_keys


def by_transformers(model: Any, directory: Path) -> tuple[Tensor, list[str], list[str]]:
    report = model.load_adapter(str(directory))
    return logits(model), sorted(report.missing_keys), sorted(report.unexpected_keys)


@types
def test_what_opens_an_adapter_by_the_names_of_each_class_and_of_one(
    model_type: str, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source")
    with opened(source, lora_target_parameters=None) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(tmp_path / "both")
        kept = {
            name: one.detach().clone()
            for name, one in model.lora_manager.named_parameters()
            if one.requires_grad
        }
    for form in ("published", "text"):
        assert lema("consolidate", tmp_path / "both", tmp_path / form, "--names", form) == 0
    config = AutoConfig.from_pretrained(source)

    def fresh(kind: Any) -> Any:
        return kind.from_pretrained(source, dtype=torch.float32).eval()

    text = auto_class(config)
    published = published_class(config)
    expected, missing, unexpected = by_peft(fresh(text), tmp_path / "both")
    assert (
        not missing
        and len(unexpected) == len(kept)
        and not torch.equal(expected, logits(fresh(text)))
    )
    found, missing, unexpected = by_peft(fresh(published), tmp_path / "both")
    assert not missing and len(unexpected) == len(kept) and torch.equal(found, expected)
    ways = {
        "published, PEFT, published": by_peft(fresh(published), tmp_path / "published"),
        "published, transformers, published": by_transformers(
            fresh(published), tmp_path / "published"
        ),
        **{
            f"{form}, PEFT with a mapping, text": by_peft(
                fresh(text), tmp_path / form, key_mapping=KEY_MAPPING
            )
            for form in ("both", "published", "text")
        },
        "text, PEFT, text": by_peft(fresh(text), tmp_path / "text"),
        "text, transformers, text": by_transformers(fresh(text), tmp_path / "text"),
    }
    if model_type != "dots3_note":  # whose files have the names of the class for text
        ways["both, transformers, text"] = by_transformers(fresh(text), tmp_path / "both")
        ways["published, transformers, text"] = by_transformers(fresh(text), tmp_path / "published")
    for way, (found, missing, unexpected) in ways.items():
        assert not missing and not unexpected, way
        assert torch.equal(found, expected), way
    for form in ("both", "published", "text"):
        again = LemaModel.from_pretrained(tmp_path / form, backend=CpuBackend())
        read = {
            name: one for name, one in again.lora_manager.named_parameters() if one.requires_grad
        }
        assert read.keys() == kept.keys() and all(
            torch.equal(read[name], kept[name]) for name in kept
        )
        again.close()


@types
def test_a_file_has_both_names_because_peft_loads_nothing_of_those_of_the_other_class(
    model_type: str, tmp_path: Path
) -> None:
    """Where this fails, PEFT has learnt to translate them, and the names of the published class
    alone will do.
    """
    source = publish(model_type, tmp_path / "source")
    with opened(source, lora_target_modules=["o_proj"]) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(tmp_path / "both")
    config = AutoConfig.from_pretrained(source)
    for form, kind in (("published", auto_class(config)), ("text", published_class(config))):
        rename_adapter(tmp_path / "both", tmp_path / form, form)
        bare = kind.from_pretrained(source, dtype=torch.float32).eval()
        plain = logits(bare)
        found, missing, unexpected = by_peft(bare, tmp_path / form)
        assert missing and unexpected and torch.equal(found, plain)
    sizes = {
        form: sum(one.nbytes for one in load_file(tmp_path / form / WEIGHTS).values())
        for form in ("both", "published")
    }
    assert sizes["both"] == 2 * sizes["published"]


@pytest.mark.parametrize("model_type", ["llama4", "qwen3_5"])
def test_an_adapter_with_either_names_is_divided_and_put_together_with_both(
    model_type: str, tmp_path: Path
) -> None:
    source = publish(model_type, tmp_path / "source")
    with opened(source, lora_target_modules=["q_proj", "o_proj"]) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(tmp_path / "both")
    rename_adapter(tmp_path / "both", tmp_path / "published", "published")
    expected = load_file(tmp_path / "both" / WEIGHTS)
    for form in ("both", "published"):
        shard_adapter(tmp_path / form, tmp_path / f"{form} shards", 2)
        made = consolidate_adapter(tmp_path / f"{form} shards", tmp_path / f"{form} again")
        assert made.num_tensors == len(expected) // 2
        found = load_file(made.directory / WEIGHTS)
        assert found.keys() == expected.keys() and all(
            torch.equal(found[name], expected[name]) for name in expected
        )
        configs = [
            (directory / CONFIG).read_text() for directory in (made.directory, tmp_path / form)
        ]
        assert configs[0].strip() == configs[1].strip()


def test_what_goes_with_an_adapter_goes_into_each_form_of_it(tmp_path: Path) -> None:
    """How its texts are written and end, its tokenizer, and what a preference loss compared
    with.
    """
    source = publish("qwen3_5", tmp_path / "source")
    adapter = tmp_path / "both"
    with opened(source, lora_target_modules=["q_proj", "o_proj"]) as model:
        draw_b(model.lora_manager)
        model.save_pretrained(adapter / REFERENCE)
        draw_b(model.lora_manager)
        model.save_pretrained(adapter)
    texts = {
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tool.jinja": "{{ tools }}",
        "generation_config.json": '{"eos_token_id": [2, 5]}',
        "tokenizer.json": "{}",
        "vocab.txt": "a",
        "spiece.model": "b",
    }
    (adapter / "additional_chat_templates").mkdir()
    for name, text in texts.items():
        (adapter / name).write_text(text)
    (adapter / "state.json").write_text("{}")  # of a checkpoint, which the result is not
    rename_adapter(adapter, tmp_path / "published", "published")
    shard_adapter(adapter, tmp_path / "shards", 2)
    consolidate_adapter(tmp_path / "shards", tmp_path / "again")
    for form in ("published", "shards", "again"):
        assert {name: (tmp_path / form / name).read_text() for name in texts} == texts
        assert not (tmp_path / form / "state.json").exists()
    expected = load_file(adapter / REFERENCE / WEIGHTS)
    for form, names in (
        ("published", expected.keys() & load_file(tmp_path / "published" / WEIGHTS)),
        ("again", expected),
    ):
        found = load_file(tmp_path / form / REFERENCE / WEIGHTS)
        assert found.keys() == set(names) and all(
            torch.equal(found[name], expected[name]) for name in found
        )
    again = LemaModel.from_pretrained(tmp_path / "again" / REFERENCE, backend=CpuBackend())
    again.close()


def test_the_plan_counts_what_a_checkpoint_has_under_both_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = publish("qwen3_5", tmp_path / "source")
    room = list[int]()
    monkeypatch.setattr(
        format, "check_free_bytes", lambda _directory, nbytes, _what: room.append(nbytes)
    )
    with opened(source, lora_target_modules=["q_proj", "o_proj"]) as model:
        trainer = model.get_trainer()
        ids = torch.arange(3, 12)[None]
        trainer.train_step(ids, labels=ids.clone())
        trainer.save_checkpoint(tmp_path / "checkpoint")
        planned = model.planner.blueprint.checkpoint_bytes
        assert draw_up(model.config).checkpoint_bytes == planned
    files = (tmp_path / "checkpoint").glob("*.safetensors")
    written = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    # with the optimizer's steps
    assert planned <= min(written, *room) and max(written, *room) < 1.02 * planned


def test_names_that_cannot_be_written_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = publish("qwen3_5", tmp_path / "source")
    with opened(source, lora_target_modules=["q_proj"]) as model:
        model.save_pretrained(tmp_path / "both")
    adapter = tmp_path / "both"
    out = tmp_path / "out"
    assert_refused(capfd, 3, ["already whole", "--names"], "consolidate", adapter, out)
    assert_refused(
        capfd, 2, ["no form of names called 'mine'"], "consolidate", adapter, out, "--names", "mine"
    )
    assert_refused(
        capfd, 3, ["no adapter in PEFT's format"], "consolidate", source, out, "--names", "text"
    )
    shard_adapter(adapter, tmp_path / "shards", 2)
    for shards in (tmp_path / "shards", tmp_path / "shards" / SHARDS):
        said = ["the adapter is in shards", "without --names"]
        assert_refused(capfd, 3, said, "consolidate", shards, out, "--names", "text")
    gone = ("consolidate", adapter, out, "--names", "text", "--model", "no/such")
    assert_refused(capfd, 3, ["no config of the base model"], *gone)
    assert not out.exists()
