"""Properties are looked for without a clock: reads and copies take as long as the machine takes."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
