"""64 bits that tell one run's data from another's, also of what is too long to hold whole."""

import hashlib


class Fingerprint:
    """Of one long value that comes part by part.

    It equals ``runtime.health.fingerprint`` of the whole value, which checkpoints hold.
    """

    def __init__(self, num_bytes: int) -> None:
        """Begin a value of ``num_bytes`` bytes, all parts together."""
        self._digest = hashlib.blake2b(num_bytes.to_bytes(8, "little"), digest_size=8)

    def update(self, part: bytes | memoryview) -> None:
        """Add the next part."""
        self._digest.update(part)

    @property
    def value(self) -> int:
        """The fingerprint of the parts so far."""
        return int.from_bytes(self._digest.digest(), "little")
