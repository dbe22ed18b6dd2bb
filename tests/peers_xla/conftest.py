"""torch_xla is installed in an environment of its own (`tox -e xla`); elsewhere there is nothing
to collect here.
"""

from importlib.util import find_spec

collect_ignore = [] if find_spec("torch_xla") else ["test_lazy_training.py", "xlawork.py"]
