"""What goes around a ring if queries travel, per what does if keys and values do."""


def query_ratio_of(
    kv_size: float, query_size: float, output_size: float, num_heads: float, value_bytes: int
) -> float:
    """Bytes of a token that go around if queries travel, per those if keys and values do.

    Forward and backward. Keys and values go around twice, and their gradients in float32. Queries
    go around twice and the gradient of the output once; the output and the gradient of queries in
    float32, with three more numbers a head.

    Args:
        kv_size: values of a token's keys and values.
        query_size: values of its queries.
        output_size: values of what attention gives.
        num_heads: of queries.
        value_bytes: bytes of a value that travels.

    Returns:
        0 if there are no keys and values.
    """
    wide = max(4, value_bytes)
    keys = kv_size * (2 * value_bytes + wide)
    queries = (2 * query_size + output_size) * value_bytes
    queries += wide * (query_size + output_size + 3 * num_heads)
    return queries / keys if keys else 0.0
