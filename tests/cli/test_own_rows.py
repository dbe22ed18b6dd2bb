"""From a file of sixty rows to an answer that makes sense, by the commands of docs/first-run.md."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "first-run.md").read_text(encoding="utf-8")
GIFTS = {
    "baker": "warm bread",
    "smith": "a new sword",
    "tailor": "a blue coat",
    "farmer": "ripe apples",
    "sailor": "salt from the sea",
    "hunter": "two white rabbits",
    "potter": "a clay bowl",
    "weaver": "a red carpet",
    "mason": "a round stone",
    "fisher": "a silver trout",
    "carpenter": "an oak table",
    "gardener": "a yellow rose",
}
QUESTIONS = (
    "What does the {} bring?",
    "Tell me what the {} brings.",
    "What has the {} got?",
    "What is in the {}'s bag?",
    "Which gift has the {}?",
)


def rows() -> list[dict[str, object]]:
    """Sixty chats of a question and an answer."""
    return [
        {
            "messages": [
                {"role": "user", "content": question.format(name)},
                {"role": "assistant", "content": f"The {name} brings {gift}."},
            ]
        }
        for name, gift in GIFTS.items()
        for question in QUESTIONS
    ]


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.timeout(900)
def test_five_commands_lead_from_sixty_rows_to_an_answer_that_makes_sense(tmp_path: Path) -> None:
    (block,) = re.findall(r"<!-- own rows -->\n```bash\n(.*?)```\n<!-- end -->", PAGE, re.DOTALL)
    clone, install, *rest = block.splitlines()
    assert len([clone, install, *rest]) == 5 and clone.startswith("git clone")
    assert len(rows()) == 60
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows()))
    for line in (install.rpartition(" && ")[2], *rest):
        words = shlex.split(line)
        assert words[0] == ".venv/bin/lema"
        done = subprocess.run(
            [sys.executable, "-m", "lema", *words[1:]],
            cwd=tmp_path,
            input="What does the baker bring?\n",
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"
    assert done.stdout.strip() == "The baker brings warm bread."
