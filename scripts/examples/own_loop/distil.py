"""Distillation from a teacher's hidden states, through a projection that is trained with it."""

import sys

import numpy as np
import torch

from megatron_hdp.session import FromHidden, HdpSession, TokenBatch

flags = ["--config", "configs/tiny-cpu.yaml", *sys.argv[1:]]
session = HdpSession.from_flags(flags, vocab_size=257)
optimizer = session.build_optimizer()
data = np.random.default_rng(seed=0)

torch.manual_seed(0)  # the projection begins alike on all ranks
projection = torch.nn.Linear(64, 32, bias=False)
of_projection = torch.optim.SGD(projection.parameters(), lr=0.1)


def squared_distance(hidden, arrays):
    """Of each token, to the teacher's."""
    return (projection(hidden) - arrays["teacher"]).square().mean(-1)


tokens = [data.integers(0, 257, length) for length in (3000, 40, 700, 1500, 200)]
teacher = [data.standard_normal((len(one), 32)).astype(np.float32) for one in tokens]
batch = TokenBatch(tokens, arrays={"teacher": teacher})
for step in range(1, 4):
    report = session.step(batch, FromHidden(squared_distance, list(projection.parameters())))
    optimizer.step()
    of_projection.step()
    if session.is_first_rank:
        print(f"step {step}: loss {report.loss:.6f}")
session.close()
