"""Two hundred files that are called images: each is trained on as Pillow reads it, or refused by
file and row, before it is decoded where that would take all memory.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import pytest
from forked import run_program
from hostileimages import Hostile, hostile_images
from PIL import Image, ImageOps

from lema.data.chat.pictures import Picture
from lema.data.files import Row
from lema.data.media.decoder import Decoder, Senses
from lema.data.media.limits import MediaLimits
from lema.data.media.sources import Spool, source_of
from lema.errors import DataError

MOST_BYTES = 2 << 30


def as_pillow_reads_it(path: Path) -> Image.Image | None:
    """Return the pixels; None: Pillow has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                image.load()
                return ImageOps.exif_transpose(image).convert("RGB")
    except Exception:  # noqa: BLE001 - of any kind, as decoders raise
        return None


def outcome(one: Hostile, folder: Path) -> str:
    """Return what became of a file; an assertion fails if it is something else than it should."""
    path = folder / one.name
    path.write_bytes(one.content)
    row = Row({}, str(folder / "rows.jsonl"), 7)
    spool = Spool()
    decoder = Decoder(MediaLimits(folder), _no_processor)
    try:
        source, image = source_of(Picture(one.name, "images, image 1"), row, decoder, spool)
    except DataError as error:
        assert error.where == f"{row.origin}, images, image 1", one.name
        assert error.how, one.name
        assert one.fate != "trained", (one.name, str(error))
        if not one.bomb and one.fate == "either":
            assert as_pillow_reads_it(path) is None, (one.name, str(error))
        return "refused"
    assert one.fate != "refused", one.name
    expected = as_pillow_reads_it(path)
    assert expected is not None, one.name
    assert image.size == expected.size, one.name
    assert image.tobytes() == expected.tobytes(), one.name
    assert source.load(decoder).tobytes() == expected.tobytes(), one.name
    return "trained"


def _no_processor() -> Senses:
    raise AssertionError("no processor is needed to decode images")


def main() -> None:
    """Read all of them, and print what became of them and the memory that it took."""
    import resource

    folder = Path(sys.argv[1])
    files = hostile_images()
    fates = [outcome(one, folder) for one in files]
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    counts = {fate: fates.count(fate) for fate in ("trained", "refused")}
    sys.stdout.write(json.dumps({"files": len(files), "most": most, **counts}) + "\n")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is counted as Linux counts it")
def test_two_hundred_hostile_images_are_trained_as_pillow_reads_them_or_refused(
    tmp_path: Path,
) -> None:
    traps = [Path("/tmp") / f"{name}-was-run" for name in ("eps", "pickle", "shell")]
    assert not any(trap.exists() for trap in traps)
    folder = tmp_path / "data"
    folder.mkdir()
    ended = run_program([str(Path(__file__)), str(folder)], 1, tmp_path)
    assert ended.returncode == 0, ended.stderr[-3000:]
    about = json.loads(ended.stdout.splitlines()[-1])
    assert about["files"] >= 200
    assert about["trained"] >= 60
    assert about["refused"] >= 60
    assert about["most"] < MOST_BYTES
    assert not any(trap.exists() for trap in traps)


if __name__ == "__main__":
    main()
