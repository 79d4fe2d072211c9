"""The compiled order of the data, `_order`: got here, or it is said what to run to have it."""

from megatron_hdp.compiled import advice

__all__ = ["_order"]

try:
    from megatron_hdp.data import _order
except ImportError as error:
    raise ImportError(advice("megatron_hdp.data._order", "order of the data", error)) from None
