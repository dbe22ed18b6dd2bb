"""The model of axolotl's runs: its files, and the types that it is kept in."""

from collections.abc import Mapping

from lema_tools.importing.full import masters
from lema_tools.importing.ledger import Ledger
from lema_tools.importing.ropes import carry_rope

__all__ = ["model"]

IMAGES = ("processor_type", "processor_kwargs", "image_size", "freeze_mm_modules")
PLUGINS = ("LigerPlugin", "CutCrossEntropyPlugin", "KernelsPlugin")
"""The last words of plugins that are kernels alone."""


def model(ledger: Ledger) -> None:
    """Translate which model it is, and the types of its weights and products."""
    ledger.carry("base_model", "model_name_or_path")
    ledger.put(revision=ledger["revision_of_model"])
    ledger.same("revision_of_model", f"revision: {ledger['revision_of_model']}")
    tokenizer = ledger["tokenizer_config"]
    if tokenizer and tokenizer != ledger["base_model"]:
        ledger.lost("tokenizer_config", "LEMA takes the tokenizer of the model's directory")
    else:
        ledger.same("tokenizer_config", "the model's own")
    _types(ledger)
    for key in IMAGES:
        if ledger[key]:
            ledger.lost(key, "LEMA trains the text part of models with images, on text")
    for key in ("model_config", "overrides_of_model_config", "overrides_of_model_kwargs"):
        if not ledger[key]:
            continue
        overrides = ledger[key] if isinstance(ledger[key], Mapping) else {key: ledger[key]}
        others = overrides.keys() - carry_rope(ledger, overrides)
        if others:
            what = "LEMA reads the model's config.json: change the values there"
            ledger.lost(key, what)
        else:
            ledger.same(key, "rope_parameters")
    if ledger["tokens"] or ledger["added_tokens_overrides"]:
        key = "tokens" if ledger["tokens"] else "added_tokens_overrides"
        what = "LEMA adds no tokens: add them to the model's tokenizer and embeddings first"
        ledger.lost(key, what)
    _special_tokens(ledger)
    _plugins(ledger)


def _types(ledger: Ledger) -> None:
    """Carry the dtype that axolotl loads the weights in, on a device that has bfloat16."""
    bf16 = ledger["bf16"] or ledger["bfloat16"]
    half = ledger["fp16"] or ledger["float16"]
    if bf16 == "auto" and ledger["fp16"]:
        bf16 = False
    dtype = "bfloat16" if bf16 else "float16" if half or ledger["load_in_8bit"] else "float32"
    ledger.carry("bf16", "dtype", dtype)
    for key in ("bfloat16", "fp16", "float16", "float32"):
        ledger.same(key, f"dtype: {dtype}")
    if half and not bf16:
        del ledger.translation.same["bf16"]
        key = "fp16" if ledger["fp16"] else "float16"
        ledger.translation.same.pop(key, None)
        ledger.differs(key, "dtype: float16; LEMA does not scale gradients, which axolotl does")
    elif dtype == "bfloat16" and not ledger["adapter"]:
        masters(ledger, "bf16", dtype, "axolotl")
    elif bf16 == "full":
        del ledger.translation.same["bf16"]
        what = "dtype: bfloat16 under autocast; with `full` axolotl computes adapters in float32"
        ledger.differs("bf16", what)
    ledger.carry("tf32", "tf32", ledger["tf32"] is True)
    ledger.carry("torch_compile", "torch_compile", ledger["torch_compile"] is True)


def _special_tokens(ledger: Ledger) -> None:
    tokens = dict(ledger["special_tokens"] or {})
    tokens.pop("pad_token", None)
    if any(tokens.values()):
        names = ", ".join(tokens)
        what = f"LEMA takes {names} of the tokenizer's files: change tokenizer_config.json"
        ledger.lost("special_tokens", what)
    else:
        ledger.same("special_tokens", "a pad token changes no number")


def _plugins(ledger: Ledger) -> None:
    if not ledger["plugins"]:
        return
    names = [str(name).rpartition(".")[2] for name in ledger["plugins"]]
    others = [name for name in names if name not in PLUGINS]
    if others:
        ledger.lost("plugins", f"LEMA has no {', '.join(others)}")
    else:
        what = "kernels, which change results by rounding alone"
        ledger.lost("plugins", what, changes_numbers=False)
