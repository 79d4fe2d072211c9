#!/usr/bin/env bash
# From somebody's weights to a longer context and back, on two CPU ranks in about two minutes: a tiny
# Llama-3 of transformers is converted, trained on with sequences that grow beyond its context, learns to
# answer, and becomes a model of transformers again, which generates. docs/convert.md explains it step by
# step: ./scripts/longer_llama.sh [flags of training]
#
#   STEPS=12   steps of each of the two runs, at least 2
#   OUT=DIR    where models, data and checkpoints go (default: runs/longer-llama)
set -euo pipefail

STEPS=${STEPS:-12}
[[ $STEPS =~ ^([2-9]|[1-9][0-9]{1,3})$ ]] ||
    { echo "error: STEPS=$STEPS: expected a number of steps, 2 to 9999" >&2; exit 1; }

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

folder=${OUT:-runs/longer-llama}
export OMP_NUM_THREADS=1
export CUDA_VISIBLE_DEVICES="" # small enough for CPUs, on every machine

hdp() {
    "$PYTHON" -m megatron_hdp.cli.main "$@"
}

train() { # name, flags...
    local name=$1
    shift
    "$PYTHON" -m torch.distributed.run --nnodes 1 --nproc-per-node 2 \
        --rdzv-backend c10d --rdzv-endpoint localhost:0 \
        -m megatron_hdp.pretrain_gpt --config "$folder/longer.yaml" --hybrid-data-parallel \
        --train-iters "$STEPS" --metrics-path "$folder/$name.jsonl" --save "$folder/$name" "$@"
}

echo "== a tiny Llama-3, documentation, code and conversations of the standard library"
rm -rf "${folder:?}"
"$PYTHON" scripts/examples/tutorial/corpora.py "$folder/data"
"$PYTHON" scripts/examples/tutorial/tiny_llama.py make "$folder/llama"
cp scripts/examples/tutorial/chat.yaml "$folder/data/"
sed "s/STEPS/$STEPS/" scripts/examples/tutorial/growing.yaml > "$folder/data/growing.yaml"
cp scripts/examples/tutorial/longer.yaml "$folder/"

echo
echo "== its weights become a checkpoint, its configuration flags"
hdp convert --from-hf "$folder/llama" --to "$folder/weights"

echo
echo "== pre-training continues, with sequences that grow to four times its context"
train longer --hdp-data "$folder/data/growing.yaml" --load "$folder/weights" "$@"

echo
echo "== the result learns to answer; loss on the answers alone"
train answers --hdp-data "$folder/data/chat.yaml" --load "$folder/longer" --finetune "$@"

echo
echo "== and back: config.json has the base, scaling and context of the run"
hdp convert --from "$folder/answers" --to-hf "$folder/longer-llama"
"$PYTHON" scripts/examples/tutorial/tiny_llama.py ask "$folder/longer-llama" What is abc?
