"""A machine that is known: what ranks would measure of a plan, by the evaluator."""

from dataclasses import replace

import numpy as np

from megatron_hdp.planner import evaluate, plan
from megatron_hdp.planner.online import FilterState, SeenCosts, observe


def work_of(made, base):
    """What each rank runs of a plan: attention, linear work, parts of micro-batches; [ranks, 3]."""
    quiet = replace(
        base, kv_bytes_per_token=0, intra_node_hop_s=0, inter_node_hop_s=0, g=0, rank_speeds=()
    )
    attention = evaluate(made, replace(quiet, b=0, b_experts=0)).busy_s
    linear = evaluate(
        made, replace(quiet, a=0, attention_b=0, attention_points=(), block_s=0)
    ).busy_s
    parts = np.repeat(made.parts_of_each, np.diff(made.rank_offsets))
    counts = np.bincount(made.ranks, parts, minlength=made.num_ranks)
    return np.stack([attention, linear, counts.astype(float)], axis=1)


def observed(made, base, machine, generator, noise):
    """Observations of a step that runs a plan on a machine; noise is lognormal, of each rank."""
    quiet = replace(machine, kv_bytes_per_token=0, intra_node_hop_s=0, inter_node_hop_s=0)
    seconds = evaluate(made, quiet).busy_s * np.exp(noise * generator.normal(size=made.num_ranks))
    return np.concatenate([work_of(made, base), seconds[:, None]], axis=1)


def train(lengths, machines, base, noise=0.0, seed=0, behind=2, steps=None, **problem):
    """Steps of a run that learns; yields step, plan, machine, what is known, and findings.

    Args:
        lengths: of the sequences of each step.
        machines: the cost model that is true in each step.
        base: the one that the run begins with.
        problem: of `plan`.
    """
    generator = np.random.default_rng(seed)
    ranks = problem["ranks"]
    seen = SeenCosts(behind)
    state = FilterState.begin(base, ranks)
    for step, (batch, machine) in enumerate(zip(lengths, machines, strict=True)):
        made = plan(batch, cost_model=seen.at(step).of(base, ranks), **problem)
        state, findings = observe(state, observed(made, base, machine, generator, noise))
        seen = seen.with_step(step, state, state.corrections)
        yield step, made, machine, seen, findings
