"""DPO: pairs of a chosen and a rejected answer, against a frozen reference."""

import sys

import numpy as np

from megatron_hdp.session import HdpSession, Preference, TokenBatch, preference_step

flags = ["--config", "configs/tiny-cpu.yaml", *sys.argv[1:]]
session = HdpSession.from_flags(flags, vocab_size=257)
optimizer = session.build_optimizer()
data = np.random.default_rng(seed=0)

tokens = [data.integers(0, 257, length) for length in (3000, 40, 700, 1500, 200, 210)]
answers = [np.arange(len(one)) >= 20 for one in tokens]  # behind prompts of 20 tokens
batch = TokenBatch(tokens, loss_mask=answers)
pairs = [(0, 1), (3, 2), (4, 5)]  # places of (chosen, rejected)
reference = [float(one.sum()) for one in session.log_probs(batch)]  # before training

for step in range(1, 4):
    report = preference_step(session, batch, pairs, Preference(kind="dpo"), reference)
    optimizer.step()
    if session.is_first_rank:
        print(f"step {step}: loss {report.loss:.6f} margin {report.margin:.4f}")
session.close()
