"""The compiled planner of items, `_items`: got here, or it is said what to run to have it."""

from megatron_hdp.compiled import advice

__all__ = ["_items"]

try:
    from megatron_hdp.media import _items
except ImportError as error:
    raise ImportError(advice("megatron_hdp.media._items", "planner of items", error)) from None
