"""Loops of others: losses that raise, models that are taken over and given back, offload."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from breaking.rows import Try, row


def _on_ranks(
    what: str,
    holds: Callable[[Any], bool],
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    **more: Any,
) -> Try:
    """A try on real ranks, judged by what they return or the error that ends them."""
    from tests.support.ranks import RankError, run_ranks

    found: Any
    try:
        found = run_ranks(ranks, function, *args, **more)
    except RankError as error:
        found = error
    return what, holds(found), f"{found}"[-300:]


@row("session", 300)
def losses_that_raise(folder: Path) -> Iterator[Try]:
    """In forward every rank says so and the next step runs; in backward the job ends at once."""
    from tests.session.test_refusals import wrong_answers
    from tests.session.test_survival import fail, step_with

    yield _on_ranks("calls that are wrong", lambda found: found == [{}, {}], wrong_answers)
    ended = "died with exit code 3 before it returned"
    yield _on_ranks("backward", lambda found: ended in str(found), step_with, fail, folder)
    told = (folder / "rank-0").read_text()
    yield "the other rank", "rank 1 (host " in told and "RuntimeError: planted" in told, told[-300:]


@row("session", 300)
def models_given_back(folder: Path) -> Iterator[Try]:
    """While a session has a model its classes keep their names; then it is what it was."""
    from tests.session.test_taken_over import LAYOUTS, taken_and_given_back

    def is_as_before(found: Any) -> bool:
        return isinstance(found, list) and all(one[1:5] == ([], {}, [], True) for one in found)

    for name, layout in LAYOUTS.items():
        yield _on_ranks(name, is_as_before, taken_and_given_back, **layout)


@row("session", 600)
def offload_beside_recomputation(folder: Path) -> Iterator[Try]:
    """The bits of a step without offload, whichever modules are recomputed."""
    from tests.gradient_equivalence.case import plans_of
    from tests.gradient_equivalence.offloaded import OFFLOAD
    from tests.gradient_equivalence.test_gradients import TOLERANCE, with_and_without_offload

    def is_exact(found: Any) -> bool:
        if not isinstance(found, list):
            return False
        error, has_same_bits, num_bytes = found[0]
        return bool(has_same_bits and error <= TOLERANCE and num_bytes > 1000)

    for name, case in OFFLOAD.items():
        arguments = case.arguments_of(folder, case)
        if arguments.recompute_granularity is None:
            continue
        (stay,), (leave,) = (plans_of(arguments, case, offload=one) for one in (False, True))
        body = (with_and_without_offload, name, arguments, stay, leave)
        yield _on_ranks(name, is_exact, *body, ranks=case.ranks)
