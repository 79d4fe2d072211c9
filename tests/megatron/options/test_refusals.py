"""Flags that do not go together are refused with the remedy: one table of all rooms' checks."""

import pytest

from megatron_hdp.megatron.options import parse_arguments
from megatron_hdp.options import OptionError

REQUIRED = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "128", "--train-iters", "3", "--lr", "1e-3", "--data-path", "prefix"),
]
ON = "--hybrid-data-parallel --hdp-tokens-per-rank 64 --attention-dropout 0"
HDP = f"{ON} --global-batch-size 8".split()
MLA = "--multi-latent-attention"
ACROSS = "--num-experts 4 --expert-model-parallel-size 2"
TWO = "--tensor-model-parallel-size 2"
PP, VPP = "--pipeline-model-parallel-size 2", "--num-virtual-stages-per-pipeline-rank"
LAYERS_OF_VPP = "--num-layers-per-virtual-pipeline-stage"
FIRST, LAYOUT = "--decoder-first-pipeline-num-layers 3", "--pipeline-model-parallel-layout"
FULL = "--recompute-granularity full --recompute-method"
UNIFORM = f"{FULL} uniform --recompute-num-layers 2"
GROUPS, OF_GROUPS = "--moe-router-num-groups", "--moe-router-group-topk"
YARN, WINDOW = "--position-embedding-type yarn", "--window-size 127,0"
SKIP = "--window-attn-skip-freq"
STEPS, RAMP = "--step-batch-size-schedule", "--rampup-batch-size"

REFUSED = {  # by flags that a row adds to: more flags, and words of the error as a pattern
    "": [
        ("--config none.yaml", "none.yaml: No such file"),
        ("--num-layer 3", "unknown flag --num-layer: did you mean '--num-layers'"),
        ("--swiglu stray", "found stray, expected a flag before it"),
        ("--num-layers x", "--num-layers: invalid int value: 'x'"),
        ("--num-layers 0", "--num-layers: found 0, expected at least 1"),
        ("--hidden-dropout 1.5", "--hidden-dropout: found 1.5, expected at most 1"),
        ("--lr nan", "--lr: found nan, expected a finite number"),
        ("--lr inf", "--lr: found inf, expected a finite number"),
        ("--weight-decay 1e39", r"--weight-decay: found 1e\+39, expected at most 3.4e\+38"),
        ("--adam-beta1 1", "--adam-beta1: found 1.0, expected less than 1.0"),
        (f"--global-batch-size 1{'0' * 20}", "expected at most 16777216"),
        (f"--train-iters 1{'0' * 400}", "expected at most 2147483647"),
        ("--seed 4294967296", "--seed: found 4294967296, expected at most 4294967295"),
        (f"--distributed-timeout-minutes 1{'0' * 18}", "expected at most 20160"),
        ("--stall-timeout-seconds inf", "--stall-timeout-seconds: found inf, expected a finite"),
        ("--stall-timeout-seconds 1e7", "--stall-timeout-seconds: found 10000000.0, expected at m"),
        ("--hdp-strategy best", "--hdp-strategy: invalid choice: 'best'"),
        ("--num-attention-heads 5", "not a multiple of --num-attention-heads 5"),
        ("--num-query-groups 3", "not a multiple of --num-query-groups 3"),
        ("--tensor-model-parallel-size 3", "multiples of --tensor-model-parallel-size 3"),
        ("--max-position-embeddings 64", "less than --seq-length 128"),
        ("--bf16 --fp64", "both --bf16 and --fp64"),
        ("--recompute-method block", "go together"),
        ("--recompute-modules mlp", "no effect without --recompute-granularity selective"),
        (f"{FULL} uniform --recompute-modules mlp", "no effect without --recompute-granularity s"),
        ("--recompute-granularity selective --recompute-modules moe", "invalid choice: 'moe'"),
        ("--hdp-data f", "found --hdp-data and --data-path, expected only one"),
        ("--tokenizer-type TikTokenizer", "goes with --tokenizer-model"),
        ("--tokenizer-model gpt2", "--tokenizer-type byte goes with no --tokenizer-model"),
        ("--min-lr 1", "--min-lr 1.0 is greater than --lr 0.001"),
        ("--lr-warmup-fraction 0.1 --lr-warmup-iters 5", "keep one"),
        ("--lr-warmup-iters 3", "takes 3 steps, expected fewer than --lr-decay-iters .3"),
        ("--hdp-plot-plan p.png --hdp-plot-step 4", "beyond --train-iters 3"),
        ("--save-interval 5", "--save-interval needs --save"),
        ("--hdp-tokens-per-rank 64", "--hdp-tokens-per-rank has no effect without --hybrid"),
        ("--hdp-trace-steps 1", "--hdp-trace-steps has no effect without --hybrid"),
        ("--hdp-offload auto", "--hdp-offload auto has no effect with 2 layers on a rank"),
        ("--hdp-offload auto --num-layers 3", "--hdp-offload has no effect without --hybrid"),
        (f"--hdp-offload auto --num-layers 4 {PP}", "--hdp-offload auto has no effect with 2 lay"),
        (f"{VPP} 2", "rank 2 without pipeline stages: leave it"),
        (f"{MLA}", "goes with --hybrid-data-parallel in this command"),
        ("--kv-lora-rank 64", f"no effect without {MLA}"),
        ("--rope-type yarn", f"no effect without {MLA}"),
        ("--moe-router-topk 1", "no effect without --num-experts"),
        ("--expert-model-parallel-size 2", "no effect without --num-experts"),
        ("--expert-tensor-parallel-size 2", "no effect without --num-experts"),
        ("--hybrid-data-parallel", "needs --hdp-tokens-per-rank"),
        ("--hybrid-data-parallel --hdp-tokens-per-rank 64", "found neither"),
        (f"--num-layers 8 {PP} {VPP} 2", "rank 2 goes with --hybrid-data-parallel in this command"),
        (f"--num-layers 8 {PP} {VPP} 4 {LAYERS_OF_VPP} 1", f"both {LAYERS_OF_VPP} and --num-virt"),
        (f"--num-layers 8 {PP} {LAYERS_OF_VPP} 3", "stage 3 does not divide the 4 layers of a pip"),
        (f"--num-layers 8 {PP} {LAYERS_OF_VPP} 4", "makes one virtual stage of the 4 layers"),
    ],
    " ".join(HDP): [
        ("--hdp-global-batch-tokens 100", "exactly one"),
        ("--attention-dropout 0.1", "pass --attention-dropout 0"),
        ("--hdp-tokens-per-rank 0", "--hdp-tokens-per-rank: found 0"),
        ("--hdp-trace traces", "--hdp-trace DIR and --hdp-trace-steps"),
        ("--hdp-trace-steps 1", "--hdp-trace DIR and --hdp-trace-steps"),
        ("--hdp-sequence-parts 0", "--hdp-sequence-parts: found 0"),
        ("--hdp-sequence-parts all", "--hdp-sequence-parts: invalid int or auto value: 'all'"),
        *(
            (f"--hdp-long-sequence stream {more}", f"sequence stream: found {found}")
            for more, found in (
                (f"{ACROSS} --hdp-strategy dp-balance", "--hdp-strategy dp-balance"),
                ("--hdp-strategy naive", "--hdp-strategy naive"),
                (f"{PP} --num-layers 8 --hdp-strategy dp-balance", "--hdp-strategy dp-balance"),
            )
        ),
        *(
            (f"--hdp-recompute auto {more}", f"--hdp-recompute auto: found {found}")
            for more, found in (
                (f"{FULL} uniform --recompute-num-layers 1", "--recompute-granularity full"),
                ("--hdp-strategy naive", "--hdp-strategy naive"),
                (
                    "--num-experts 8 --disable-bias-linear --expert-model-parallel-size 4 "
                    "--moe-token-dispatcher-type alltoall",
                    "4 HDP ranks that share experts",
                ),
            )
        ),
        ("--hdp-sequence-parts 4", "--hdp-sequence-parts 4 has no effect without --pipeline"),
        *(
            (f"--hdp-sequence-parts 4 {PP} --num-layers 8 {more}", f"parts 4: found {found}")
            for more, found in (("--hdp-strategy naive", "--hdp-strategy naive"),)
        ),
        (f"--hdp-trace t --hdp-trace-steps 1 {PP} --hdp-strategy naive", "needs --hdp-strategy au"),
        ("--hdp-trace traces --hdp-trace-steps 2-4", "2-4 goes beyond --train-iters 3"),
        *(
            (f"--hdp-trace traces --hdp-trace-steps={text}", f"--hdp-trace-steps: found '{text}'")
            for text in ("0", "3-2", "2-", "-2", "a", "1-2-3", "1,2", "0-2", "9" * 5000)
        ),
    ],
    "--num-layers 4": [
        (f"{YARN} --use-rope-scaling", "--use-rope-scaling .* no effect .* yarn"),
        (f"{YARN} --rotary-percent 0.5", "--rotary-percent .* no effect .* yarn"),
        (f"{YARN} --rotary-interleaved", "--rotary-interleaved .* no effect .* yarn"),
        ("--yarn-beta-fast 8", "--yarn-beta-fast .* no effect .* rope"),
        ("--rope-scaling-factor 32", "no effect without --use-rope-scaling"),
        ("--position-embedding-type none --rotary-base 5", "no effect .* none"),
        ("--rotary-percent 0.2", "are 3, expected an even number"),
        ("--no-rope-freq 3", "found 3, expected a number that divides the 4 of"),
        ("--no-rope-freq [0,1,0]", r"found \[0, 1, 0\], expected 4 numbers that are 0 or 1"),
        ("--no-rope-freq [0,2,0,0]", "expected 4 numbers that are 0 or 1"),
        ("--no-rope-freq print(1)", "found 'print.1.', expected a number, or a list"),
        ("--window-size 127", "--window-size: found '127', expected N,0"),
        ("--window-size 127,1", "expected N,0"),
        ("--window-size (-1,0)", "expected N,0"),
        (f"{SKIP} 2", "no effect without --window-size"),
        (f"{WINDOW} {SKIP} 0", "found 0, expected at least 1"),
        (f"{WINDOW} {SKIP} [1,0]", "expected 4 numbers that are 0 or 1"),
        (f"{WINDOW} {SKIP} two", "found 'two', expected a number, or a list"),
        ("--mtp-loss-scaling-factor 0.3", "no effect without --mtp-num-layers"),
    ],
    ON: [
        (f"--global-batch-size 8 {STEPS} 0:4", f"both {STEPS} and --global-batch-size"),
        (f"--global-batch-size 8 {RAMP} 2 3", "expected three numbers"),
        (f"--global-batch-size 8 {RAMP} 2 4 8", "increments of 4"),
        (f"{RAMP} 2 3 12 --hdp-global-batch-tokens 500", f"found {RAMP} and --hdp-global-batch"),
        (f"{STEPS} 0:4 {RAMP} 2 3 12", f"found {RAMP} and {STEPS}, expected one"),
        (f"{STEPS} 640:4", r"\[\(5, 4\)\], expected sizes"),
        (f"{STEPS} 0:4,9", "found '9', expected FROM:SIZE"),
        (f"{STEPS} ,", r"\[\], expected sizes"),
        (f"{STEPS} 0:0", "expected sizes"),
        (f"--no-hybrid-data-parallel {RAMP} 2 3 12", "no effect without --hybrid|goes with"),
    ],
    f"{' '.join(HDP)} --num-layers 4 --mtp-num-layers 2": [
        ("--no-hdp-fused-loss", "^--mtp-num-layers 2: found --no-hdp-fused-loss"),
        ("--window-size 8,0", "^--mtp-num-layers 2: found --window-size"),
        ("--no-rope-freq 2", "^--mtp-num-layers 2: found --no-rope-freq"),
        (PP, "^--mtp-num-layers 2: found pipeline stages and a tied output layer"),
        (f"{PP} {VPP} 2", "^--mtp-num-layers 2: found virtual stages"),
        (f"{PP} {LAYOUT} Ett|ttL", f"^--mtp-num-layers 2: found {LAYOUT}"),
        (UNIFORM, "^--mtp-num-layers 2: found --recompute-num-layers 2"),
        (f"{FULL} block --recompute-num-layers 2", "2: found --recompute-method block"),
    ],
    f"{' '.join(HDP)} --num-layers 7 {PP}": [
        ("", "--num-layers 7 is not a multiple of --pipeline-model-parallel-size 2"),
        (f"{FIRST} {LAYOUT} Et*3|t*4L", "expected one way to cut the model"),
        (f"{LAYOUT} Et|tt|tt|ttL {VPP} 2", f"both {VPP} and --pipeline-model-parallel-layout"),
        (f"{LAYOUT} E|t*7L --pipeline-model-parallel-size 1", r"t\*7L without pipeline stages: le"),
        (f"{FIRST} {LAYERS_OF_VPP} 1", f"use {VPP}"),
        (f"{LAYOUT} Ett|t*5L --hdp-offload auto", "has no effect with 2 layers on a rank"),
        (f"{FIRST} {UNIFORM}", "--recompute-num-layers 2 does not divide the 3 layers of a stage"),
        (f"{LAYOUT} E|t*3|t*4|L {UNIFORM}", "divides 3 and 4, or --recompute-method block"),
        (
            f"--account-for-embedding-in-pipeline-split {LAYERS_OF_VPP} 3",
            r"the 4 layers of a pipeline stage \(--num-layers 7 \+ 1 that count as layers / --pip",
        ),
        (f"{LAYERS_OF_VPP} 2", "--num-layers 7 is not a multiple of --pipeline-model-parallel-siz"),
    ],
    "--num-experts 8 --disable-bias-linear": [
        ("--moe-router-topk 9", "--moe-router-topk 9 is more than --num-experts 8"),
        ("--moe-router-topk 1", "needs --moe-router-pre-softmax"),
        (
            "--add-bias-linear --moe-shared-expert-intermediate-size 8",
            "experts have no bias",
        ),
        (
            "--add-bias-linear --expert-tensor-parallel-size 2 --expert-model-parallel-size 2",
            "each of these ranks would add an expert's bias",
        ),
        ("--moe-shared-expert-gate", "no effect without --moe-shared-expert-intermediate-size"),
        (
            f"--moe-shared-expert-intermediate-size 9 {TWO} --sequence-parallel",
            f"size 9 is not a multiple of {TWO}",
        ),
        ("--moe-router-enable-expert-bias", "needs --moe-router-score-function sigmoid"),
        (
            "--moe-router-score-function sigmoid --moe-router-pre-softmax",
            "--moe-router-pre-softmax has no effect",
        ),
        ("--moe-router-score-function sqrtsoftplus", "invalid choice: 'sqrtsoftplus'"),
        (f"{GROUPS} 2", "go together: give both or neither"),
        (f"{GROUPS} 3 {OF_GROUPS} 1", "divides --num-experts 8"),
        (f"{GROUPS} 2 {OF_GROUPS} 4", "at most that many"),
        (f"{GROUPS} 4 {OF_GROUPS} 2 --moe-router-topk 3", f"expected a multiple of {OF_GROUPS} 2"),
        (f"{GROUPS} 4 {OF_GROUPS} 1 --moe-router-topk 4", "at most 1 x 2"),
        ("--moe-layer-freq [0]*2", "found no layer with experts"),
        ("--moe-layer-freq [1]*3", "found .1, 1, 1., expected 2 numbers that are 0 or 1"),
        ("--moe-layer-freq 0", "found 0, expected at least 1, or a list of 0 and 1"),
        ("--moe-layer-freq [2,1]", "found .2, 1., expected 2 numbers that are 0 or 1"),
        ("--moe-layer-freq [1]+1", "--moe-layer-freq: found '.1..1', expected a number, or"),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 0.1", "no effect with"),
        ("--moe-router-load-balancing-type sinkhorn", "invalid choice: 'sinkhorn'"),
        ("--expert-model-parallel-size 3", "not a multiple of --expert-model-parallel-size 3"),
        (
            "--moe-ffn-hidden-size 9 --expert-model-parallel-size 2 "
            "--expert-tensor-parallel-size 2",
            "--moe-ffn-hidden-size 9 is not a multiple of --expert-tensor-parallel-size 2",
        ),
        (TWO, "needs --sequence-parallel"),
        (
            f"--num-experts 6 {TWO} --sequence-parallel --expert-tensor-parallel-size 1 "
            "--expert-model-parallel-size 3",
            f"neither divide nor are a multiple of {TWO}",
        ),
        ("--expert-tensor-parallel-size 2", "raise --expert-model-parallel-size"),
    ],
    f"{' '.join(HDP)} {MLA}": [
        ("--num-query-groups 2", "leave them out"),
        ("--group-query-attention", "leave them out"),
        ("--add-qkv-bias", f"--add-qkv-bias has no effect with {MLA}"),
        ("--softmax-type learnable", "--softmax-type learnable"),
        ("--qk-pos-emb-head-dim 3", "1.0 of 3 channels of a head are 3, expected an even number"),
        ("--rotary-percent 0.5", f"no effect with {MLA} and --rope-type yarn"),
        ("--rope-type rope --mscale 0.5", rf"--mscale \(found 0.5\) has no effect with {MLA}"),
        ("--rope-type rope --yarn-beta-fast 1", r"--yarn-beta-fast \(found 1.0\) has no effect"),
        (YARN, "use --rope-type"),
        ("--no-rope-freq 2", rf"--no-rope-freq \(found 2\) has no effect with {MLA}"),
        (f"--kv-lora-rank 33 {TWO}", f"= 97 is not a multiple of {TWO}"),
        (f"--q-lora-rank 33 {TWO}", f"--q-lora-rank 33 is not a multiple of {TWO}"),
        (f"--q-lora-rank 32 --qk-layernorm {TWO}", "needs --sequence-parallel"),
    ],
    f"{ON} --global-batch-size 8 --hidden-dropout 0 --hdp-objective simpo": [
        ("--hdp-reference-checkpoint c", "no effect without --hdp-objective dpo or ipo or kto"),
        ("--hdp-desirable-weight 2", "no effect without --hdp-objective kto"),
        ("--hdp-kto-divergence none", "no effect without --hdp-objective kto"),
        (
            "--hdp-objective kto --hdp-reference-checkpoint c --global-batch-size 1",
            "--global-batch-size 1, expected at least 2, .* or give --hdp-kto-divergence none",
        ),
        ("--hdp-beta 0", "found --hdp-beta 0, expected a number above 0"),
        ("--hidden-dropout 0.1", "found --hidden-dropout 0.1, .* pass --hidden-dropout 0"),
        ("--no-hdp-fused-loss", "found --no-hdp-fused-loss"),
        ("--sft", "found --sft"),
        ("--hdp-long-sequence truncate", "found --hdp-long-sequence truncate"),
        ("--hdp-label-smoothing 0.5", "found 0.5, expected less than 0.5"),
    ],
    f"{ON} --global-batch-size 8 --hdp-encoder e": [
        ("--hdp-objective orpo --hidden-dropout 0", "found --hdp-objective"),
        ("", "found --hidden-dropout 0.1"),
        ("--hdp-media-balance even", "invalid choice: 'even'"),
    ],
    f"{ON} --global-batch-size 8": [
        ("--hdp-media-balance home", "--hdp-media-balance has no effect without --hdp-encoder"),
        ("--hdp-objective dpo", "dpo measures against a frozen model, and found none"),
        ("--hdp-objective ppo", "invalid choice: 'ppo'"),
        ("--hdp-beta 0.2", "--hdp-beta has no effect without --hdp-objective"),
        (
            "--hdp-objective ipo --hdp-reference-checkpoint c --hdp-label-smoothing 0.1",
            "no effect without --hdp-objective dpo or simpo",
        ),
    ],
}


@pytest.mark.parametrize(
    ("flags", "message"),
    [(f"{base} {flags}", words) for base, rows in REFUSED.items() for flags, words in rows],
)
def test_what_does_not_go_together_is_refused_with_the_remedy(flags, message):
    with pytest.raises(OptionError, match=message):
        parse_arguments([*REQUIRED, *flags.split()])


@pytest.mark.parametrize("index", range(0, len(REQUIRED), 2))
def test_each_required_flag_is_named_when_missing(index):
    with pytest.raises(OptionError, match=f"{REQUIRED[index]} is missing"):
        parse_arguments(REQUIRED[:index] + REQUIRED[index + 2 :])


ACROSS = "--expert-model-parallel-size 4"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--moe-aux-loss-coeff 0.1", "aux_loss balances each rank's micro-batch.*use seq_aux_loss"),
        (
            "--moe-aux-loss-coeff 0.1 --moe-router-load-balancing-type global_aux_loss",
            "global_aux_loss balances the micro-batches so far.*use seq_aux_loss",
        ),
        (ACROSS, "spans 4 HDP ranks.*use alltoall"),
    ],
)
def test_what_would_depend_on_the_plan_is_refused_with_hdp_only(flags, message):
    argv = [*REQUIRED, *["--num-experts", "8", "--disable-bias-linear"], *flags.split()]
    parse_arguments(argv)
    with pytest.raises(OptionError, match=message):
        parse_arguments([*argv, *HDP])


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 8 --disable-bias-linear",  # Megatron's default type, without weight
        "--num-experts 8 --disable-bias-linear --moe-router-load-balancing-type seq_aux_loss "
        f"--moe-aux-loss-coeff 0.1 {ACROSS} --moe-token-dispatcher-type alltoall",
        "--mtp-num-layers 2",
        f"--mtp-num-layers 2 {PP} --untie-embeddings-and-output-weights",
        f"--mtp-num-layers 2 {FULL} uniform --recompute-num-layers 1",
        "--mtp-num-layers 2 --num-layers 4 --hdp-offload auto",
        "--hdp-recompute auto --recompute-granularity selective",
        f"--mtp-num-layers 2 --mtp-loss-scaling-factor 0.3 {YARN}",
    ],
)
def test_what_goes_together_with_hdp(flags):
    parse_arguments([*REQUIRED, *HDP, *flags.split()])
