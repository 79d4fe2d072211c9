"""What goes together with layers that predict further tokens, and what does not."""

import pytest

from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.options import OptionError

ENOUGH = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 128
--global-batch-size 2 --train-iters 3 --lr 1e-3 --data-path corpus --tokenizer-type byte
--attention-dropout 0 --hybrid-data-parallel --hdp-tokens-per-rank 128"""
MTP = ["--mtp-num-layers", "2"]
STAGES = ["--pipeline-model-parallel-size", "2"]
FULL = ["--recompute-granularity", "full", "--recompute-num-layers"]


@pytest.mark.parametrize(
    "flags",
    [
        MTP,
        [*MTP, *STAGES, "--untie-embeddings-and-output-weights"],
        [*MTP, *FULL, "1", "--recompute-method", "uniform"],
        [*MTP, "--mtp-loss-scaling-factor", "0.3", "--position-embedding-type", "yarn"],
    ],
)
def test_what_goes_together(flags):
    assert parse_arguments([*ENOUGH.split(), *flags]).mtp_num_layers == 2


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--no-hdp-fused-loss"], "--no-hdp-fused-loss"),
        (["--window-size", "8,0"], "--window-size"),
        (["--no-rope-freq", "2"], "--no-rope-freq"),
        (["--hdp-offload", "auto"], "--hdp-offload"),
        (STAGES, "pipeline stages and a tied output layer"),
        ([*STAGES, "--num-virtual-stages-per-pipeline-rank", "2"], "virtual stages"),
        ([*STAGES, "--pipeline-model-parallel-layout", "Ett|ttL"], "--pipeline-model-parallel-l"),
        ([*FULL, "2", "--recompute-method", "uniform"], "--recompute-num-layers 2"),
        ([*FULL, "2", "--recompute-method", "block"], "--recompute-method block"),
    ],
)
def test_what_does_not(flags, found):
    with pytest.raises(OptionError, match=rf"^--mtp-num-layers 2: found {found}"):
        parse_arguments([*ENOUGH.split(), *MTP, *flags])


def test_a_weight_of_nothing_is_refused():
    with pytest.raises(OptionError, match="no effect without --mtp-num-layers"):
        parse_arguments([*ENOUGH.split(), "--mtp-loss-scaling-factor", "0.3"])
