"""A run of TRL while it is translated."""

from dataclasses import dataclass

from lema_tools.importing.ledger import Ledger as AnyLedger

__all__ = ["Ledger"]


@dataclass
class Ledger(AnyLedger):
    """The values of a run of TRL and its translation.

    Args:
        kind: `sft`, `dpo` or `kto`.
    """

    kind: str = "sft"
