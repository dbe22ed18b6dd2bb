"""TRL is installed in an environment of its own (`tox -e trl`); elsewhere there is nothing to collect here."""

from importlib.util import find_spec

collect_ignore = (
    [] if find_spec("trl") else ["test_streamed_trl.py", "test_streamed_uses.py", "test_trl_trainers.py", "trlruns.py"]
)
