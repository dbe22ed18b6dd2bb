"""One training step is walked through as a reader walks through it, and the walk gets no longer.

`python tests/support/stepwalk.py` prints it.
"""

from stepwalk import lines, walk

MOST_FILES = 60
MOST_FRAMES = 21
MOST_CALLBACKS = 3


def test_a_step_runs_through_no_more_files_frames_and_callbacks_than_it_did() -> None:
    result = walk()
    printed = "\n".join(lines(result))
    assert result.frames[0].endswith("RunLoop._step"), printed
    assert result.frames[-1].endswith("Split.call_layer"), printed
    assert len(result.files) <= MOST_FILES, printed
    assert len(result.frames) <= MOST_FRAMES, printed
    assert len(result.callbacks) <= MOST_CALLBACKS, printed
