"""When gradients are reduced: behind the last backward, or part by part inside of it."""

import numpy as np
import pytest

from megatron_hdp.simulator.execution.sync import reduced_s


def parts_slowly(
    end: list[float], last: list[float], inside: list[bool], reduction: float, parts: int
) -> float:
    now = 0.0
    for part in range(1, parts + 1):
        ready = max(
            e - (1 - part / parts) * d if is_inside else e
            for e, d, is_inside in zip(end, last, inside, strict=True)
        )
        now = max(now, ready) + reduction / parts
    return now


@pytest.mark.parametrize(
    ("inside", "reduction", "parts", "expected"),
    [
        ([False, False], 2.0, 4, 12.0),
        ([True, True], 2.0, 4, 10.5),  # all but the last part is done in the last backward
        ([True, True], 2.0, 1, 12.0),  # one part is there at the end
        ([False, True], 2.0, 4, 10.5),  # rank 0 gives everything at 8
        ([True, False], 2.0, 4, 12.0),  # rank 1 gives nothing before its end
        ([True, True], 8.0, 4, 15.0),  # the first part is there at 10 - 3/4 of 4 = 7
    ],
)
def test_two_ranks(inside: list[bool], reduction: float, parts: int, expected: float) -> None:
    end, last = [8.0, 10.0], [4.0, 4.0]
    found = reduced_s(np.array(end), np.array(last), np.array(inside), reduction, parts)
    assert found == expected == parts_slowly(end, last, inside, reduction, parts)


def test_only_the_first_and_the_last_part_decide() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        ranks, parts = int(random.integers(1, 6)), int(random.integers(1, 9))
        end = random.uniform(5, 9, ranks)
        last, inside = random.uniform(0, 5, ranks), random.random(ranks) < 0.5
        reduction = float(random.uniform(0, 8))
        found = reduced_s(end, last, inside, reduction, parts)
        slowly = parts_slowly(end.tolist(), last.tolist(), inside.tolist(), reduction, parts)
        assert found == pytest.approx(slowly, rel=1e-12)
