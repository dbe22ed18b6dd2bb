"""Runs of TRL: the files and command lines of `trl sft`, `trl dpo` and `trl kto`."""

from lema_tools.importing.trl.peer import PEER

__all__ = ["PEER"]
