"""``megatron-hdp check`` of runs that train adapters, or leave weights as they are."""

import pytest

from megatron_hdp.cli.checking import as_text
from tests.cli.test_check import finding, with_lines


def test_adapters_need_less_memory_and_time(tmp_path):
    whole, tuned = (finding(with_lines(tmp_path, *lines), 8) for lines in ((), ("lora-rank: 16",)))
    assert whole.is_sound and tuned.is_sound
    assert ", 2M are trained;" in as_text(tuned) and "are trained" not in as_text(whole)
    assert tuned.memory.gradients < whole.memory.gradients / 45
    assert tuned.memory.optimizer < whole.memory.optimizer / 45
    adapters = 4 * 16 * 8 * 8192 * 2  # what is as wide as their rank
    assert tuned.memory.activations - whole.memory.activations == adapters
    assert 0.6 < tuned.step.step_s / whole.step.step_s < 0.9


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("lora-rank: 2", "lora-targets: [linear_qkv, linear_q_proj]"), "found linear_q_proj, wh"),
        (("hdp-frozen: ['embedding.*', '*.linear_fc3.*']",), "matches '*.linear_fc3.*'"),
        (("hdp-frozen: ['*']",), "found every weight frozen"),
        (("lora-rank: 2", "hdp-frozen: ['embedding.*']"), "--hdp-frozen: found --lora-rank"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path, lines, message):
    (refusal,) = finding(with_lines(tmp_path, *lines), 8).refusals
    assert message in refusal
