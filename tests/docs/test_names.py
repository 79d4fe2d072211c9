"""Every name in backticks on a page is one that the code declares, or is listed as another's."""

import pytest

from tests.docs import names
from tests.docs.pages import PAGES, ROOT

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_names_are_declared(path):
    assert names.unknown_names(path.read_text()) == []


@pytest.mark.parametrize(
    ("known", "planted"),
    [
        ("scripts/test.sh", "scripts/gone.sh"),
        ("types.py", "strategies.hpp"),
        ("planner/types.py", "planner/gone.py"),
        ("planner.types.Plan.validate", "planner.types.Gone"),
        ("megatron_hdp.planner", "megatron_hdp.gone"),
        ("Plan.validate", "Plan.gone"),
        ("RingAttention", "RingAttentionGone"),
        ("--hybrid-data-parallel", "--hybrid-data-paralel"),
        ("--save DIR --max-restarts 3", "--save DIR --gone"),
        ("num_micro_batches", "num_micro_batchs"),
        ("global-batch-tokens", "global-batch-gone"),
        ("end_together()", "end_apart()"),
    ],
)
def test_a_planted_name_is_found(known, planted):
    assert names.unknown_names(f"a `{known}` and\n```bash\n`--gone`\n```\n") == []
    assert names.unknown_names(f"a `{planted}`") == [planted.split()[-1].removesuffix("()")]


def test_every_room_is_listed():
    assert names.missing_rooms(ARCHITECTURE) == []
    assert names.missing_rooms(ARCHITECTURE.replace("ep_balance/", "")) == ["ep_balance"]


def test_what_is_foreign_is_on_a_page():
    """Lists of others' names stay short."""
    text = "".join(path.read_text() for path in PAGES)
    assert [one for kind in names.FOREIGN.values() for one in kind if one not in text] == []
