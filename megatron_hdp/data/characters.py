"""Texts that are none: JSON may hold what no encoding has."""


def half_pair(text: str) -> str | None:
    """Return half a surrogate pair in a text, written as an escape; None: there is none."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return text[error.start].encode("unicode_escape").decode()
    return None
