"""What a run that trains every weight has otherwise than one with an adapter: it is a phase of
LEMA, which has fewer settings.
"""

from lema.config import LemaConfig
from lema.config.objective import OF_OBJECTIVES
from lema.config.results import OF_PLAIN_RUNS
from lema.train.phases.file import OF_ROWS
from lema_tools.importing.ledger import Ledger

__all__ = ["full_run", "masters"]

NUMBERS = ("objective", "loss_type", "router_aux_loss_coef", "quantize_base")
"""Settings of runs with an adapter alone that change numbers."""


def masters(ledger: Ledger, key: str, dtype: str, peer: str) -> None:
    """Note that weights which the trainer loads in half precision, and updates in it, are float32
    in LEMA.

    Args:
        ledger: the run.
        key: the trainer's key of the type.
        dtype: the type, such as `bfloat16`.
        peer: the trainer's name.
    """
    ledger.translation.same.pop(key, None)
    what = (
        f"dtype: {dtype} with float32 masters; {peer} updates the {dtype} weights themselves "
        "(unless DeepSpeed or FSDP has masters, too), and loses updates that are small compared "
        "with the weight (docs/phases.md)"
    )
    ledger.differs(key, what)


def full_run(ledger: Ledger, optimizer: str) -> None:
    """Take settings out that a full fine-tune has not, and note those that had an effect.

    Args:
        ledger: the run.
        optimizer: the trainer's key of its optimizer.
    """
    settings = ledger.translation.settings
    if settings.get("trains") != "full":
        return
    if settings.get("loss_type") == "nll":
        del settings["loss_type"]
    defaults = LemaConfig.defaults()
    keys = {text.partition(":")[0]: key for key, text in ledger.translation.same.items()}
    for name in (*OF_PLAIN_RUNS, *OF_OBJECTIVES, "quantize_base"):
        if name not in OF_ROWS and name in settings and settings.pop(name) != defaults[name]:
            _note(ledger, keys.get(name, name), changes_numbers=name in NUMBERS)
    _optimizer(ledger, optimizer)


def _note(ledger: Ledger, key: str, *, changes_numbers: bool) -> None:
    translation = ledger.translation
    translation.same.pop(key, None)
    translation.differs[:] = [note for note in translation.differs if note.key != key]
    what = "LEMA has it for runs with an adapter alone, and not for those that train every weight"
    ledger.lost(key, what, changes_numbers=changes_numbers)


def _optimizer(ledger: Ledger, key: str) -> None:
    """Weights train with AdamW, whose moments are beside them in host memory."""
    optimizer = ledger.translation.settings.get("optim", "adamw_torch")
    ledger.put(optim="adamw_torch")
    if optimizer == "adamw_torch":
        return
    ledger.translation.same.pop(key, None)
    if optimizer == "adamw_torch_fused":
        what = "optim: adamw_torch, the same but for rounding, about 1e-7 of a loss in float32"
        ledger.differs(key, what, changes_numbers=False)
    else:
        ledger.lost(key, "weights of the model train with adamw_torch alone")
