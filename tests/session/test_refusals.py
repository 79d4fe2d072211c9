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
    """By name: what is called with a session."""
    nothing = [np.zeros(n, dtype=bool) for n in LENGTHS]
    short = [*batch.weights[:2], batch.weights[2][1:]]
    other = with_entry(batch.tokens, 2, 4, (int(batch.tokens[2][4]) + 1) % 257)
    plan = random_plan((7, 5, 31), ranks=2, tokens_per_rank=128)
    loss_of = FromLogProbs
    return {
        "short weights": lambda s: s.step(replace(batch, weights=short)),
        "few weights": lambda s: s.step(replace(batch, weights=batch.weights[:2])),
        "nan weight": lambda s: s.step(
            replace(batch, weights=with_entry(batch.weights, 1, 3, np.nan))
        ),
        "nan weight on one rank": lambda s: s.step(
            replace(batch, weights=here(1, batch.weights, with_entry(batch.weights, 1, 3, np.nan)))
        ),
        "empty sequence": lambda s: s.step([[1, 2], []]),
        "no sequence": lambda s: s.log_probs([]),
        "foreign token": lambda s: s.step([[1, 2], [3, 257]]),
        "real tokens": lambda s: s.step([[1.0, 2.0]]),
        "long sequence": lambda s: s.step([list(range(201))]),
        "no loss token": lambda s: s.step(replace(batch, loss_mask=nothing)),
        "one token": lambda s: s.step([[5]]),
        "mask of halves": lambda s: s.step(TokenBatch([[1, 2]], loss_mask=[[1, 0.5]])),
        "divisor 0": lambda s: s.step(batch, divisor=0),
        "temperature 0": lambda s: s.log_probs(batch, temperature=0.0),
        "other plan": lambda s: s.step(batch, plan=plan),
        "other tokens": lambda s: s.step(replace(batch, tokens=here(1, batch.tokens, other))),
        "other weights": lambda s: s.step(
            replace(batch, weights=here(0, batch.weights, with_entry(batch.weights, 0, 0, 9.0)))
        ),
        "other divisor": lambda s: s.step(batch, divisor=1.0 + dist.get_rank()),
        "other order": lambda s: s.step([batch.tokens[i] for i in here(0, [0, 1, 2], [1, 0, 2])]),
        "other arrays": lambda s: s.step(replace(batch, arrays=here(0, batch.arrays, {}))),
        "other call": lambda s: here(0, s.step, s.log_probs)(batch),
        "loss of a wrong shape": lambda s: s.step(batch, loss_of(lambda p, _: p[None])),
        "loss of no tensor": lambda s: s.step(batch, loss_of(lambda p, _: 1.0)),
        "loss without gradient": lambda s: s.step(batch, loss_of(lambda p, _: p.detach())),
        "nan loss": lambda s: s.step(batch, loss_of(lambda p, _: p * np.nan)),
        "further tokens": of_further_tokens,
        "nan gradient": lambda s: s.step(
            batch, FromHidden(lambda h, _: (h.sum(-1) * 0).abs().sqrt())
        ),
    }


def what_they_say(names=None):
    """Body of a rank: kind and message of each error, None where there was none."""
    arguments, batch = arguments_of(), batch_of(LENGTHS)
    parallel.initialise(arguments)
    session, found = session_of(arguments), {}
    expected = session.step(batch, FromLogProbs(clipped)).loss
    for name, call in cases_of(batch).items():
        try:
            call(session)
            found[name] = None
        except (ValueError, DisagreementError) as error:
            found[name] = type(error).__name__, str(error)
        assert session.step(batch, FromLogProbs(clipped)).loss == expected, name
    return found


EXPECTED = {
    "further tokens": ("ValueError", "found mtp_num_layers 2, expected none"),
    "short weights": ("ValueError", "29 entries in weights of sequence 2, expected 30"),
    "few weights": ("ValueError", "2 arrays in weights, expected one for each of the 3"),
    "nan weight": ("ValueError", "weights nan at token 3 of sequence 1, expected finite"),
    "nan weight on one rank": ("ValueError", "rank 1: found weights nan at token 3 of sequence 1"),
    "empty sequence": ("ValueError", "sequence 1 is empty, expected at least one token"),
    "no sequence": ("ValueError", "a batch of no sequences, expected at least one"),
    "foreign token": ("ValueError", "token 257 in sequence 1, expected ids from 0 to 256"),
    "real tokens": ("ValueError", "tokens of sequence 0 of type float64"),
    "long sequence": ("ValueError", "201 tokens, expected at most --seq-length 200"),
    "no loss token": ("ValueError", "found no token with loss in the batch"),
    "one token": ("ValueError", "found no token with loss in the batch"),
    "mask of halves": ("ValueError", "neither 0 nor 1: pass weights"),
    "divisor 0": ("ValueError", "divisor 0, expected a finite number above 0"),
    "temperature 0": ("ValueError", "temperature 0.0, expected a finite number above 0"),
    "other plan": ("ValueError", "found a plan for 3 sequences of 43 tokens"),
    "other tokens": ("DisagreementError", "\n  tokens: "),
    "other weights": ("DisagreementError", "\n  weights: "),
    "other divisor": ("DisagreementError", "\n  what is called: "),
    "other order": ("DisagreementError", "\n  plan: "),
    "other arrays": ("DisagreementError", "\n  names and types of the arrays: "),
    "other call": ("DisagreementError", "\n  what is called: "),
    "loss of a wrong shape": ("ValueError", "losses of shape (1, "),
    "loss of no tensor": ("ValueError", "returned float, expected a tensor"),
    "loss without gradient": ("ValueError", "returned losses without a gradient"),
    "nan loss": ("NonFiniteError", "sequences "),
    "nan gradient": ("NonFiniteError", "the gradient is NaN or infinite, first in "),
}


def test_every_rank_says_what_is_wrong(run_ranks):
    everyone = run_ranks(2, what_they_say)
    assert everyone[0].keys() == EXPECTED.keys()
    wrong = {
        name: [found[name] for found in everyone]
        for name, (kind, words) in EXPECTED.items()
        for found in everyone
        if found[name] is None or found[name][0] != kind or words not in found[name][1]
    }
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hybrid_data_parallel": False}, "no --hybrid-data-parallel"),
        ({"hdp_fused_loss": False}, "--no-hdp-fused-loss"),
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
