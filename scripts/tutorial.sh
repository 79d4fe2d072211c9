#!/usr/bin/env bash
# Sources, a length curriculum and fine-tuning on conversations, on two CPU ranks in about three
# minutes: trains on prose, then with code beside it and longer sequences, then fine-tunes the
# result on chat. docs/data.md explains it step by step: ./scripts/tutorial.sh [flags of training]
#
#   STEPS=12   steps of each of the three runs
#   OUT=DIR    where data, checkpoints and metrics go (default: runs/tutorial)
set -euo pipefail

STEPS=${STEPS:-12}
[[ $STEPS =~ ^[1-9][0-9]{0,3}$ ]] ||
    { echo "error: STEPS=$STEPS: expected a number of steps, 1 to 9999" >&2; exit 1; }

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

folder=${OUT:-runs/tutorial}
export OMP_NUM_THREADS=1
export CUDA_VISIBLE_DEVICES="" # small enough for CPUs, on every machine

hdp() {
    "$PYTHON" -m megatron_hdp.cli.main "$@"
}

train() { # name, steps in all, flags...
    local name=$1 steps=$2
    shift 2
    "$PYTHON" -m torch.distributed.run --nnodes 1 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-endpoint localhost:0 \
        -m megatron_hdp.pretrain_gpt --config configs/tiny-cpu.yaml --hybrid-data-parallel \
        --seq-length 4096 --hdp-tokens-per-rank 2048 --hdp-global-batch-tokens 16384 \
        --hdp-long-sequence split --train-iters "$steps" --lr-decay-iters $((3 * STEPS)) \
        --metrics-path "$folder/$name.jsonl" --save "$folder/$name" "$@"
}

echo "== data: documentation, code and conversations of the standard library"
rm -rf "${folder:?}"
"$PYTHON" scripts/examples/tutorial/corpora.py "$folder/data"
for name in base more chat; do
    sed "s/STEPS/$STEPS/" "scripts/examples/tutorial/$name.yaml" > "$folder/data/$name.yaml"
done
hdp data prepare "$folder/data/more.yaml" --tokenizer byte
hdp data describe "$folder/data/more.yaml" --tokenizer byte

echo
echo "== first: prose alone, sequences of at most 512 tokens"
train base "$STEPS" --hdp-data "$folder/data/base.yaml" "$@"

echo
echo "== then: code comes in, sequences grow to 4,096 tokens; prose continues where it was"
hdp data plan "$folder/data/more.yaml" --tokenizer byte --steps $((2 * STEPS)) \
    --hdp-global-batch-tokens 16384 --seq-length 4096 --hdp-long-sequence split
train more $((2 * STEPS)) --hdp-data "$folder/data/more.yaml" --load "$folder/base" "$@"

echo
echo "== last: the result learns to answer; loss on the answers alone"
train chat "$STEPS" --hdp-data "$folder/data/chat.yaml" --load "$folder/more" --finetune "$@"

echo
"$PYTHON" scripts/examples/tutorial/report.py "$folder"
