"""TransformerEngine's own Python over stand-ins for its kernels: rings, selections, waits."""

import pytest
import torch

from megatron_hdp.runtime.attention.transformer_engine import TransformerEngineAttention
from tests.support import te_wheel
from tests.support.ring_cases import errors_of_part, gloo_comm

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
TOLERANCE = 2e-3  # float16 keeps 11 bits; the library merges the blocks of a ring in it
CASES = [  # ring, tokens of a chunk of each ring sequence, tokens of local sequences
    ((1, 0), [5, 33], []),
    ((1, 0), [3, 1], [7, 1]),
    ((2, 0, 1), [4], [9]),
    ((0, 2, 1), [1, 8, 2], []),
    ((3, 1, 2, 0), [6, 1], [5]),
    ((0,), [], [30, 7, 1]),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """The folder of the unpacked wheel."""
    return te_wheel.unpack(tmp_path_factory.mktemp("transformer_engine"))


def errors_of_cases(library, cases, kv_heads=2):
    """Body of a rank: errors of (out, dq, dk, dv) of every case."""
    te_wheel.load(library)
    attend, comm = TransformerEngineAttention(CPU), gloo_comm()
    how = {"dtype": torch.float16, "head_dim": 16}
    return [errors_of_part(attend, comm, *case, **how) for case in cases]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_rings_and_local_sequences_are_exact(run_ranks, library, num_ranks):
    cases = [case for case in CASES if len(case[0]) in (num_ranks, 1, 2)]
    for errors in run_ranks(num_ranks, errors_of_cases, library, cases):
        assert max(map(max, errors)) < TOLERANCE, errors
