#!/usr/bin/env bash
# From somebody's weights to a longer context and back, on two CPU ranks in about two minutes: a tiny
# Llama-3 of transformers is converted, trained on with sequences that grow beyond its context, learns to
# answer, and becomes a model of transformers again, which generates. docs/convert.md explains it step by
# step: ./scripts/longer_llama.sh [flags of training]
#
#   STEPS=12   steps of each of the two runs, at least 2
#   OUT=DIR    where models, data and checkpoints go (default: runs/longer-llama)
source "$(dirname "${BASH_SOURCE[0]}")/_tutorial.sh" longer-llama 12

echo "== a tiny Llama-3, documentation, code and conversations of the standard library"
"$PYTHON" scripts/examples/tutorial/corpora.py "$folder/data"
"$PYTHON" scripts/examples/tutorial/tiny_llama.py make "$folder/llama"
cp scripts/examples/tutorial/chat.yaml "$folder/data/"
sed "s/STEPS/$STEPS/" scripts/examples/tutorial/growing.yaml > "$folder/data/growing.yaml"
cp scripts/examples/tutorial/longer.yaml "$folder/training.yaml"

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
