"""The Tinker API's own client and its cookbook are installed in an environment of their own (`tox -e
learner`); elsewhere there is nothing to collect here.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("tinker") and find_spec("tinker_cookbook") else ["*.py"]
