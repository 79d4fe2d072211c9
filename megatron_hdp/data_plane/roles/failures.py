"""When a source has failed, as told from a bug: it does not answer, or its data cannot be read."""

from __future__ import annotations


class SourceSilent(Exception):
    """No loader of a source has answered in time.

    Attributes:
        why: which loader failed last, and how.
    """

    why: str


FAILURES = (OSError, ValueError, SourceSilent)
"""What a source that fails raises in who asks its loaders: a file that changes, is cut or is gone,
too many bad records. All else is a bug."""


class SourceFailure(Exception):
    """A source that a run goes on without has failed while a step was decided.

    Attributes:
        source: its name.
        why: see `why_of`.
    """

    def __init__(self, source: str, why: str) -> None:
        """Name the source and the reason."""
        super().__init__(f"source '{source}' has failed: {why}")
        self.source = source
        self.why = why


def why_of(error: BaseException) -> str:
    """Return why a source has failed, in one line that can be sent and logged."""
    text = error.why if isinstance(error, SourceSilent) else str(error)
    line = " ".join(text.split()) or type(error).__name__
    # a path may hold bytes that are no UTF-8
    return line.encode(errors="backslashreplace").decode()
