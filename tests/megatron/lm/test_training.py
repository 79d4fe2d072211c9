"""A stock Megatron-LM checkout trains with HDP; its loop, checkpoints and logs stay its own.

Needs MEGATRON_LM_PATH and what that checkout's pretrain_gpt.py imports (docs/megatron-lm.md,
"What the checkout needs").
"""

import importlib.util
import json
from functools import partial

import pytest

from tests.megatron.lm.runs import (
    CHECKOUT,
    HDP,
    MARKS,
    MODEL,
    OVERLAPPED,
    RECOMPUTED,
    SCRIPT,
    STAGES,
    TENSOR,
    TRAINING,
    drive,
    offloading,
    own,
    pictures,
    planned,
    require_rerun,
    require_same,
    require_same_bits,
    scalars,
    weights,
)
from tests.megatron.lm.test_patch_files import patched_script
from tests.support.drawn import first_rows
from tests.support.megatron_formula import formula_of

pytestmark = MARKS

STOCK = "checkpoints stock"
GPT = """--num-layers 6 --hidden-size 32 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
--attention-dropout 0 --hidden-dropout 0"""
NORMS = ["--recompute-granularity", "selective"]
NORMS += ["--recompute-modules", "layernorm", "core_attn"]
SOON = ["--stall-timeout-seconds", "3"]
HAS_WANDB = importlib.util.find_spec("wandb") is not None


def common_plan(folder):
    run, finetuned = partial(planned, folder), [*HDP, "256", "--finetune"]
    return [
        run("stock", 1, [], plugin=False, save=STOCK),
        run("off", 1, [], save="checkpoints off"),
        run("one", 1, finetuned, load=STOCK, save="whole"),
        run("two", 2, [*HDP, "160", "--finetune"], load=STOCK),
        run("second half", 1, [*HDP, "256", "--ckpt-step", "2"], load="whole", save="halves"),
        own_command(folder),
        run("help", 1, ["--help"], command=True),
        run("refused", 1, [*HDP, "160", "--context-parallel-size", "2"], command=True, exits=[2]),
    ]


@pytest.fixture(scope="module")
def more(runs):
    """More layouts, the patched script, an older release, and what users switch on."""
    run, script = partial(planned, runs), patched_script(SCRIPT, runs)
    finetuned = [*HDP, "256", "--finetune"]
    metrics = ["--metrics-path", str(runs / "metrics.jsonl")]
    sharded = [*HDP, "160", *OVERLAPPED, *RECOMPUTED, *metrics]
    shown = [*sharded, *pictures(runs, "2-3", "2"), "--finetune"]
    wandb = ["--wandb-project", "tests", "--wandb-exp-name", "bf16", "--wandb-save-dir"]
    wandb = [*wandb, str(runs / "wandb")] if HAS_WANDB else []
    half = ["--use-distributed-optimizer", "--bf16", "--async-save"]
    offloaded = [*HDP, "100", *STAGES, *offloading(runs, 3), "--ckpt-step", "2"]
    resumed, gpt = ["--ckpt-step", "2"], partial(run, model=GPT)
    plain_tensor = [flag for flag in TENSOR if flag != "--sequence-parallel"]
    drive(
        runs,
        [
            run("pipelines", 4, [*HDP, "160", *STAGES, "--finetune"], load=STOCK),
            # Megatron pads the vocabulary to a multiple of both, here to 384 as without TP
            run("tensor", 2, [*finetuned, *plain_tensor], load=STOCK),
            run("patched", 1, finetuned, plugin=False, script=script, load=STOCK),
            run("older", 1, finetuned, load=STOCK, save="older", older=True),
            run("older, resumed", 1, [*HDP, "256", *resumed], load="older"),
            run("sharded", 2, shown, load=STOCK, save="sharded"),
            run("sharded again", 2, [*sharded, *resumed], load="sharded", save="sharded again"),
            run("tensor, resumed", 2, [*HDP, "256", *TENSOR, *resumed], load="whole"),
            run("bf16 one", 1, [*HDP, "256", "--bf16", *wandb]),
            run("bf16 two", 2, [*HDP, "160", *half], save="bf16"),
            gpt("gpt", 1, [*HDP, "256", "--async-save"], save="gpt"),
            gpt("gpt stages", 4, offloaded, load="gpt"),
            gpt("gpt norms", 4, [*offloaded, *NORMS], load="gpt", emptied=True),
            run("nan", 2, [*HDP, "160"], save="nan", nan_after=16, exits=[16, 16]),
            run("nan again", 2, [*HDP, "160"], load="nan", nan_after=16, exits=[16, 16]),
            run("dead", 2, [*HDP, "160", *SOON], fault="1:3:kill", exits=[3, -9]),
            run("stopped", 2, [*HDP, "160", *SOON], fault="1:3:stop", exits=[3, None]),
            gpt("other seed", 1, [*HDP, "256", "--seed", "8"], load="gpt", exits=[1]),
            gpt("without", 1, [], load="gpt", exits=[1]),
        ],
    )
    return runs


def own_command(folder):
    """The project's own command, which takes the weights of Megatron-LM's checkpoint."""
    steps = TRAINING[TRAINING.index("--lr ") : TRAINING.index("--split")].split()
    flags = [*HDP, "256", "--global-batch-size", "8", "--train-iters", "4", "--finetune"]
    flags += ["--make-vocab-size-divisible-by", "384", "--split", "90,10,0"]
    flags += ["--load", str(folder / STOCK), "--data-path", str(folder / "corpus")]
    return own(folder, 1, [*MODEL.split(), *steps, *flags])


def test_without_the_flag_all_is_stock_bit_for_bit(runs):
    require_same_bits(runs, "checkpoints off", STOCK)
    of_stock, of_off = scalars(runs, "stock"), scalars(runs, "off")
    for tag in ("lm loss", "grad-norm", "learning-rate", "lm loss validation"):
        assert of_stock[tag] == of_off[tag] and len(of_stock[tag]) >= 2
    assert not any(tag.startswith("hdp/") for tag in of_off)


def test_two_ranks_have_the_losses_of_one(runs):
    """Stages: test_pipelines.py."""
    require_losses_of_one(runs, "two")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pipelines", "tensor", "sharded", "tensor, resumed"])
def test_any_layout_has_the_losses_of_one_rank(more, name):
    """Optimizers, recomputation and sequence parallelism change nothing."""
    require_losses_of_one(more, name, (3, 4) if "resumed" in name else (1, 2, 3, 4))


def require_losses_of_one(folder, name, steps=(1, 2, 3, 4)):
    one, other = scalars(folder, "one"), scalars(folder, name)
    require_same(other, one, rel=2e-6, steps=steps)
    validated = {step: one["lm loss validation"][step] for step in (2, 4) if step in steps}
    assert other["lm loss validation"] == pytest.approx(validated, rel=2e-6)


def test_saved_and_resumed_equals_uninterrupted(runs):
    require_same_bits(runs, "halves", "whole")
    loss = scalars(runs, "one")["lm loss"]
    assert scalars(runs, "second half")["lm loss"] == {3: loss[3], 4: loss[4]}
    text = (runs / "log second half.0").read_text()
    assert "consumed samples:           24" in text and "consumed samples:           32" in text


@pytest.mark.slow
def test_a_run_of_an_older_release_keeps_its_order(more):
    older, resumed = scalars(more, "older"), scalars(more, "older, resumed")
    assert older["lm loss"][3] != pytest.approx(scalars(more, "one")["lm loss"][3], rel=1e-4)
    for tag in ("lm loss", "lm loss validation"):
        assert resumed[tag] == {step: older[tag][step] for step in resumed[tag]}
    assert sorted(resumed["lm loss"]) == [3, 4] and list(resumed["lm loss validation"]) == [4]
    log = (more / "log older, resumed.0").read_text()
    assert log.count("began with version 1 of the order of the data") == 1


def test_the_projects_own_command_gives_the_same_losses(runs):
    loss, grad_norm = (scalars(runs, "one")[tag] for tag in ("lm loss", "grad-norm"))
    lines = [json.loads(line) for line in (runs / "own.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line["loss"] == pytest.approx(loss[line["step"]], rel=1e-6)
        assert line["grad_norm"] == pytest.approx(grad_norm[line["step"]], rel=1e-5)


@pytest.mark.slow
def test_a_patched_checkout_is_the_same_run(more):
    one, patched = scalars(more, "one"), scalars(more, "patched")
    for tag in ("lm loss", "grad-norm", "lm loss validation", "hdp/ring-bytes"):
        assert patched[tag] == one[tag]


def test_its_writers_get_the_figures_of_hdp(runs):
    found = scalars(runs, "two")
    assert found["hdp/sequences"] == {step: 8.0 for step in (1, 2, 3, 4)}
    assert found["hdp/tokens"] == scalars(runs, "one")["hdp/tokens"]
    assert 0 < found["hdp/planned-efficiency"][1] <= 1
    assert found["batch-size"][1] == 8


def test_operations_are_those_of_each_length(runs):
    """What checkpoints add up is Megatron's formula, sequence by sequence."""
    from megatron.core import dist_checkpointing

    from megatron_hdp.data import TokenFile
    from megatron_hdp.data.tables import split_documents

    file = TokenFile(str(runs / "corpus"))
    documents = split_documents(len(file.lengths), "90,10,0")[0]
    lengths = file.lengths[documents.start : documents.stop]
    lengths = lengths[first_rows(len(lengths), 7, 4 * 8)]
    before, state = (
        dist_checkpointing.load_common_state_dict(str(runs / name / "iter_0000004"))
        for name in (STOCK, "whole")
    )
    formula = formula_of(CHECKOUT)
    args, expected = state["args"], before["num_floating_point_operations_so_far"]
    for length in lengths.tolist():
        args.seq_length = length
        expected += formula(args, 1)
    assert state["num_floating_point_operations_so_far"] == pytest.approx(expected, rel=1e-9)


def test_help_shows_the_group(runs):
    shown = (runs / "log help.0").read_text()
    assert "Hybrid data parallelism:" in shown
    assert "--hdp-tokens-per-rank" in shown and "--hdp-trace DIR" in shown
    assert "--hdp-global-batch-tokens" not in shown


def test_a_refusal_is_one_message(runs):
    shown = (runs / "log refused.0").read_text()
    (line,) = (line for line in shown.splitlines() if "error" in line.lower())
    assert line.startswith(
        "megatron_hdp: error: --context-parallel-size (found 2) does not go with "
    )
    assert "Traceback" not in shown


@pytest.mark.slow
def test_the_distributed_optimizer_resumes_bit_for_bit(more):
    require_same_bits(more, "sharded again", "sharded")
    names = weights(more, "sharded")
    assert sum(key.startswith("optimizer.state.exp_avg_sq.") for key in names) == 9  # of weights
    loss = scalars(more, "sharded")["lm loss"]
    assert scalars(more, "sharded again")["lm loss"] == {3: loss[3], 4: loss[4]}


@pytest.mark.slow
def test_bf16(more):
    require_same(scalars(more, "bf16 two"), scalars(more, "bf16 one"), rel=1e-2)
    assert weights(more, "bf16")  # it was saved asynchronously


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt stages", "gpt norms"])
def test_a_tied_model_continues_on_stages_with_offload(more, name):
    """Also where norms are recomputed, whose outputs Megatron empties."""
    stages = scalars(more, name)
    require_same(stages, scalars(more, "gpt"), rel=2e-6, steps=(3, 4))
    assert max(stages["hdp/offloaded-bytes"].values()) > 0


@pytest.mark.slow
def test_our_writers_write(more):
    lines = [json.loads(line) for line in (more / "metrics.jsonl").read_text().splitlines()]
    loss = scalars(more, "sharded")["lm loss"]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # the last two by the resumed run
    assert [line["loss"] for line in lines] == pytest.approx([loss[step] for step in (1, 2, 3, 4)])
    validated = scalars(more, "sharded")["lm loss validation"]
    assert [line["validation_loss"] for line in lines] == pytest.approx(
        [None, validated[2], None, validated[4]]
    )
    tokens = [line["tokens"] for line in lines]
    assert [line["consumed_tokens"] for line in lines] == [sum(tokens[: i + 1]) for i in range(4)]
    events = json.loads((more / "trace" / "steps-2-3.json").read_text())["traceEvents"]
    names = {event["name"] for event in events}
    assert {"step 2", "step 3", "gradient sync", "optimizer step"} <= names
    assert (more / "plan.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.skipif(not HAS_WANDB, reason="needs wandb: pip install wandb")
def test_wandb_gets_the_figures_of_hdp(more):
    (record,) = (more / "wandb").glob("wandb/offline-run-*/*.wandb")
    assert record.read_bytes().count(b"hdp/planned-efficiency") >= 4


@pytest.mark.slow
def test_the_rerun_machine_runs_the_same_step_again(more):
    require_rerun(more)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dead", "stopped"])
def test_a_rank_that_does_not_answer_ends_the_job(more, name):
    text = (more / f"log {name}.0").read_text()
    assert "error on rank 0: " in text and "rank 1 (host" in text and "died or was stopped" in text
    assert "of step 3" in text


@pytest.mark.slow
def test_another_order_of_the_data_is_refused(more):
    text = (more / "log other seed.0").read_text()
    assert "--seed: found 8, expected 7. Give the flags of that run, or add --finetune" in text
    text = (more / "log without.0").read_text()
    assert "found a run without --hybrid-data-parallel, expected one with it" in text
