"""What a session's calls return and leave behind."""

from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_hdp.megatron import parallel
from megatron_hdp.session import FromHidden, FromLogProbs, HdpSession, TokenBatch, weights_of
from megatron_hdp.training.loop import pretrain
from tests.support.gradients import tiny_arguments, whole_gradients, write_corpus
from tests.support.own_loop import (
    LENGTHS,
    Values,
    arguments_of,
    batch_of,
    clipped,
    distilled,
    largest_difference,
    session_of,
)


def opened(**overrides):
    arguments = arguments_of(**overrides)
    parallel.initialise(arguments)
    return session_of(arguments), batch_of()


def figures():
    """Body of a rank: a report, and the sums that it should hold."""
    session, batch = opened()
    log_probs = session.log_probs(batch, dtype=torch.float64)
    report = session.step(batch, FromLogProbs(clipped), divisor=0.5)
    expected = {"loss": 0.0, "clipped": 0.0, "ratio": 0.0}
    for i, (one, mask) in enumerate(zip(log_probs, batch.loss_mask, strict=True)):
        rows = torch.from_numpy(mask & (np.arange(len(mask)) > 0))
        given = {name: torch.as_tensor(np.asarray(of[i])) for name, of in batch.arrays.items()}
        arrays = {name: of_all[rows] for name, of_all in given.items()}
        losses, sums = clipped(one[rows], arrays)
        for name, value in {"loss": losses, **sums}.items():
            expected[name] += float(value.sum())
    return report, expected


def test_a_report_counts_the_whole_batch(run_ranks):
    everyone = run_ranks(3, figures)
    masks = batch_of().loss_mask
    for report, expected in everyone:
        assert report.loss == pytest.approx(expected.pop("loss") / 0.5, rel=1e-12)
        assert report.sums == pytest.approx(expected, rel=1e-12)
        assert (report.sequences, report.tokens) == (len(LENGTHS), sum(LENGTHS))
        assert report.loss_tokens == sum(int(one[1:].sum()) for one in masks)
        assert report.divisor == 0.5 and report.makespan_s > 0 and report.ring_bytes > 0
    assert len({report.plan.fingerprint() for report, _ in everyone}) == 1


def steps_apart(fault):
    """Body of a rank: how far the second step's gradients after an update are from the first's."""
    session, batch = opened(use_distributed_optimizer=False)
    kept = mock.patch("megatron_hdp.session.session.clear_gradients", keep_those_of_parameters)
    with kept if fault else nullcontext():
        return _steps_apart(session, batch)


def keep_those_of_parameters(chunks, parameters):
    for one in chunks:
        one.zero_grad_buffer()


def _steps_apart(session, batch):
    optimizer = session.build_optimizer()
    session.step(batch)
    optimizer.step()
    found = []
    for _ in range(2):
        session.step(batch)
        found.append(whole_gradients(session.chunks, session.arguments))
    first, second = found
    return max((first[name] - second[name]).abs().max().item() for name in first)


def test_nothing_of_the_step_before_is_left(run_ranks):
    assert max(run_ranks(2, steps_apart, False)) == 0.0
    assert min(run_ranks(2, steps_apart, True)) > 1e-6


def what_is_left():
    """Body of a rank: log-probabilities and a trial leave weights, gradients and modes alone."""
    session, batch = opened()
    trained = session.step(batch)
    gradients = whole_gradients(session.chunks, session.arguments)
    session.chunks[0].train()
    tried = session.step(batch, forward_only=True)
    everywhere = session.log_probs(batch, dtype=torch.float64)
    first = session.log_probs(batch, dtype=torch.float64, to="first")
    assert tried.loss == trained.loss and session.chunks[0].training
    after = whole_gradients(session.chunks, session.arguments)
    assert all(torch.equal(gradients[name], after[name]) for name in gradients)
    if dist.get_rank():
        assert first is None
    else:
        assert largest_difference(first, everywhere) == 0.0
    assert {one.dtype for one in session.log_probs(batch)} == {torch.float32}
    return [one.numpy() for one in everywhere]


def test_forward_only_leaves_everything_as_it_was(run_ranks):
    one, other = run_ranks(2, what_is_left)
    for a, b, mask in zip(one, other, batch_of().loss_mask, strict=True):
        assert np.array_equal(a, b)
        assert np.array_equal(a != 0, mask & (np.arange(len(mask)) > 0))


def of_kinds():
    """Body of a rank: losses of one batch given as arrays of several kinds."""
    session, _ = opened()
    ids = [[5, 200, 7, 9], [1, 2], [3] * 150]
    small = [np.array(one, dtype=np.int16) for one in ids]
    weights = [[0.5] * len(one) for one in ids]
    halves = [torch.tensor(one, dtype=torch.bfloat16) for one in weights]
    found = [session.step(one, divisor=1) for one in (ids, small, [*map(torch.tensor, ids)])]
    weighted = [session.step(TokenBatch(ids, weights=w), divisor=1) for w in (weights, halves)]
    return [one.loss / 2 for one in found] + [one.loss for one in weighted]


def test_arrays_of_any_kind(run_ranks):
    for found in run_ranks(2, of_kinds):
        assert found == pytest.approx([found[0]] * 5, rel=1e-14)


def heads():
    """Body of a rank: the gradient of a loss's own parameter after a step."""
    session, batch = opened(pipeline_model_parallel_size=2, hdp_tokens_per_rank=200)
    values = Values()
    session.step(batch, FromHidden(values, [values.head]))
    return values.head.grad is not None


def test_own_parameters_learn_on_the_last_stage(run_ranks):
    assert run_ranks(2, heads) == [False, True]


def test_weights_are_the_gradient_turned_round():
    loss, weights = weights_of(lambda found: 3 * found[1].sum() - found[0][1], [[1.0, 2.0], [4.0]])
    assert loss == 10.0
    assert [one.tolist() for one in weights] == [[0.0, 1.0], [-3.0]]


FLAGS = """
--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 200 --swiglu
--attention-dropout 0 --hidden-dropout 0 --fp64 --hdp-tokens-per-rank 128 --lr 1e-2
--train-iters 5 --global-batch-size 1
"""


def side_by_side():
    """Body of a rank: log-probabilities of a policy and its reference while the policy learns."""
    policy = HdpSession.from_flags(FLAGS.split(), vocab_size=257)
    optimizer, batch = policy.build_optimizer(), batch_of()
    reference = HdpSession.from_flags(FLAGS.split(), vocab_size=257)
    found = []
    for _ in range(2):
        of_both = [one.log_probs(batch, dtype=torch.float64) for one in (policy, reference)]
        found.append([torch.cat(one).numpy() for one in of_both])
        policy.step(batch)
        optimizer.step()
    with pytest.raises(ValueError, match="models of one job have one layout"):
        HdpSession.from_flags([*FLAGS.split(), "--tensor-model-parallel-size=2"], vocab_size=257)
    reference.close()
    policy.close()
    return found


def test_a_policy_and_its_reference(run_ranks):
    for (policy, reference), (learnt, still) in run_ranks(2, side_by_side):
        assert np.array_equal(policy, reference) and np.array_equal(reference, still)
        assert np.abs(learnt - policy).max() > 1e-3


def saved_by_a_run(prefix, folder):
    """Body of a rank: a run of two steps."""
    how = {"train_iters": 2, "lr": 1e-2, "seq_length": 200, "hidden_dropout": 0.0}
    pretrain(tiny_arguments(prefix, save=folder, **how))


def loaded(folder, overrides):
    """Body of a rank: log-probabilities before and after weights are loaded."""
    session, batch = opened(**overrides)
    optimizer = session.build_optimizer()
    found = []
    for _ in range(2):
        found.append(torch.cat(session.log_probs(batch, dtype=torch.float64)).numpy())
        session.load_weights(folder, optimizer)
    with pytest.raises(ValueError, match="holds no checkpoint, expected one"):
        session.load_weights(folder / "elsewhere")
    return found


def test_weights_of_a_run(run_ranks, tmp_path):
    prefix = write_corpus(tmp_path, [30, 60, 20, 33])
    run_ranks(2, saved_by_a_run, prefix, tmp_path / "saved")
    wide = {"hdp_tokens_per_rank": 200}
    (alone,) = run_ranks(1, loaded, tmp_path / "saved", wide)
    stages = run_ranks(2, loaded, tmp_path / "saved", wide | {"pipeline_model_parallel_size": 2})
    for fresh, after in stages:
        assert np.abs(fresh - after).max() > 1e-3
        assert np.abs(after - alone[1]).max() < 1e-12


def by_precision(**overrides):
    """Body of a rank: log-probabilities, and losses and gradients of every kind of loss."""
    session, batch = opened(**overrides)
    log_probs, found = torch.cat(session.log_probs(batch)), []
    for loss in (None, FromLogProbs(clipped), FromHidden(distilled)):
        report = session.step(batch, loss)
        grads = [one.main_grad.double().flatten() for one in session.chunks[0].parameters()]
        found.append((report.loss, torch.cat(grads).numpy()))
    return log_probs.numpy(), found


@pytest.mark.slow
def test_bfloat16_is_near_float64(run_ranks):
    log_probs, found = run_ranks(2, by_precision, fp64=False, bf16=True)[0]
    expected_log_probs, expected = run_ranks(2, by_precision)[0]
    assert np.abs(log_probs - expected_log_probs).max() < 0.2
    for (loss, grads), (expected_loss, expected_grads) in zip(found, expected, strict=True):
        assert loss == pytest.approx(expected_loss, rel=0.05, abs=0.02)
        error = np.linalg.norm(grads - expected_grads) / np.linalg.norm(expected_grads)
        assert error < 0.1
