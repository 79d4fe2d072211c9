"""What tokens send to their experts, which other ranks compute, and what comes back."""

_DIRECTIONS = 2  # to the experts and back
_PASSES = 2  # as much in forward as in backward


def exchanged_bytes_per_token(
    *, values_per_token: int, value_bytes: int, expert_ranks: int
) -> float:
    """Bytes that leave a GPU for a token in all layers: all-to-all, both ways, both passes.

    A token's hidden state goes to each of its experts and one comes back from each; backward as
    many gradients. Experts are taken to get equally many tokens, so that 1 of ``expert_ranks`` of
    all this stays where it is.

    Args:
        values_per_token: that go out in a forward pass: layers x experts of a token x hidden size.
        value_bytes: of one value.
        expert_ranks: GPUs that the experts of a layer are spread over.
    """
    once = values_per_token * value_bytes
    return _DIRECTIONS * _PASSES * once * (expert_ranks - 1) / expert_ranks
