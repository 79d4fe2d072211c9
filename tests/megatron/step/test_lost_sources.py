"""What a failed source did not give is left out of a step once, wherever it was missed.

Gradients of such a step: rows of `tests.gradient_equivalence.cases`.
"""

import io
from contextlib import redirect_stdout
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_hdp.data.steps import LostSource
from megatron_hdp.megatron.step.left_out import LeftOutOfSteps
from megatron_hdp.megatron.step.loading import loaders_spec
from tests.support.rank_steps import rank_steps
from tests.support.ranks import RankError
from tests.support.sources import WEIGHTS, data_file, mixed_arguments, write_sources


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("sources"))


def test_loaders_in_the_ranks_refuse_the_policy(folder):
    path = data_file(folder, name="policy.yaml", chat="on-failure: go-on-without")
    arguments = mixed_arguments(folder, path)
    expected = (
        rf"^{path}: found on-failure: go-on-without of source 'chat' with loaders in the ranks, "
        r"expected .*: write loaders: \{backend: ray\} or give --hdp-loaders ray, or leave"
    )
    with pytest.raises(ValueError, match=expected):
        loaders_spec(arguments)
    assert loaders_spec(replace(arguments, hdp_loaders="ray")).backend == "ray"
    more = f"{WEIGHTS}\nloaders: {{backend: ray}}"
    path = data_file(folder, more, name="policy.yaml", chat="on-failure: go-on-without")
    assert loaders_spec(arguments).backend == "ray"
    with pytest.raises(ValueError, match=expected):
        loaders_spec(replace(arguments, hdp_loaders="local"))


def remains_of(steps, ids=()):
    """Body of a rank: amounts of steps, and whether they hold nothing of `ids`; and the log."""
    rank, said = dist.get_rank(), io.StringIO()
    corpus = SimpleNamespace(
        names=("pages", "chat"), sources=(None, None), words_for=lambda sources, rows: "document"
    )
    remains, found = LeftOutOfSteps(corpus, 50_000, corrupt_limit=0), []
    with redirect_stdout(said):
        for of_ranks in steps:
            amounts = remains.of(of_ranks[rank])
            found.append((amounts, lossless(of_ranks[rank], ids)))
    return found, said.getvalue(), remains.num_skipped


def lossless(step, ids):
    """Whether sequences have neither tokens nor loss in a rank's micro-batches."""
    gone = [
        part.sequence_index == place
        for part in step.micro_batches
        for place, i in enumerate(part.sequence_ids)
        if i in ids
    ]
    return not any(one.any() for one in gone)


def test_a_sequence_is_left_out_once_and_is_not_corrupt(run_ranks):
    """One that is lost on one rank is corrupt on another; no corrupt document is allowed."""
    steps = rank_steps([250, 40, 9, 17, 200], ranks=2)
    shared = min(set(steps[0].share.ids.tolist()) & set(steps[1].share.ids.tolist()))
    place = steps[0].share.place_of(shared)
    length = int(steps[0].share.lengths[place])
    name = ("pages", "chat")[steps[0].share.sources[place]]
    lost = replace(steps[0], lost=(LostSource(name, "it is gone", (shared,)),))
    parts = [
        replace(part, corrupt_ids=(shared,)) if shared in part.sequence_ids else part
        for part in steps[1].micro_batches
    ]
    both_at_once = [lost, replace(steps[1], micro_batches=tuple(parts))]
    found = run_ranks(2, remains_of, [steps, [lost, steps[1]]], [shared])
    whole = steps[0].totals.amounts.tokens
    for of_rank, _, skipped in found:
        assert [amounts.tokens for amounts, _ in of_rank] == [whole, whole - length]
        assert [is_gone for _, is_gone in of_rank] == [False, True]
        assert skipped == [0, 0]
    assert found[0][1] == (
        f"source '{name}' has failed (it is gone): 1 of its sequences are left out of step 5\n"
    )
    found = run_ranks(2, remains_of, [both_at_once])
    assert [of_rank[0][0].tokens for of_rank, _, _ in found] == [whole - length] * 2


def test_a_step_without_a_loss_token_names_the_reason(run_ranks):
    steps = rank_steps([30, 40, 9, 17], ranks=2)
    lost = []
    for one in steps:
        sources, ids = one.share.sources, one.share.ids
        lost.append(
            replace(
                one,
                lost=tuple(
                    LostSource(name, "its disk hangs", tuple(ids[sources == i].tolist()))
                    for i, name in enumerate(("pages", "chat"))
                ),
            )
        )
    with pytest.raises(RankError, match="no token with loss in step 5 once the 4 of its 4 seq"):
        run_ranks(2, remains_of, [lost])
