"""Gradients over mixtures and masked conversations equal those of sequences run one by one."""

from unittest import mock

import pytest

from megatron_hdp.data.mixture import TableSource
from tests.support.gradients import errors_of
from tests.support.sources import data_file, mixed_arguments, write_sources

TOLERANCE = 1e-10
LAYOUTS = {
    "rings": (3, {}),
    "tp2-sp": (
        2,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "hdp_tokens_per_rank": 128,
        },
    ),
    "pp2": (4, {"pipeline_model_parallel_size": 2}),
    "logits": (2, {"hdp_fused_loss": False}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_over_a_mixture(run_ranks, folder, layout):
    ranks, settings = LAYOUTS[layout]
    arguments = mixed_arguments(folder, data_file(folder), **settings)
    assert max(run_ranks(ranks, errors_of, [(arguments, None)])[0]) <= TOLERANCE


@pytest.mark.parametrize("policy", ["split", "truncate"])
def test_gradients_over_cut_sequences(run_ranks, folder, policy):
    """A curriculum cuts rows, conversations too, where they are drawn."""
    more = "schedule: [{from: 0, max-length: 24}]"
    arguments = mixed_arguments(folder, data_file(folder, more), hdp_long_sequence=policy)
    assert max(run_ranks(2, errors_of, [(arguments, None)])[0]) <= TOLERANCE


def everything_is_trained(self, row, start, stop):
    return IS_TRAINED(self, row, start, stop) | True


IS_TRAINED = TableSource.is_trained


def test_a_mask_that_is_not_heeded_fails_the_check(run_ranks, folder):
    arguments = mixed_arguments(folder, data_file(folder))
    fault = ("megatron_hdp.data.mixture.table_source.TableSource.is_trained", everything_is_trained)
    assert min(run_ranks(2, errors_of, [(arguments, None)], fault)[0]) > 1e-6


def test_what_is_mixed_is_masked(folder):
    """The batch of these tests holds what they are about."""
    from tests.support.gradients import drawn_sequences

    with mock.patch("megatron_hdp.megatron.parallel.is_first_rank", lambda: True):
        found = list(drawn_sequences(mixed_arguments(folder, data_file(folder))))
    masked = [one for one in found if not one[2].all()]
    assert len(found) == 12 and 0 < len(masked) < 12
