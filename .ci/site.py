"""A hook of mkdocs.yml: links of a page to files outside docs/ become the files' names, because
no site has them; and pages for looking up come after pages for a task in the search.
"""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]\[]+)\]\(((?:\.\./)+[^)\s#]+)(?:#[^)]*)?\)")


# How much a page counts in the search, by the beginning of its path: the first that fits.
_SEARCH_BOOSTS = {
    "api": 0.01,
    "internals/": 0.05,
    "architecture": 0.1,
    "benchmarks/": 0.1,
    "coverage": 0.1,
    "models": 0.3,
    "commands": 0.3,
    "settings": 0.3,
}


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with such links written as names; links to other pages stay as they are."""
    path = page.file.src_uri
    folder = Path(path).parent
    boosts = [boost for start, boost in _SEARCH_BOOSTS.items() if path.startswith(start)]
    if boosts:
        page.meta["search"] = {"boost": boosts[0]}

    def written(link: re.Match[str]) -> str:
        depth = link[2].count("../")
        if depth <= len(folder.parts):
            return link[0]
        target = link[2].rsplit("../", 1)[1].rstrip("/")
        return f"`{target}`" if link[1].strip("`/") in target else f"{link[1]} (`{target}`)"

    return _LINK.sub(written, markdown)
