"""A model that a session takes over keeps the names that exporters know, and comes back."""

import pytest
import torch
from megatron.core.utils import get_model_config

from megatron_hdp.megatron import parallel
from megatron_hdp.session import HdpSession
from tests.gradient_equivalence.cases import RECOMPUTE
from tests.support.gradients import EXPERTS
from tests.support.own_loop import VOCABULARY, arguments_of, stock_chunk

TOKENS = [list(range(3, 40)), [5, 9, 200, 7]]
LAYOUTS = {
    "experts": EXPERTS | {"num_layers": 2},
    "offload": {"num_layers": 4, "hdp_offload": "auto"},
    "recompute": RECOMPUTE,
}


def class_names(chunk):
    return {path: type(module).__name__ for path, module in chunk.named_modules()}


def everything(chunk):
    """What a model is, by identity: classes, attributes, entries of dicts, of parameters too."""
    found = {}
    config = get_model_config(chunk)
    parts = {**dict(chunk.named_modules()), **dict(chunk.named_parameters()), "config": config}
    for path, part in parts.items():
        found[path, ""] = type(part)
        for name, value in vars(part).items():
            found[path, name] = value
            if isinstance(value, dict):
                found |= {(path, name, key): one for key, one in value.items()}
    return {
        key: one if isinstance(one, int | float | str) else id(one) for key, one in found.items()
    }


def logits(chunk):
    ids = torch.tensor(TOKENS[:1])
    positions = torch.arange(ids.shape[1])[None]
    mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return chunk(ids, positions, mask)


def taken_and_given_back(**overrides):
    arguments = arguments_of(**overrides)
    parallel.initialise(arguments)
    parallel.set_seeds(arguments.seed)
    chunk = stock_chunk(arguments, 0)
    expected = logits(chunk)  # first: torch.compile marks parameters
    names, before = class_names(chunk), everything(chunk)
    of_hdp = {"hdp_tokens_per_rank": 64, "hdp_offload": arguments.hdp_offload}
    given = {"vocab_size": VOCABULARY, "seq_length": 200, **of_hdp}
    refused = ""
    try:
        HdpSession.of_model([chunk], **given, hdp_attention="flash-3")
    except ValueError as error:
        refused = str(error)
    changed = [(key, before.get(key), one) for key, one in everything(chunk).items()]
    left = [one for one in changed if one[1] != one[2]]
    session = HdpSession.of_model([chunk], **given)
    session.step(TOKENS)
    session.log_probs(TOKENS)
    while_taken = class_names(chunk)
    renamed = {path: name for path, name in while_taken.items() if name != names[path]}
    session.release()
    after = everything(chunk)
    differs = [key for key in before.keys() | after if before.get(key) != after.get(key)]
    differs = [key for key in differs if "grad" not in key[1] and key[1] != "current_microbatch"]
    try:
        session.step(TOKENS)
    except ValueError as error:
        refused += str(error)
    return refused, left, renamed, differs, torch.equal(expected, logits(chunk)), len(before)


@pytest.mark.parametrize(
    "layout",
    ["experts", *(pytest.param(one, marks=pytest.mark.slow) for one in ("offload", "recompute"))],
)
def test_a_model_keeps_its_names_and_comes_back(run_ranks, layout):
    for refused, left, renamed, differs, same_logits, found in run_ranks(
        2, taken_and_given_back, **LAYOUTS[layout]
    ):
        assert "released its model" in refused and found > 500
        assert (left, renamed, differs, same_logits) == ([], {}, [], True)
