"""``megatron-hdp simulate --mtbf``: what failures would cost the run."""

from pathlib import Path

import pytest

from megatron_hdp.cli.main import main
from megatron_hdp.simulator.execution import FAILURE_KEYS
from tests.cli.test_simulate import CONFIG, report


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(CONFIG)
    return path


QUICK = ("--steps", "1", "--strategies", "auto", "--data", "preset:byted")


def test_a_run_without_one_host_is_simulated_too(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--mtbf", "7.9", "--replace-minutes", "30", *QUICK, "--", "--save-interval", "100")
    flags += ("--save", str(config.parent / "saved"))
    found = report(config, *flags)
    failures = found["failures"]
    assert set(failures) == set(FAILURE_KEYS)
    step_s = found["strategies"]["auto"]["step_time_s"]
    # half of the ranks are left: more than twice as slow would mean that they hardly balance
    assert 1.5 * step_s < failures["short_step_s"] < 2.5 * step_s
    assert failures["checkpoint_s"] == pytest.approx(100 * step_s)
    assert failures["missing_share"] == pytest.approx(
        30 * 60 / (7.9 * 3600) * (1 - step_s / failures["short_step_s"])
    )
    shown = capsys.readouterr().out
    assert "a failure each 7.9 h, auto, share of the time lost:" in shown
    assert "MB of host memory a GPU" in shown
    assert "failures" not in report(config, *QUICK)


def test_one_host_has_nobody_left_and_a_short_run_may_be_too_small(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = report(config, "--mtbf", "10", *QUICK, gpus=8)["failures"]
    assert failures["short_step_s"] is None and failures["missing_share"] == 0
    assert "they wait for its replacement" in capsys.readouterr().out
    replicated = config.with_name("replicated.yaml")
    replicated.write_text(CONFIG.replace("use-distributed-optimizer: true\n", ""))
    assert report(replicated, "--mtbf", "10", *QUICK, gpus=8)["failures"]["copies_s"] == 0


def test_a_time_that_is_none_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--mtbf", "0"), ("--restart-minutes", "-1"), ("--mtbf", "nan")):
        with pytest.raises(SystemExit):
            main(["simulate", "--config", str(config), "--gpus", "8", flag, value])
        assert "expected a finite number above 0" in capsys.readouterr().err
