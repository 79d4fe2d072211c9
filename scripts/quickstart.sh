#!/usr/bin/env bash
# Trains a small GPT on the Python standard library twice, on the static DP x CP mesh and with hybrid
# data parallelism, and compares: ./scripts/quickstart.sh [flags of the training command]
#
#   NPROC=4    ranks, 1 to 8
#   STEPS=9    steps
#   PROFILE_S=10  seconds that a pass of the profile may take
#   OUT=DIR    where data, cost model, metrics, traces and the picture go (default: runs/quickstart)
set -euo pipefail

NPROC=${NPROC:-4}
STEPS=${STEPS:-9}
PROFILE_S=${PROFILE_S:-10}
[[ $NPROC =~ ^[1-8]$ ]] || { echo "error: NPROC=$NPROC: expected 1 to 8 ranks" >&2; exit 1; }
[[ $STEPS =~ ^[1-9][0-9]{0,3}$ ]] ||
    { echo "error: STEPS=$STEPS: expected a number of steps, 1 to 9999" >&2; exit 1; }

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

config=configs/tiny-cpu.yaml
folder=${OUT:-runs/quickstart}
corpus=$folder/data/stdlib
cost_model=$folder/cost-model.json
mkdir -p "$folder/data"

export OMP_NUM_THREADS=1
export CUDA_VISIBLE_DEVICES="" # the comparison is made on CPUs, on every machine

ranks() { # module, flags...
    "$PYTHON" -m torch.distributed.run --nnodes 1 --nproc-per-node "$NPROC" \
        --rdzv-backend c10d --rdzv-endpoint localhost:0 -m "$@"
}

train() { # name, strategy, flags...
    local name=$1 strategy=$2
    shift 2
    echo
    echo "== training: $name"
    rm -rf "${folder:?}/$name"
    ranks megatron_hdp.pretrain_gpt --config "$config" --hybrid-data-parallel \
        --hdp-cost-model "$cost_model" --hdp-tokens-per-rank "$capacity" \
        --hdp-strategy "$strategy" --data-path "$corpus" --train-iters "$STEPS" \
        --hdp-trace "$folder/$name/trace" --hdp-trace-steps "1-$STEPS" \
        --metrics-path "$folder/$name/metrics.jsonl" "$@"
}

echo "== data: functions, classes and some whole files of the standard library"
"$PYTHON" scripts/examples/quickstart/corpus.py "$corpus.jsonl"
"$PYTHON" -m megatron_hdp.cli.main preprocess --input "$corpus.jsonl" --tokenizer byte \
    --output-prefix "$corpus"

capacity=$("$PYTHON" scripts/examples/quickstart/capacity.py "$NPROC" "$config")
echo
echo "== ranks: $NPROC of $capacity tokens, so that together they hold the longest sequence"

echo
echo "== profile: what a micro-batch takes on this machine; the planner decides by it"
ranks megatron_hdp.profile --config "$config" --hdp-tokens-per-rank "$capacity" \
    --budget-seconds "$PROFILE_S" --force --output "$cost_model" "$@" # a doubtful one is told of, and serves
train static static "$@"
train hdp auto "$@"

echo
"$PYTHON" scripts/examples/quickstart/report.py "$folder"
