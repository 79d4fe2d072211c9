"""Losses of preferences: by plain autograd on one rank that holds all pairs, and by TRL's code."""

import math
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import logsigmoid

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model.initialisation import global_parameters
from megatron_hdp.session import Preference, TokenBatch, preference, preference_step
from tests.support import gradients
from tests.support.gradients import VOCABULARY, largest_error, whole_gradients
from tests.support.own_loop import arguments_of, plan_of, session_of

LENGTHS = (30, 100, 64, 65, 7, 200)
PAIRS = [(5, 0), (1, 4), (2, 3)]
LABELS = [True, False, True, True, False, False]
OBJECTIVES = {
    "dpo": Preference(kind="dpo", label_smoothing=0.1),
    "ipo": Preference(kind="ipo", beta=0.3),
    "orpo": Preference(kind="orpo", beta=0.7),
    "simpo": Preference(kind="simpo", beta=2.0, label_smoothing=0.2),
    "kto": Preference(kind="kto", desirable_weight=1.5, undesirable_weight=0.5),
}


def batch_of(seed=0):
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, VOCABULARY, n) for n in LENGTHS]
    return TokenBatch(tokens, [np.arange(n) >= n // 3 for n in LENGTHS])


def reference_of(session, batch, seed, less=0.0):
    """Near the model's own sums, where no sigmoid is flat."""
    noise = np.random.default_rng(seed).standard_normal(len(LENGTHS))
    found = session.log_probs(batch, dtype=torch.float64)
    return [float(one.sum()) + n - less for one, n in zip(found, noise, strict=True)]


def call_of(session, kind, batch):
    """(pairs, objective, reference, what else is given) of a step."""
    needs = kind in ("dpo", "ipo", "kto")
    reference = reference_of(session, batch, seed=1) if needs else None
    if kind != "kto":
        return PAIRS, OBJECTIVES[kind], reference, {}
    others = batch_of(seed=2)
    more = {"unrelated": (others, reference_of(session, others, seed=3, less=2))}
    return LABELS, OBJECTIVES[kind], reference, more


def by_definition(kind, sums, counts, reference, kl):
    """Mean loss, written once more."""
    made = OBJECTIVES[kind]
    if reference is not None:
        sums = sums - torch.tensor(reference).double()
    if kind == "kto":
        of_good = 1 - torch.sigmoid(made.beta * (sums - kl))
        of_bad = 1 - torch.sigmoid(made.beta * (kl - sums))
        return torch.where(torch.tensor(LABELS), 1.5 * of_good, 0.5 * of_bad).mean()
    means = sums / counts
    losses = []
    for c, r in PAIRS:
        if kind == "dpo":
            d = made.beta * (sums[c] - sums[r])
            losses.append(-0.9 * logsigmoid(d) - 0.1 * logsigmoid(-d))
        elif kind == "ipo":
            losses.append((means[c] - means[r] - 1 / (2 * made.beta)) ** 2)
        elif kind == "simpo":
            d = made.beta * (means[c] - means[r]) - made.gamma
            losses.append(-0.8 * logsigmoid(d) - 0.2 * logsigmoid(-d))
        else:
            p = means.exp()
            odds = torch.log(p[c] / (1 - p[c]) / (p[r] / (1 - p[r])))
            losses.append(-means[c] - made.beta * torch.log(torch.sigmoid(odds)))
    return torch.stack(losses).mean()


def sums_of(gpt, batch):
    """Of answers, from a stock model, one sequence at a time."""
    sums = []
    for tokens, mask in zip(map(torch.as_tensor, batch.tokens), batch.loss_mask, strict=True):
        n = len(tokens)
        causal = torch.ones(n, n, dtype=torch.bool).triu(1)[None, None]
        logits = gpt(tokens[None], torch.arange(n)[None], causal)[0]
        found = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        sums.append((found * torch.as_tensor(mask[1:])).sum())
    return torch.stack(sums)


@gradients.seldom_compiled
def errors_of(arguments, kinds, seeds=(None, 0), fault=None):
    """Body of a rank: by kind and plan the largest error, on the first rank."""
    parallel.initialise(arguments)
    batch, found = batch_of(), {}
    session = session_of(arguments)
    with mock.patch.object(preference, "weights_of", fault or preference.weights_of):
        for kind in kinds:
            for seed in seeds:
                *given, more = call_of(session, kind, batch)
                plan = plan_of(session, batch, seed)
                report = preference_step(session, batch, *given, plan=plan, **more)
                grads = whole_gradients(session.chunks, arguments)
                found[kind, seed] = report, grads, given[-1], more
    parallel.finish()
    parallel.initialise(gradients.stock(arguments))
    if dist.get_rank():
        return None
    gpt, errors = gradients.stock_model(arguments), {}
    names, parameters = zip(*global_parameters(gpt), strict=True)
    counts = torch.tensor([one[1:].sum() for one in batch.loss_mask])
    for (kind, seed), (report, grads, reference, more) in found.items():
        kl = 0.0
        if more:
            others, known = more["unrelated"]
            with torch.no_grad():
                kl = (sums_of(gpt, others) - torch.tensor(known)).mean().clamp(min=0).item()
            assert kl > 0
        loss = by_definition(kind, sums_of(gpt, batch), counts, reference, kl)
        expected = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
        errors[kind, seed] = largest_error((report.loss, grads), (loss.item(), expected))
    return errors


def check(errors):
    assert len(errors) > 1
    assert not {case: one for case, one in errors.items() if not one <= 1e-10}


@pytest.mark.parametrize(
    "kinds",  # the training command's test has the others
    [("ipo", "orpo"), pytest.param(tuple(OBJECTIVES), marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_gradients_are_those_of_one_rank_that_holds_all_pairs(run_ranks, kinds):
    check(run_ranks(3, errors_of, arguments_of(), kinds, (0,))[0])


LAYOUTS = {
    "tp2": {
        "tensor_model_parallel_size": 2,
        "make_vocab_size_divisible_by": 64,
        "hdp_tokens_per_rank": 200,
    },
    "pp2-v2": {
        "pipeline_model_parallel_size": 2,
        "hdp_tokens_per_rank": 200,
        "num_layers": 4,
        "num_virtual_stages_per_pipeline_rank": 2,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(run_ranks, layout):
    check(run_ranks(2, errors_of, arguments_of(**LAYOUTS[layout]), tuple(OBJECTIVES))[0])


def of_one_pair_less(loss, log_probs):
    """Loses what the last sequence learns, as a pair cut by a micro-batch would."""
    total, weights = WEIGHTS_OF(loss, log_probs)
    return total, [*weights[:-1], torch.zeros_like(weights[-1])]


WEIGHTS_OF = preference.weights_of


def test_a_side_that_is_lost_is_seen(run_ranks):
    errors = run_ranks(2, errors_of, arguments_of(), ("dpo", "kto"), (None,), of_one_pair_less)[0]
    assert len(errors) == 2
    assert all(one > 1e-4 for one in errors.values()), errors


NAN = math.nan
BAD = {  # pairs, kind, reference, words
    "no rejected side": ([(0, None), (1, 2)], "dpo", [0.0] * 4, r"pair 0 \(0, None\)"),
    "one side": ([(0,)], "dpo", [0.0] * 4, "both sides"),
    "equal sides": ([(0, 0)], "dpo", [0.0] * 4, "pair 0 of sequence 0 with itself"),
    "same tokens": ([(0, 2), (1, 3)], "dpo", [0.0] * 4, "pair 0 of the same tokens"),
    "in two pairs": ([(0, 1), (2, 1)], "dpo", [0.0] * 4, "sequence 1 in two pairs"),
    "in no pair": ([(0, 1)], "dpo", [0.0] * 4, "sequence 2 in no pair"),
    "no such place": ([(0, 9)], "dpo", [0.0] * 4, "sequence 9 in pair 0, expected 0 to 3"),
    "length": ([(0, 1), (2, 3)], "dpo", [0.0] * 3, r"shape \[3\], expected \[4\]"),
    "nan": ([(0, 1), (2, 3)], "dpo", [0.0, 0.0, NAN, 0.0], "reference nan of sequence 2"),
    "none": ([(0, 1), (2, 3)], "dpo", None, "found no reference with dpo"),
    "not wanted": ([(0, 1), (2, 3)], "simpo", [0.0] * 4, "found a reference with simpo"),
    "pairs of kto": ([(0, 1), (2, 3)], "kto", [0.0] * 4, "expected one bool for each"),
    "no answer": ([(0, 1), (2, 3)], "simpo", None, "found no answer in sequence 3"),
}


def refusals():
    """Body of a rank: what each bad call says."""
    arguments, said = arguments_of(), {}
    parallel.initialise(arguments)
    session = session_of(arguments)
    tokens = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 5]]
    batch = TokenBatch(tokens, [[0, 1, 1]] * 3 + [[1, 0, 0]])
    for name, (pairs, kind, reference, _) in BAD.items():
        try:
            preference_step(session, batch, pairs, Preference(kind=kind), reference)
        except ValueError as error:
            said[name] = str(error)
    mine = [0.0, 0.0, NAN if dist.get_rank() else 0.0, 0.0]
    try:
        preference_step(session, batch, [(0, 1), (2, 3)], OBJECTIVES["dpo"], mine)
    except ValueError as error:
        said["on one rank"] = str(error)
    parallel.finish()
    return said


def test_every_rank_says_what_is_wrong(run_ranks):
    first, second = run_ranks(2, refusals)
    assert first == second
    assert first.pop("on one rank").startswith("rank 1: found reference nan")
    assert set(first) == set(BAD)
    for name, (_, _, _, words) in BAD.items():
        with pytest.raises(ValueError, match=words):
            raise ValueError(first[name])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kind": "ppo"}, "found kind 'ppo'"),
        ({"kind": "dpo", "beta": 0.0}, "found beta 0.0, expected it above 0"),
        ({"kind": "dpo", "label_smoothing": 0.5}, "found label_smoothing 0.5"),
        ({"kind": "ipo", "label_smoothing": 0.1}, "label_smoothing with ipo"),
        ({"kind": "kto", "desirable_weight": NAN}, "found desirable_weight nan"),
    ],
)
def test_objectives_out_of_range(given, words):
    with pytest.raises(ValueError, match=words):
        Preference(**given)


def of_trl(kind, made, logps):
    """(losses, rewards of chosen, of rejected) by TRL's loss code, on sums or means by sequence."""
    options = pytest.importorskip("trl.import_utils")
    for name, value in vars(options).copy().items():
        if isinstance(value, tuple):  # (False, None) is true: TRL asks an older transformers
            setattr(options, name, value[0])
    module = {"orpo": "orpo", "simpo": "cpo", "kto": "kto"}.get(kind, "dpo")
    trainer = pytest.importorskip(f"trl.trainer.{module}_trainer", exc_type=ImportError)
    device = torch.device("cpu")
    state = SimpleNamespace(
        accelerator=SimpleNamespace(device=device, gather_for_metrics=lambda one: one),
        reference_free=False,
        f_divergence_type=None,
        alpha=0.0,
        loss_type=kind,
        calculate_KL=True,
        beta=made.beta,
        simpo_gamma=made.gamma,
        label_smoothing=made.label_smoothing,
        desirable_weight=made.desirable_weight,
        undesirable_weight=made.undesirable_weight,
    )
    chosen, rejected, of_chosen, of_rejected, others, of_others = logps
    if kind == "kto":
        given = chosen, rejected, others, of_chosen, of_rejected, of_others
        return trainer.KTOTrainer.kto_loss(state, *given)[:3]
    if kind == "simpo":
        return trainer.CPOTrainer.cpo_loss(state, chosen, rejected)
    if kind == "orpo":
        ratios, *rewards = trainer.ORPOTrainer.odds_ratio_loss(state, chosen, rejected)[:3]
        return -chosen - ratios, *rewards
    name = "sigmoid" if kind == "dpo" else kind
    return trainer.DPOTrainer.dpo_loss(state, chosen, rejected, of_chosen, of_rejected, name)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OBJECTIVES)
def test_trl_makes_the_same_losses_and_rewards(kind):
    made = OBJECTIVES[kind]
    generator = torch.Generator().manual_seed(0)
    logps = torch.randn(6, 16, generator=generator, dtype=torch.float64) - 6
    logps[5] -= 1  # so that the divergence is not clamped
    losses, good, bad = of_trl(kind, made, logps)
    c, r = logps[:2] - logps[2:4] * (kind not in ("simpo", "orpo"))
    if kind == "kto":
        kl = float((logps[4] - logps[5]).mean())
        found = made.of_labels(torch.cat((c, r)), torch.arange(32) < 16, kl)
    else:
        found = made.of_pairs(c, r)
    for mine, theirs in ((found, losses), (made.beta * c, good), (made.beta * r, bad)):
        assert torch.allclose(mine, theirs, rtol=0, atol=1e-10)
