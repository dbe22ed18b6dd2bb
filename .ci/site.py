"""A hook of mkdocs.yml: links of a page to files outside docs/ become the files' names, because
no site has them.
"""

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]\[]+)\]\(((?:\.\./)+[^)\s#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page with such links written as names; links to other pages stay as they are."""
    folder = Path(page.file.src_uri).parent

    def written(link: re.Match[str]) -> str:
        depth = link[2].count("../")
        if depth <= len(folder.parts):
            return link[0]
        target = link[2].rsplit("../", 1)[1].rstrip("/")
        return f"`{target}`" if link[1].strip("`/") in target else f"{link[1]} (`{target}`)"

    return _LINK.sub(written, markdown)
