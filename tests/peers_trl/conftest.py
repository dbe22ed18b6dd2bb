"""TRL is installed in an environment of its own (`tox -e trl`); elsewhere there is nothing to collect here."""

from importlib.util import find_spec

OURS = ["streamed_trl", "streamed_uses", "trl_grpo", "trl_masks", "trl_objectives", "trl_page", "trl_processes"]
OURS += ["trl_reward", "trl_trainers"]
collect_ignore = [] if find_spec("trl") else ["trlruns.py", *(f"test_{name}.py" for name in OURS)]
