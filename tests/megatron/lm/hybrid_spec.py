"""Blocks of a hybrid for ``--spec``: Megatron's own are of TransformerEngine's classes."""

from types import SimpleNamespace

from tests.support.hybrids import local_stack

# the plugin's patch makes norms right under sequence parallelism
STACK = local_stack(SimpleNamespace(sequence_parallel=False, num_moe_experts=4))
