"""Runs of LLaMA-Factory: the files and command lines of `llamafactory-cli train`."""

from lema_tools.importing.llamafactory.peer import PEER

__all__ = ["PEER"]
