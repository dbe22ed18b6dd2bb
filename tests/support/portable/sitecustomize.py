"""Hides, from LEMA, what other systems than Linux lack; Python imports this by its name where it begins."""

from hidden import hide, of_lema

hide(of_lema)
