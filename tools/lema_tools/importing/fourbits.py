"""What `quantize_base: nf4` has in common with the 4 bits of other trainers, and what it has not.

LEMA's nf4 is bitsandbytes' with `bnb_4bit_use_double_quant=True` (docs/weights.md): blocks of 64
weights, whose scales are quantised in blocks of 256 themselves.
"""

import re

from lema_tools.importing.ledger import Ledger

__all__ = ["SCALES_TOO", "four_bits"]

SCALES_TOO = "LEMA's nf4 also quantises the scales of blocks (bitsandbytes' double quantisation)"
EXPERTS = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok",
)
"""Keys of a model's config, of which a mixture of experts has one."""
EXPERT_NAMES = re.compile(
    r"moe|mixtral|dbrx|jamba|gpt-oss|deepseek-(v|r1$)|-a\d+(\.\d+)?b", re.IGNORECASE
)
"""How published mixtures of experts are named, for models whose config is not here."""
OF_EXPERTS = (
    "LEMA quantises experts, too, and bitsandbytes leaves those that `transformers` keeps in one "
    "tensor as they are"
)


def four_bits(ledger: Ledger, key: str) -> None:
    """Carry a key that asks for bitsandbytes' nf4 with double quantisation.

    Args:
        ledger: the run.
        key: the trainer's key, such as `load_in_4bit`.
    """
    ledger.put(quantize_base="nf4")
    config = ledger.model_config
    config = config.get("text_config", config)
    named_so = not config and EXPERT_NAMES.search(str(ledger["model_name_or_path"]))
    if named_so or any(config.get(name) for name in EXPERTS):
        ledger.differs(key, f"quantize_base: nf4; {OF_EXPERTS}")
        return
    ledger.translation.same[key] = "quantize_base: nf4"
    if not config:
        ledger.translation.same[key] += (
            f" (of a mixture of experts it is another run: {OF_EXPERTS})"
        )
