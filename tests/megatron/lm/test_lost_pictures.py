"""A rank is lost in Megatron-LM's own loop while it trains with pictures: no step changes.

Needs what test_training.py needs.
"""

import pytest

from megatron_hdp.convert.adapters import record_of
from tests.data.media import sources
from tests.megatron.lm.runs import (
    LENGTHS,
    OVERLAPPED,
    SHARDED,
    STAGES,
    drive,
    require_same_states,
)
from tests.megatron.lm.test_lost_rank import (
    STEPS,
    dies_in,
    lines_of,
    log_of,
    pytestmark,
    require_lines_once,
    require_traced,
    surviving,
)
from tests.megatron.lm.test_pictures import SIZES, SMALL
from tests.support.gradients import write_corpus
from tests.training.test_pictures import model_folder

__all__ = ["pytestmark"]

ENCODING = "megatron_hdp.megatron.media.encoding"
STORE = "megatron_hdp.megatron.media.row_store"
ROWS = dies_in("RowStore.send", 3, True, STORE)
AGAIN = dies_in("StepMedia._encode_again", 3, module=ENCODING)
IN_WAVES = AGAIN | {"step": 8}  # three a step
JOINS = {"replaces": True, "waits_at": 5}
ADAPTERS = ["--lora-rank", "4", "--lora-alpha", "8"]
LOST = {  # member, fault, flags, what else the run has; whose steps it has
    "rows": (0, ROWS, [], {}, "one"),
    "again": (1, AGAIN, [], {}, "one"),
    "joins": (3, dies_in("LmSurvival.apply", 3, True), [], JOINS, "one"),
    "overlapped": (2, AGAIN, OVERLAPPED, JOINS, "sharded one"),
    "stages": (1, IN_WAVES, [*STAGES, "--hdp-tokens-per-rank", "200"], {}, "stages one"),
    "adapters": (2, ROWS, ADAPTERS, JOINS, "adapters one"),
}
ALONE = {  # flags, ranks
    "one": ([], 1),
    "adapters one": (ADAPTERS, 1),
    "sharded one": (SHARDED, 1),
    "stages one": (STAGES, 2),
}
WITHIN = {"overlapped": (1e-5, 1e-4)}
"""Of losses, and of weights, in float32: a sharded optimizer wants one type of weights. The others
are in float64 but for what Megatron rounds."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    runs = tmp_path_factory.mktemp("lost")
    write_corpus(runs, LENGTHS)
    data = ["--hdp-data", str(sources.write_mixture(runs, "some text without pictures\n" * 3))]
    same = [*SIZES, "--hdp-encoder", str(model_folder(runs / "model"))]

    def pictured(name, flags=(), **more):
        how = {"model": SMALL, "data": data, "fp64": flags not in (SHARDED, OVERLAPPED)}
        return surviving(runs, name, [*same, *flags], **how, **more)

    beside = [*ADAPTERS, "--pretrained-checkpoint", str(runs / "one" / "saved")]
    plan = [
        pictured(name, flags, ranks=ranks, tokens="400") for name, (flags, ranks) in ALONE.items()
    ]
    for name, (member, fault, flags, more, _) in LOST.items():
        plan.append(pictured(name, flags, survives={str(member): fault}, **more))
    plan.append(pictured("beside one", beside, ranks=1, tokens="400"))
    lost = {"0": ROWS, "1": dies_in("LmSurvival.apply", 5, True)}
    more = {"survives": lost, "ranks": 2, "tokens": "200", "waiter": 1, **JOINS}
    plan.append(pictured("beside", beside, **more))
    drive(runs, plan)
    return runs


def require_same_run(runs, name, alone, within=1e-9, states_within=1e-6):
    found, expected = lines_of(runs, name), lines_of(runs, alone)
    assert [one["step"] for one in found] == list(range(1, STEPS + 1))
    for one, other in zip(found, expected, strict=True):
        assert one["media_rows"] == other["media_rows"] > 0
        for key in ("loss", "grad_norm", "learning_rate", "consumed_tokens"):
            assert one[key] == pytest.approx(other[key], rel=within), (one["step"], key)
    folders = f"{name}/saved", f"{alone}/saved"
    require_same_states(runs, *folders, iteration=STEPS, rel=states_within)


@pytest.mark.parametrize("name", LOST)
def test_a_rank_is_lost(runs, name):
    member, _, flags, more, alone = LOST[name]
    require_same_run(runs, name, alone, *WITHIN.get(name, (1e-9, 1e-6)))
    require_lines_once(runs, name)
    lost, joined = require_traced(runs, name, 4, goes_back=name == "overlapped")
    assert member in lost and bool(joined) == bool(more), log_of(runs, name)


def test_those_who_joined_save_adapters_as_those_who_loaded(runs):
    """Both that had loaded the base are lost: nobody else writes what the checkpoint says."""
    require_same_run(runs, "beside", "beside one")
    said = (runs / "log beside.said").read_text()
    assert "member 0 was killed" in said and "member 1 was killed" in said, said
    records = [record_of(runs / one / "saved" / "iter_0000006") for one in ("beside", "beside one")]
    assert records[0] == records[1] and records[0]["rank"] == 4
