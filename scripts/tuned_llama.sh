#!/usr/bin/env bash
# Adapters and preferences, on two CPU ranks in a few minutes: a tiny Llama-3 of transformers is
# trained, tuned to answer by adapters, then to answer as people prefer, and exported, as PEFT's files
# and merged. docs/tuning.md explains it step by step: ./scripts/tuned_llama.sh [flags of training]
#
#   STEPS=40   steps of each of the three runs, at least 2
#   OUT=DIR    where models, data and checkpoints go (default: runs/tuned-llama)
source "$(dirname "${BASH_SOURCE[0]}")/_tutorial.sh" tuned-llama 40

merge() { # adapters, the checkpoint beside which they were trained, folder to make
    hdp convert --from "$folder/$1" --like "$folder/llama" --to-hf "$folder/$3" \
        --adapters merged --base "$folder/$2"
}

echo "== a tiny Llama-3; conversations, and pairs of a better and a worse answer"
"$PYTHON" scripts/examples/tutorial/corpora.py "$folder/data"
"$PYTHON" scripts/examples/tutorial/pairs.py "$folder/data"
"$PYTHON" scripts/examples/tutorial/tiny_llama.py make "$folder/llama"
hdp convert --from-hf "$folder/llama" --to "$folder/weights"
cp scripts/examples/tutorial/{base,chat}.yaml "$folder/data/"
cp scripts/examples/tutorial/tuning.yaml "$folder/training.yaml"

echo
echo "== a base: all weights learn documentation"
train base --hdp-data "$folder/data/base.yaml" --hdp-long-sequence split \
    --load "$folder/weights" "$@"

echo
echo "== adapters beside it learn to answer; then they are added to its weights"
train answers --hdp-data "$folder/data/chat.yaml" --lora-rank 8 --lora-alpha 16 --lr 5e-3 \
    --pretrained-checkpoint "$folder/base" "$@"
merge answers base answering-llama
hdp convert --from-hf "$folder/answering-llama" --to "$folder/answering"

echo
echo "== adapters beside the sum learn what is preferred; without them it is the reference"
train preferred --data-path "$folder/data/pairs.jsonl" --hdp-objective dpo --lora-rank 8 --lr 3e-3 \
    --pretrained-checkpoint "$folder/answering" "$@"

echo
echo "== PEFT's files, and one model"
hdp convert --from "$folder/preferred" --like "$folder/answering-llama" --to-hf "$folder/peft"
merge preferred answering tuned-llama
"$PYTHON" scripts/examples/tutorial/tiny_llama.py ask "$folder/tuned-llama" What is abc?
"$PYTHON" scripts/examples/tutorial/tuning.py "$folder"
