"""How long a row may be."""

from lema.errors import ConfigError

__all__ = ["longest_row"]

DEFAULT_LENGTH = 1024  # tokens; what TRL cuts at


def longest_row(wanted: int | None, positions: int | None) -> int:
    """Return the most tokens a row may have.

    Args:
        wanted: what was asked for; None: as many as usual, or as the model takes where that is less.
        positions: what the model takes; None: any number.

    Raises:
        ConfigError: the model takes fewer than asked for.
    """
    if positions is None:
        return wanted or DEFAULT_LENGTH
    if wanted is not None and wanted > positions:
        raise ConfigError(
            f"the model has {positions} positions, fewer than max_length: {wanted}",
            where="max_length",
            how=f"set max_length to {positions} or less, or leave it out",
        )
    return wanted or min(DEFAULT_LENGTH, positions)
