"""A loop of one's own in twenty lines: plan, run, step."""

import sys

import numpy as np

from megatron_hdp.session import HdpSession, TokenBatch

flags = ["--config", "configs/tiny-cpu.yaml", *sys.argv[1:]]
session = HdpSession.from_flags(flags, vocab_size=257)
optimizer = session.build_optimizer()
data = np.random.default_rng(seed=0)  # alike on all ranks

for step in range(1, 4):
    tokens = [data.integers(0, 257, length) for length in (3000, 40, 700, 1500, 200)]
    batch = TokenBatch(tokens, weights=[data.random(len(one)) for one in tokens])
    plan = session.plan(batch)
    report = session.step(batch, plan=plan)
    optimizer.step()
    if session.is_first_rank:
        rings = np.diff(plan.rank_offsets).tolist()
        print(f"step {step}: loss {report.loss:.6f}, micro-batches on {rings} ranks")
session.close()
