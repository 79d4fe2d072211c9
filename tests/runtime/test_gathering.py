"""What ranks give each other: sums by name, and that little of it grows with their number."""

import ast
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_hdp
from megatron_hdp.runtime.gathering import summed_by_name

PACKAGE = Path(megatron_hdp.__file__).parent
GATHERING = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "gather_object"),
    *("gathered", "gathered_on_first", "multi_get"),
}
GROWING = {  # functions that hold something of every rank; see docs/benchmarks.md
    "bridge/loop.py forward_backward": 1,  # in Bridge's loop: a batch's tokens, 8 bytes each
    "bridge/rows.py _of_all": 2,  # the same, and how many there are
    "megatron/checkpoint/together.py on_every_rank": 1,  # on the first rank: files' sums
    "megatron/cpu/stand_in.py all_gather": 2,  # Megatron's, of one group
    "megatron/finite.py non_finite": 1,  # once something is NaN: four names
    "megatron/optimizer/whole_state.py _buffer_state": 1,  # of the optimizer, whatever the ranks
    "megatron/optimizer/shard_copies.py _gathered": 1,  # with --hdp-survive: addresses, versions
    "megatron/parallel.py _another": 1,  # at the start: a range
    "megatron/step/learning.py __init__": 1,  # with --hdp-online, at the start: a host's name
    "megatron/step/learning.py exchanged": 1,  # with --hdp-online, in a step: four numbers
    "megatron/step/left_out.py _lose": 1,  # once a source has failed
    "megatron/step/left_out.py found_by_all": 1,  # once a sequence was found corrupt
    "megatron/step/loading.py join_data_plane": 2,  # with a data plane, at the start: host, folder
    "megatron/lm/saves_under_way.py enter": 1,  # at an epoch's start, with --async-save
    "megatron/step/non_finite.py gather_words": 1,  # once something is NaN
    "megatron/step/setup.py _require_one_attention": 1,  # once they differ
    "megatron/step/setup.py _speeds_of_gpus": 1,  # at an epoch's start, with --hdp-rank-speeds
    "profile/measuring.py host_bytes_per_s": 1,  # a profile: some numbers
    "profile/measuring.py on_any_rank": 1,  # likewise
    "profile/measuring.py seconds": 1,  # likewise
    "runtime/gathering.py gathered": 1,
    "runtime/gathering.py gathered_on_first": 1,
    "runtime/gathering.py on_every_rank": 1,  # once one has refused: a sentence
    "runtime/gathering.py summed_by_name": 1,  # where ranks have other figures
    "runtime/health/agreement.py require_agreement": 1,  # once they disagree: some words
    "runtime/health/attempt.py _answer_all": 1,  # at the start, on the first rank: 32 letters
    "runtime/health/store.py _read": 1,  # once one waits long, or looks at the first rank
    "runtime/loss/fused_cross_entropy.py of_all_parts": 1,  # tensor ranks
    "megatron/world/recovery.py share": 1,  # with --hdp-survive, at an epoch's start
    "megatron/world/surviving_shards.py _agreed_choice": 1,  # likewise
    "megatron/world/surviving_shards.py enter": 1,  # likewise
    "megatron/media/damaged.py agree_on_damages": 1,  # once a picture was found damaged
    "training/epochs_trace.py enter": 1,  # of a traced run, at an epoch's start
    "training/step_trace.py end": 1,  # of a traced step
}


def calls_of_gathering():
    found = Counter()
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        tree = ast.parse(text if any(name in text for name in GATHERING) else "")
        for one in ast.walk(tree):
            if isinstance(one, ast.FunctionDef):
                for call in ast.walk(one):
                    if isinstance(call, ast.Call):
                        name = getattr(call.func, "attr", getattr(call.func, "id", None))
                        if name in GATHERING:
                            found[f"{path.relative_to(PACKAGE)} {one.name}"] += 1
    return found


def test_whatever_grows_with_the_ranks_is_known():
    assert calls_of_gathering() == GROWING


def figures(given):
    """Of a rank: sums, and how many collectives that gather from all ranks they took."""
    gathered = []
    before = dist.all_gather_object
    dist.all_gather_object = lambda *args: (gathered.append(1), before(*args))
    found = summed_by_name(given[dist.get_rank()], torch.device("cpu"))
    return found, len(gathered)


def test_figures_are_summed_by_name_and_gathered_only_where_their_names_differ(run_ranks):
    same = [{}, {"clipped": 1.0, "ratio": 2.5}, {"clipped": 3.0, "ratio": 0.25}]
    assert run_ranks(3, figures, same) == [({"clipped": 4.0, "ratio": 2.75}, 0)] * 3
    other = [{"a": 1.0}, {}, {"b": 2.0, "a": 4.0}]
    assert run_ranks(3, figures, other) == [({"a": 5.0, "b": 2.0}, 1)] * 3
