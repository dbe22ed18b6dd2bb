"""Names from elsewhere are shown letter by letter in Markdown, and are neither HTML nor links
nor cells of a table.
"""

import ast
import re
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from lema.config import LemaConfig, markdown
from lema.train.checkpoint.card import model_card

NAMES = {
    "HTML": "<script>alert(1)</script><img src=x onerror=alert(1)>",
    "entities": "&lt;b&gt; &amp; &#60;",
    "a link": "[x](javascript:alert(1))",
    "a reference": "[x][y] [y]: javascript:1",
    "a picture": "![x](http://x.y/z.png)",
    "an address": "see http://x.y and HTTPS://x.y, www.x.y and a@b.c <http://x.y>",
    "code": "a `b` ``c`` ```",
    "a cell": "a | b || c \\| d \\\\| e",
    "emphasis": "*a* **b** _c_ __d__ ~e~ ~~f~~ $g$",
    "lines": "a\n\n# b\n- c\r\n| d |\n\te",
    "a block": "\n```\n<b>\n",
    "escapes": "\\*a\\* \\<b> \\",
    "controls": "a\x1b[31m\u202eb\x00",
    "plain": "Qwen/Qwen2.5-7B_Instruct (lora_rank: ['q_proj', \"v\"], 1e-05) Ä日本",
}


class Page(HTMLParser):
    """The tags, attributes and text of rendered Markdown."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, Any]] = []
        self.cells: list[str] = []
        self.text = ""
        self.within = False
        self.feed(MarkdownIt("commonmark").enable(["table", "strikethrough"]).render(source))

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, attrs))
        if tag in ("td", "code", "h1"):
            self.cells.append("")
            self.within = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "code", "h1"):
            self.within = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.within:
            self.cells[-1] += data


def written(name: str) -> str:
    """A name as it is to be seen: what is no text, and breaks of lines, written out."""
    return re.sub(
        r"[\n\r\t\x00\x1b\u202e]", lambda found: found[0].encode("unicode_escape").decode(), name
    )


@pytest.mark.parametrize("kind", NAMES)
def test_a_name_is_shown_as_it_is_and_does_nothing(kind: str) -> None:
    name = NAMES[kind]
    rows = {name: name, "second": 2}
    page = Page(markdown.table("Data", rows))
    assert {tag for tag, _ in page.tags} == {"h2", "table", "thead", "tr", "th", "tbody", "td"}
    assert [cell.strip() for cell in page.cells] == [written(name).strip()] * 2 + ["second", "2"]
    head = Page(f"# {markdown.text(name)}\n\nof {markdown.code(name)}, trained")
    assert [tag for tag, _ in head.tags] == ["h1", "p", "code"]
    assert head.text.strip() == f"{written(name).strip()}\nof {written(name)}, trained"


@pytest.mark.parametrize("kind", NAMES)
def test_nothing_of_a_name_becomes_a_link_by_itself(kind: str) -> None:
    """On the hub and on GitHub, addresses and mentions are links also without brackets."""
    assert not re.search(r"https?://|www\.|@", markdown.text(NAMES[kind]), re.IGNORECASE)


@pytest.mark.parametrize("kind", [kind for kind in NAMES if kind != "controls"])
def test_a_card_shows_the_names_of_a_run(kind: str) -> None:
    name = NAMES[kind]
    config = LemaConfig(name, device="cpu", output_dir="out/mine", max_steps=1)
    card = model_card(
        config, name, {f"training {name}": f"{name}: 8 rows"}, {f"eval_{name}_loss": 1.5}
    )
    front, _, body = card.removeprefix("---\n").partition("\n---\n")
    assert yaml.safe_load(front)["base_model"] == name
    page = Page(body)
    kinds = {"h1", "h2", "p", "pre", "code", "table", "thead", "tbody", "tr", "th", "td"}
    assert {tag for tag, _ in page.tags} == kinds
    cells = [cell.strip() for cell in page.cells]
    assert cells[:2] == ["mine", written(name).strip()]
    for text in (f"training {name}", f"{name}: 8 rows", f"eval_{name}_loss"):
        assert written(text).strip() in cells
    texts = [node.value for node in ast.walk(ast.parse(cells[2])) if isinstance(node, ast.Constant)]
    assert set(texts) == {name, "mine"}
