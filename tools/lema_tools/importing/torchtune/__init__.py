"""Runs of torchtune: the files of its recipes, and the command lines of `tune run`."""

from lema_tools.importing.torchtune.peer import PEER

__all__ = ["PEER"]
