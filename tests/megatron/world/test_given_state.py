"""State of an optimizer that is given to others, also of an Adam that counts steps elsewhere."""

import torch

from megatron_hdp.megatron.world.given_state import _begin_state
from megatron_hdp.megatron.world.replicated import _on_host, _take_over


def test_a_state_without_steps_of_its_own_is_begun():
    """As TransformerEngine's, which counts them in its settings."""
    weight = torch.nn.Parameter(torch.ones(3))
    fused = torch.optim.SGD([weight], lr=0.1, momentum=0.9)  # its state has no step either
    _begin_state(fused)
    assert fused.state[weight]["momentum_buffer"].tolist() == [0.0] * 3
    assert weight.tolist() == [1.0] * 3 and fused.param_groups[0]["lr"] == 0.1
    adam = torch.optim.Adam([weight], lr=0.1)
    _begin_state(adam)
    assert adam.state[weight]["step"] == 0


def test_numbers_lie_where_they_lay():
    given = _on_host({"step": torch.tensor(4.0), "lr": 0.1})
    mine = {"step": torch.zeros((), device="meta"), "lr": 0.0}  # a device that is not the giver's
    _take_over(mine, given)
    assert mine["step"].device.type == "meta" and mine["lr"] == 0.1
    fresh = {}
    _take_over(fresh, given)
    given["step"] += 1
    assert fresh["step"] == 4.0, "a copy"
