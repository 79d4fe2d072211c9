"""Whole numbers that a subcommand's flags may have."""


def check_range(flag: str, value: int | None, least: int, most: int) -> None:
    """Refuse a value outside its range; None is a flag that was not given.

    Raises:
        ValueError: says what was found and expected.
    """
    if value is None or least <= value <= most:
        return
    limit = f"at least {least:,}" if value < least else f"at most {most:,}"
    raise ValueError(f"{flag} is {value:,}; expected {limit}")
