"""A loss over whole sequences (GSPO's ratio of sequences) by weights of their tokens."""

import sys

import numpy as np
import torch

from megatron_hdp.session import HdpSession, TokenBatch, weights_of

flags = ["--config", "configs/tiny-cpu.yaml", *sys.argv[1:]]
session = HdpSession.from_flags(flags, vocab_size=257)
optimizer = session.build_optimizer()
data = np.random.default_rng(seed=0)

tokens = [data.integers(0, 257, length) for length in (3000, 40, 700, 1500, 200)]
advantages = data.standard_normal(len(tokens))
old = session.log_probs(tokens)


def of_sequences(log_probs):
    """Each sequence's ratio, by the mean over its tokens, clipped; then the mean of sequences."""
    losses = []
    for new, before, advantage in zip(log_probs, old, advantages, strict=True):
        ratio = (new - before).mean().exp()
        losses.append(-torch.minimum(ratio * advantage, ratio.clamp(0.999, 1.001) * advantage))
    return torch.stack(losses).mean()


for step in range(1, 4):
    loss, weights = weights_of(of_sequences, session.log_probs(tokens))
    session.step(TokenBatch(tokens, weights=weights), divisor=1)
    optimizer.step()
    if session.is_first_rank:
        print(f"step {step}: loss {loss:.6f}")
session.close()
