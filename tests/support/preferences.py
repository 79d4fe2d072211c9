"""Rows of preferences, runs over them, and what autograd on one rank makes of a step of theirs."""

import json

import numpy as np
import torch
from torch.nn.functional import logsigmoid

from megatron_hdp.data.mixture import Position
from megatron_hdp.megatron.model.initialisation import global_parameters
from tests.support import gradients
from tests.support.gradients import VOCABULARY, tiny_arguments

REFERENCED = ("dpo", "ipo", "kto")


def write_rows(path, num, seed=0, longest=150, labelled=False):
    """Pairs, or labelled answers, of texts of very different lengths."""
    rng = np.random.default_rng(seed)

    def text(least, most):
        return "".join(map(chr, rng.integers(97, 123, rng.integers(least, most))))

    rows = []
    for i in range(num):
        prompt = text(0, 30)
        sides = [text(1, longest if i % 4 == 0 else 25) for _ in range(2)]
        row = {"prompt": prompt, "chosen": sides[0], "rejected": sides[1]}
        if labelled:
            row = {"prompt": prompt, "completion": sides[0], "label": bool(i % 3)}
        rows.append(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def preference_arguments(path, objective="dpo", **overrides):
    """A tiny model in float64, eight pairs a step; long answers need two ranks."""
    settings = {
        "data_path": (str(path),),
        "split": "1,0,0",
        "seq_length": 200,
        "max_position_embeddings": 200,
        "hdp_tokens_per_rank": 128,
        "global_batch_size": 8,
        "hdp_objective": objective,
        "train_iters": 4,
        "lr_decay_iters": 4,
        "lr": 1e-2,
        "log_interval": 1000,
    }
    return tiny_arguments(None, **(settings | overrides))


def answers_of(corpus, step):
    """(tokens, mask of the answer, whether it is good, source, document) of each sequence."""
    found = []
    for source, row, length in zip(step.sources, step.rows, step.lengths, strict=True):
        tokens = corpus.tokens(int(source), int(row), 0, int(length))
        mask = corpus.is_trained(int(source), int(row), 0, int(length) - 1)
        one = corpus.sources[source]
        document = one.document(int(row))
        is_good = bool(one.sides.is_good[document])
        found.append((torch.from_numpy(tokens), torch.from_numpy(mask), is_good, source, document))
    return found


def sums_of(gpt, answers):
    """Of answers, by a stock model, one sequence at a time; and their tokens."""
    sums = []
    for tokens, mask, *_ in answers:
        n = len(tokens)
        causal = torch.ones(n, n, dtype=torch.bool).triu(1)[None, None]
        logits = gpt(tokens[None], torch.arange(n)[None], causal)[0]
        found = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        sums.append((found * mask).sum())
    return torch.stack(sums), torch.tensor([int(mask.sum()) for _, mask, *_ in answers])


def unrelated_to(answers, group, longest):
    """Each prompt with the answer of the row before: tokens, and mask of the answer."""
    found = []
    for i, (tokens, mask, *_) in enumerate(answers):
        others, of_others, *_ = answers[i - group]
        p, a = int(mask.nonzero()[0]) + 1, int(of_others.nonzero()[0]) + 1
        crossed = torch.cat((tokens[:p], others[a:]))[:longest]
        of_answer = torch.cat((torch.zeros(p - 1, dtype=torch.bool), of_others[a - 1 :]))
        found.append((crossed, of_answer[: longest - 1]))
    return found


def losses_of(arguments, sums, counts, good, kl):
    """By the definitions, of sums less the reference's: of each pair, or of each answer."""
    kind, beta = arguments.hdp_objective, arguments.hdp_beta
    if kind == "kto":
        good = torch.tensor(good)
        weights = torch.where(
            good, arguments.hdp_desirable_weight, arguments.hdp_undesirable_weight
        )
        return weights * (1 - torch.sigmoid(beta * torch.where(good, sums - kl, kl - sums)))
    means = sums / counts
    c, r = sums.view(-1, 2).unbind(1)
    of_c, of_r = means.view(-1, 2).unbind(1)
    if kind == "dpo":
        wrong = arguments.hdp_label_smoothing
        margin = beta * (c - r)
        return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)
    if kind == "ipo":
        return (of_c - of_r - 1 / (2 * beta)) ** 2
    if kind == "simpo":
        return -logsigmoid(beta * (of_c - of_r) - arguments.hdp_gamma)
    p, q = of_c.exp(), of_r.exp()
    return -of_c - beta * torch.log(torch.sigmoid(torch.log(p / (1 - p) / (q / (1 - q)))))


def expected_step(arguments, corpus, mixture, known, left_out=()):
    """Mean loss and gradients of the first step, by autograd through a stock model.

    Args:
        arguments: of the run.
        corpus: opened.
        mixture: that draws the step.
        known: the reference's sums by (source, document), None without one; those of answers
            behind prompts of others under ``None``, where it has them.
        left_out: documents that are corrupt, whose other side goes with them.
    """
    step = mixture.step(Position())
    answers = answers_of(corpus, step)
    others = unrelated_to(answers, corpus.group, arguments.seq_length)
    whole = [i for i, (tokens, _) in enumerate(others) if tokens.max() < VOCABULARY]
    if left_out and corpus.group == 2:
        answers = [
            one
            for pair in zip(answers[::2], answers[1::2], strict=True)
            for one in pair
            if not {pair[0][4], pair[1][4]} & set(left_out)
        ]
    gpt = gradients.stock_model(arguments)
    names, parameters = zip(*global_parameters(gpt), strict=True)
    sums, counts = sums_of(gpt, answers)
    if known is not None:
        reference = [known[int(one[3]), one[4]] for one in answers]
        sums = sums - torch.tensor(reference, dtype=torch.float64)
    kl = 0.0
    if known is not None and None in known:
        with torch.no_grad():
            of_others = sums_of(gpt, [others[i] for i in whole])[0]
        of_others = of_others.numpy() - [known[None][i] for i in whole]
        kl = max(of_others.mean().item(), 0.0)
        assert kl > 0.1, "a divergence of 0 shows nothing"
    losses = losses_of(arguments, sums, counts, [one[2] for one in answers], kl)
    loss = losses.mean()
    grads = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    return loss.item(), grads, (arguments.hdp_beta * sums).detach()
