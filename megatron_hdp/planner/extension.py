"""The compiled planner, `_core`: everything gets it here, or learns what to run to have it."""

from megatron_hdp.compiled import advice

__all__ = ["_core"]

try:
    from megatron_hdp.planner import _core
except ImportError as error:
    raise ImportError(advice("megatron_hdp.planner._core", "planner", error)) from None
