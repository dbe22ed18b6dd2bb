"""The Tinker API's own client is installed in an environment of its own (`tox -e learner`);
elsewhere there is nothing to collect here.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("tinker") else ["*.py"]
