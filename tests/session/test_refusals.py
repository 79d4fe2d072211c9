"""A wrong use of a session ends on every rank with a sentence, and the next step runs."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_hdp.megatron import parallel
from megatron_hdp.runtime.health import DisagreementError
from megatron_hdp.session import FromHidden, FromLogProbs, HdpSession, TokenBatch, weights_of
from tests.support.own_loop import arguments_of, batch_of, clipped, session_of
from tests.support.random_plans import random_plan

LENGTHS = (7, 5, 30)


def with_entry(arrays, i, place, value):
    """Copies of arrays, one entry of one of them changed."""
    changed = [np.array(one) for one in arrays]
    changed[i][place] = value
    return changed


def here(rank, arrays, changed):
    """What differs on one rank alone."""
    return changed if dist.get_rank() == rank else arrays


def of_further_tokens(session):
    with mock.patch.object(session._executor._config, "mtp_num_layers", 2):
        session.step([[1, 2]])


def cases_of(batch):
    """By name: what is called with a session, the kind of error and words of its message."""
    value, two = "EveryRankError", "DisagreementError"  # the former is a ValueError
    short = [*batch.weights[:2], batch.weights[2][1:]]
    nan = with_entry(batch.weights, 1, 3, np.nan)
    nothing = [np.zeros(n, dtype=bool) for n in LENGTHS]
    halves = TokenBatch([[1, 2]], loss_mask=[[1, 0.5]])
    other = with_entry(batch.tokens, 2, 4, (int(batch.tokens[2][4]) + 1) % 257)
    heavy = with_entry(batch.weights, 0, 0, 9.0)
    plan = random_plan((7, 5, 31), ranks=2, tokens_per_rank=128)

    def of(loss=None, divisor=None, plan=None, **changes):
        """A step with parts of the batch changed, and arguments besides."""
        given = replace(batch, **changes)
        return lambda s: s.step(given, loss, divisor=divisor, plan=plan)

    def of_ids(*ids):
        return lambda s: s.step(list(map(list, ids)))

    def of_loss(function):
        return of(loss=FromLogProbs(lambda log_probs, _: function(log_probs)))

    weighed = FromLogProbs.weighed(with_entropies=True)
    roots = FromHidden(lambda h, _: (h.sum(-1) * 0).abs().sqrt())
    swapped = [batch.tokens[i] for i in here(0, [0, 1, 2], [1, 0, 2])]

    def freezing(session):
        session.log_probs(batch, temperature=0.0)

    def either(session):
        here(0, session.step, session.log_probs)(batch)

    return {
        "further tokens": (of_further_tokens, value, "found mtp_num_layers 2, expected none"),
        "short weights": (of(weights=short), value, "29 entries in weights of sequence 2"),
        "few weights": (of(weights=short[:2]), value, "2 arrays in weights, expected one"),
        "nan weight": (of(weights=nan), value, "weights nan at token 3 of sequence 1"),
        "nan on one rank": (
            of(weights=here(1, batch.weights, nan)),
            value,
            "rank 1: found weights",
        ),
        "empty sequence": (of_ids([1, 2], []), value, "sequence 1 is empty"),
        "no sequence": (lambda s: s.log_probs([]), value, "a batch of no sequences"),
        "foreign token": (of_ids([1, 2], [3, 257]), value, "token 257 in sequence 1, expected ids"),
        "real tokens": (of_ids([1.0, 2.0]), value, "sequence 0 of type float64"),
        "long sequence": (of_ids(range(201)), value, "201 tokens, expected at most --seq-length"),
        "no loss token": (of(loss_mask=nothing), value, "found no token with loss in the batch"),
        "one token": (of_ids([5]), value, "found no token with loss in the batch"),
        "mask of halves": (lambda s: s.step(halves), value, "neither 0 nor 1: pass weights"),
        "divisor 0": (of(divisor=0), value, "divisor 0, expected a finite number above 0"),
        "divisor in quotes": (of(divisor="3"), value, "divisor '3', expected a finite number"),
        "loss that is no loss": (of(loss=clipped), value, "found the loss function, expected"),
        "loss at temperature 0": (
            of(loss=FromLogProbs(clipped, 0)),
            value,
            "temperature 0, expect",
        ),
        "no weights": (of(loss=weighed), value, "'weights' none, expected [length, 2] as"),
        "weights of log-probabilities alone": (
            of(loss=weighed, arrays={"weights": batch.weights}),
            value,
            "'weights' [length], expected [length, 2] as",
        ),
        "a number among figures": (
            of_loss(lambda p: (p, {"clipped": 0.5})),
            value,
            "returned the figure 'clipped' 0.5, expected a tensor of shape (",
        ),
        "results for nobody": (
            lambda s: s.log_probs(batch, to="frist"),
            value,
            "found to='frist', expected 'all' or 'first'",
        ),
        "results in halves": (
            lambda s: s.log_probs(batch, dtype=torch.float16),
            value,
            "found dtype=torch.float16, expected torch.float32 or",
        ),
        "temperature 0": (freezing, value, "temperature 0.0, expected a finite number above 0"),
        "few temperatures": (
            lambda s: s.log_probs(batch, temperature=[0.5]),
            value,
            "found 1 temperatures, expected one for each of the 3 sequences",
        ),
        "other plan": (of(plan=plan), value, "found a plan for 3 sequences of 43 tokens"),
        "other tokens": (of(tokens=here(1, batch.tokens, other)), two, "\n  tokens: "),
        "other weights": (of(weights=here(0, batch.weights, heavy)), two, "\n  weights: "),
        "other divisor": (of(divisor=1.0 + dist.get_rank()), two, "\n  what is called: "),
        "other order": (of_ids(*swapped), two, "\n  plan: "),
        "other arrays": (of(arrays=here(0, batch.arrays, {})), two, "\n  names and types of the"),
        "other call": (either, two, "\n  what is called: "),
        "loss of a wrong shape": (of_loss(lambda p: p[None]), value, "losses of shape (1, "),
        "loss of no tensor": (of_loss(lambda p: 1.0), value, "returned float, expected a tensor"),
        "loss without gradient": (of_loss(torch.detach), value, "losses without a gradient"),
        "loss that raises": (of_loss(lambda p: 1 / 0), value, "raised ZeroDivisionError: division"),
        "loss that raises on one rank": (
            of_loss(lambda p: here(1, p, None).square()),
            value,
            "rank 1: cases_of.<locals>.of_loss.<locals>.<lambda> raised AttributeError: 'NoneType'",
        ),
        "nan loss": (of_loss(lambda p: p * np.nan), "NonFiniteError", "sequences "),
        "nan gradient": (
            of(loss=roots),
            "NonFiniteError",
            "the gradient is NaN or infinite, first",
        ),
    }


def wrong_answers():
    """Body of a rank: by name, the errors that are not as expected; every next step runs."""
    arguments, batch = arguments_of(), batch_of(LENGTHS)
    parallel.initialise(arguments)
    session, wrong = session_of(arguments), {}
    expected = session.step(batch, FromLogProbs(clipped)).loss
    for name, (call, kind, words) in cases_of(batch).items():
        try:
            call(session)
            wrong[name] = None
        except (ValueError, DisagreementError) as error:
            if type(error).__name__ != kind or words not in str(error):
                wrong[name] = type(error).__name__, str(error)
        assert session.step(batch, FromLogProbs(clipped)).loss == expected, name
    return wrong


def test_every_rank_says_what_is_wrong(run_ranks):
    assert run_ranks(2, wrong_answers) == [{}, {}]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hybrid_data_parallel": False}, "no --hybrid-data-parallel"),
        ({"hdp_fused_loss": False}, "--no-hdp-fused-loss"),
        ({"hdp_survive": True}, "--hdp-survive"),
        ({"hdp_encoder": "e"}, "found --hdp-encoder e, which is for the standalone trainer"),
        ({"hidden_dropout": 0.1}, "--hidden-dropout 0.1, expected 0"),
    ],
)
def test_options_that_a_session_does_not_know(overrides, words):
    with pytest.raises(ValueError, match=words):
        HdpSession(arguments_of(**overrides), [], vocab_size=257)


def test_weights_of_a_loss_that_is_none():
    for loss in (lambda found: found[0], lambda found: torch.ones(())):
        with pytest.raises(ValueError, match="expected a scalar made of the log-probabilities"):
            weights_of(loss, [[-1.0, -2.0]])
