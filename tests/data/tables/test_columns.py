"""The fingerprint of parts is that of the whole, as checkpoints hold it."""

import pytest

from megatron_hdp.data.tables.columns import Fingerprint
from megatron_hdp.runtime.health import fingerprint


@pytest.mark.parametrize("parts", [[], [b""], [b"abc"], [b"a", b"", b"bc"], [bytes(99_999), b"x"]])
def test_it_is_that_of_the_runtime(parts):
    whole = b"".join(parts)
    digest = Fingerprint(len(whole))
    for part in parts:
        digest.update(memoryview(part))
    assert digest.value == fingerprint(whole)


def test_it_tells_values_apart():
    values = (b"", bytes(1), bytes(2), b"ab", b"ba")
    found = set()
    for value in values:
        digest = Fingerprint(len(value))
        digest.update(value)
        found.add(digest.value)
    assert len(found) == len(values)
