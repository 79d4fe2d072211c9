"""Policy gradients: log-probabilities out, then PPO's clipped loss, divided by the sequences."""

import sys

import numpy as np
import torch

from megatron_hdp.session import FromLogProbs, HdpSession, TokenBatch


def clipped(log_probs, arrays):
    """PPO's loss of each token, and which ratios were clipped."""
    ratio = (log_probs - arrays["old"]).exp()
    of_clipped = ratio.clamp(0.8, 1.2) * arrays["advantage"]
    losses = -torch.minimum(ratio * arrays["advantage"], of_clipped)
    return losses, {"clipped": (ratio - 1).abs() > 0.2}


flags = ["--config", "configs/tiny-cpu.yaml", *sys.argv[1:]]
session = HdpSession.from_flags(flags, vocab_size=257)
optimizer = session.build_optimizer()
data = np.random.default_rng(seed=0)

# what a sampler gives: prompts of 20 tokens with answers, and a reward for each
tokens = [data.integers(0, 257, length) for length in (3000, 40, 700, 1500, 200)]
masks = [np.arange(len(one)) >= 20 for one in tokens]
advantages = [np.full(len(one), data.standard_normal(), np.float32) for one in tokens]

sampled = TokenBatch(tokens, loss_mask=masks)
old = session.log_probs(sampled)
arrays = {"old": old, "advantage": advantages}
for step in range(1, 4):
    batch = TokenBatch(tokens, loss_mask=masks, arrays=arrays)
    report = session.step(batch, FromLogProbs(clipped), divisor=len(tokens))
    optimizer.step()
    if session.is_first_rank:
        share = report.sums["clipped"] / report.loss_tokens
        print(f"step {step}: loss {report.loss:.6f}, {share:.6f} of the ratios clipped")
session.close()
