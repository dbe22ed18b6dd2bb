"""The browser's test takes most of an hour, so only `tox -e planner` collects it, which sets
`PLANNER_IN_BROWSER`.
"""

import os

collect_ignore = [] if os.environ.get("PLANNER_IN_BROWSER") else ["test_browser.py"]
