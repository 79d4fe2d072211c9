"""The table of what a hostile user tries: rows that hold, break, fail or hang."""

import os
import time

import pytest

from tests.support.scripts import script_module

with script_module("break.py") as breaking:
    pass


def holds(folder):
    (folder / "file").write_text("x")
    yield "one", os.listdir() == ["file"], ""
    yield "two", True, ""


def breaks(folder):
    yield "one", True, ""
    yield "two", False, "exit 0"


def raises(folder):
    yield "one", True, ""
    raise KeyError("ours")


def hangs(folder):
    yield "one", True, ""
    time.sleep(60)


def dies(folder):
    os._exit(0)


def does_nothing(folder):
    return []


@pytest.mark.parametrize(
    ("function", "note"),
    [
        (breaks, "breaks: two: exit 0"),
        (raises, "raises: KeyError: 'ours'"),
        (hangs, "hangs: the time limit of 1 s"),
        (dies, "dies: it ended without a result"),
        (does_nothing, "does_nothing: nothing was tried"),
    ],
)
def test_a_row_that_does_not_hold_is_told_with_its_reason(function, note):
    good, bad = (
        breaking.run(breaking.Row(one.__name__, "cli", 1.0 if one is hangs else 30.0, one))
        for one in (holds, function)
    )
    assert good.has_held and not bad.has_held and bad.seconds < 20
    head, *lines = breaking.table([good, bad]).splitlines()
    assert head.split()[-2:] == ["held", "seconds"]
    assert lines[0].split()[:4] == ["holds", "cli", "2", "yes"]
    assert lines[1].split()[3] == "NO" and lines[2].strip() == note


def test_rows_are_chosen_by_room_and_name(capsys, monkeypatch):
    rows = breaking.rows_of()
    assert {row.room for row in breaking.rows_of("cli")} == {"cli"}
    (one,) = breaking.rows_of(only=[rows[0].name])
    assert one is rows[0] and one.limit_s > 0
    assert breaking.main(["--list"]) == 0
    assert all(row.name in capsys.readouterr().out for row in rows[:1])
    for words in (["--only", "nothing"], ["--room", "nowhere"]):
        with pytest.raises(SystemExit):
            breaking.main(words)
        assert "expected" in capsys.readouterr().err
    monkeypatch.setitem(breaking.ROWS, "breaks", breaking.Row("breaks", "cli", 30.0, breaks))
    assert breaking.main(["--only", "breaks"]) == 1
    assert breaking.main(["--only", "speeds_and_costs_out_of_range"]) == 0
