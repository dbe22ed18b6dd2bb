"""torchvision, PyAV, soundfile and soxr are installed in an environment of their own
(`tox -e media`); elsewhere nothing is collected.
"""

from importlib.util import find_spec

NEEDED = ("av", "soundfile", "soxr", "torchvision")
FILES = ("test_video_rows.py", "test_video_files.py", "test_sound_files.py")
collect_ignore = [] if all(map(find_spec, NEEDED)) else [*FILES]
