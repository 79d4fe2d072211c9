"""What an ``.idx`` means, one number at a time: small enough to believe."""

import struct

TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}


def documents_of(raw, bin_bytes):
    """(Place of the first token, tokens) of each document with tokens; None where it is refused."""
    if len(raw) < 34 or raw[:9] != b"MMIDIDX\x00\x00":
        return None
    version, code, n, d = struct.unpack("<QBQQ", raw[9:34])
    if version != 1 or code not in TOKEN_BYTES or len(raw) < 34 + 12 * n + 8 * d or d == 0:
        return None
    lengths = struct.unpack(f"<{n}i", raw[34 : 34 + 4 * n])
    pointers = struct.unpack(f"<{n}q", raw[34 + 4 * n : 34 + 12 * n])
    borders = struct.unpack(f"<{d}q", raw[34 + 12 * n : 34 + 12 * n + 8 * d])
    size = TOKEN_BYTES[code]
    ends = [pointer + length * size for pointer, length in zip(pointers, lengths, strict=True)]
    if (
        borders[0] != 0
        or borders[-1] != n
        or any(a > b for a, b in zip(borders, borders[1:], strict=False))
        or min(lengths, default=0) < 0
        or any(not 0 <= pointer <= 2**62 or pointer % size for pointer in pointers)
        or max(ends, default=0) > bin_bytes
    ):
        return None
    spans = sorted({(p, e) for p, e in zip(pointers, ends, strict=True) if p < e})
    if any(before[1] > after[0] for before, after in zip(spans, spans[1:], strict=False)):
        return None
    found = []
    for first, stop in zip(borders, borders[1:], strict=False):
        if any(pointers[i] != ends[i - 1] for i in range(first + 1, stop)):
            return None
        found.append((pointers[first] // size if first < stop else 0, sum(lengths[first:stop])))
    return found
