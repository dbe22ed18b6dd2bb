"""`lema config import`: files and command lines of other trainers as settings of the same run here.

Each trainer has a module or folder with a `Peer`: how its files are told, its defaults (a dated
table made from its published sources), and the translation of their values.
"""
