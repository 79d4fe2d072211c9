"""Which of its kernels TransformerEngine takes: chosen once for a kind of call, never unfused ones.

TransformerEngine chooses in a call's forward pass, by the parameters of the call and the variables
`NVTE_*_ATTN`; backward keeps what forward took. It remembers the last choice only, so that calls
of two kinds, in turn, would each choose anew. Its own kernels of plain matrix products keep all
scores of a sequence in memory and know no rings.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

_PARAMS = "attention_params"
_LOGGER = "DotProductAttention"
_KERNELS = {  # what it says of its choice -> in words
    "use_flash_attention": "flash-attn",
    "use_fused_attention": "cuDNN",
    "use_unfused_attention": "unfused",
}


class NoKernelError(ValueError):
    """TransformerEngine has no kernel for a call; says why not cuDNN's."""


class KernelChoices:
    """A choice for each kind of call, kept beside the one that TransformerEngine remembers.

    A kept choice that does not fit a call is no error: the library compares parameters in every
    call, and chooses anew.

    Attributes:
        why_not_kept: None, or how this version's memory of choices differs from the known one;
            it then chooses anew whenever kinds of calls alternate.
    """

    def __init__(self) -> None:
        self._kept: dict[str, dict[str, Any]] = {}
        self._last, self.why_not_kept = _memory_of_the_library()

    @contextmanager
    def made_for(self, kind: str) -> Iterator[None]:
        """Calls of the kind in this context go by its choice; afterwards nothing is changed."""
        with _without_unfused():
            if self._last is None:
                yield
                return
            others = dict(self._last)
            self._last.update(self._kept.get(kind, {_PARAMS: None}))
            try:
                yield
                self._kept[kind] = dict(self._last)
            finally:
                self._last.clear()
                self._last.update(others)

    def kernel_of(self, kind: str) -> str | None:
        """The kernel that the kind's last call took; None before there was one."""
        return _name_of(self._kept.get(kind, {}))

    def kernel_for(self, kind: str, **sizes: int) -> str | None:
        """The kernel for a call like the kind's last one, of other sizes; None if there is none.

        Args:
            kind: there was a call of it.
            sizes: parameters of the call, by TransformerEngine's names; those that its version has
                not are left out.
        """
        params = self._kept[kind][_PARAMS]
        known = {one.name for one in fields(params)}  # older ones choose by fewer
        changes = {name: size for name, size in sizes.items() if name in known}
        with _without_unfused() as utils:
            try:
                chosen = utils.get_attention_backend(replace(params, **changes))
            except NoKernelError:
                return None
        flash, _, fused, _, unfused, *_ = chosen
        return _name_of(dict(zip(_KERNELS, (flash, fused, unfused), strict=True)))

    def is_deterministic(self, kind: str) -> bool:
        """True where kernels of the kind must give the same bits every time."""
        return bool(self._kept[kind][_PARAMS].deterministic)


def _memory_of_the_library() -> tuple[dict[str, Any] | None, str | None]:
    """The dictionary of the last choice, or why there is none."""
    from transformer_engine.pytorch.attention import dot_product_attention

    memory = getattr(dot_product_attention, "_attention_backends", None)
    if isinstance(memory, dict) and memory.keys() >= {_PARAMS, *_KERNELS}:
        return memory, None
    found = sorted(memory) if isinstance(memory, dict) else type(memory).__name__
    return None, f"found {found} as its memory of choices, expected {[_PARAMS, *_KERNELS]}"


@contextmanager
def _without_unfused() -> Iterator[Any]:
    """Within it the library's function that chooses never takes unfused kernels, its last resort.

    Not by its variable ``NVTE_UNFUSED_ATTN``: Megatron checks that when it makes another model, and
    to set a variable in every call is not safe beside threads of C that read others. The library
    looks its function up in its module, which is yielded.
    """
    from transformer_engine.pytorch.attention.dot_product_attention import utils

    choose = utils.get_attention_backend

    def chosen(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
        flash, flash_version, fused, fused_number, _, *more = choose(*args, **kwargs)
        if not flash and not fused:
            reasons = _why_not_cudnn(utils, lambda: choose(*args, **kwargs))
            raise NoKernelError(f"found no kernel of flash-attn's or cuDNN's: {reasons}")
        return flash, flash_version, fused, fused_number, False, *more

    utils.get_attention_backend = chosen
    try:
        yield utils
    finally:
        utils.get_attention_backend = choose


def _why_not_cudnn(utils: Any, choose: Callable[[], object]) -> str:
    """What the library says where it is asked to, as by ``NVTE_DEBUG``, while it chooses again."""
    said: list[str] = []

    def note(record: logging.LogRecord) -> bool:
        said.append(record.getMessage())
        return False

    known: Any = getattr(utils, "AttentionLogging", None)
    logger = logging.getLogger(_LOGGER)
    if not hasattr(known, "_log_level"):
        return "NVTE_DEBUG=1 and NVTE_DEBUG_LEVEL=2 make it say why"
    before, known._log_level = known._log_level, logging.DEBUG
    logger.addFilter(note)
    try:
        choose()
    finally:
        known._log_level = before
        logger.setLevel(before)
        logger.removeFilter(note)
    reasons = [" ".join(one.split()) for one in said if one.startswith("Disabling FusedAttention")]
    return "; ".join(reasons)[:600] or "it does not say why"


def _name_of(choice: dict[str, Any]) -> str | None:
    return next((name for key, name in _KERNELS.items() if choice.get(key)), None)
