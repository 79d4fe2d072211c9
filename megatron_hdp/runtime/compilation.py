"""How many variants of one function torch.compile makes before it runs the function uncompiled.

Megatron's fused functions are compiled one by one and called with another number of tokens in every
micro-batch. PyTorch makes sizes symbolic at the second call, so sizes alone cost two variants. Each
of these is multiplied by what else a variant is made for: gradients are recorded or not, as in
recomputation; an input wants a gradient or not, as in a recomputed layer's two residual additions;
there is a bias or none; an expert has no token, or one; a tensor has 2^31 elements or more, as 64K
tokens of a wide MLP have, and indices need 64 bits. PyTorch's limit is 8; beyond it the function
runs uncompiled, and only a warning says so.
"""

from __future__ import annotations

import torch._dynamo

MAX_VARIANTS = 64
"""Variants of a function: (static, symbolic, 64-bit, no token, one token) x (gradients recorded,
not recorded, not recorded and not wanted) x (bias, none) are 30, and as many again are room."""


def allow_variants() -> None:
    """Raises PyTorch's limit to `MAX_VARIANTS` in every thread of this process.

    Since PyTorch 2.13 at the latest what is set counts in the thread that sets it, and a GPU's
    backward pass, which calls compiled functions too, runs in a thread of its own. So the default
    is raised as well.
    """
    config = torch._dynamo.config
    config.recompile_limit = MAX_VARIANTS
    config._config["recompile_limit"].default = MAX_VARIANTS
