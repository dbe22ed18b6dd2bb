"""TRL is installed in an environment of its own (`tox -e trl`); elsewhere there is nothing to collect here."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("trl") else ["test_trl_masks.py", "test_trl_objectives.py", "test_trl_trainers.py"]
