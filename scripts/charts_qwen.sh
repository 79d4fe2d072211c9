#!/usr/bin/env bash
# Pictures among the tokens, on four CPU ranks: bar charts are drawn, a tiny random Qwen3-VL of
# transformers learns to read them, and becomes a model of transformers again, which is asked about
# some. The runs draw who encodes what. docs/charts.md explains it step by step:
# ./scripts/charts_qwen.sh [flags of training]
#
#   STEPS=40   steps of training, at least 2
#   OUT=DIR    where models, data and checkpoints go (default: runs/charts-qwen)
source "$(dirname "${BASH_SOURCE[0]}")/_tutorial.sh" charts-qwen 40

ranks=4

echo "== charts of many sizes, each with a question and its answer; a tiny Qwen3-VL"
"$PYTHON" scripts/examples/tutorial/charts.py "$folder/data"
"$PYTHON" scripts/examples/tutorial/tiny_qwen.py make "$folder/qwen"
cp scripts/examples/tutorial/charts.yaml "$folder/data/"
cp scripts/examples/tutorial/seeing.yaml "$folder/training.yaml"

echo
echo "== its language model becomes a checkpoint, its encoder stays in Hugging Face's files"
hdp convert --from-hf "$folder/qwen" --to "$folder/weights"

echo
echo "== what there is to encode; only headers of pictures are read"
hdp data describe "$folder/data/charts.yaml"

echo
echo "== two steps with each chart encoded by the rank that trains its sequence"
train home --load "$folder/weights" --hdp-data "$folder/data/charts.yaml" \
    --hdp-encoder "$folder/weights/hugging_face" --hdp-media-balance home \
    --hdp-plot-plan "$folder/home.png" --hdp-plot-step 2 "$@" --train-iters 2

echo
echo "== training, with the charts of a step encoded by all ranks"
train seeing --load "$folder/weights" --hdp-data "$folder/data/charts.yaml" \
    --hdp-encoder "$folder/weights/hugging_face" \
    --hdp-plot-plan "$folder/step.png" --hdp-plot-step 2 "$@"

echo
echo "== and back: transformers reads a chart with the trained weights"
hdp convert --from "$folder/seeing" --like "$folder/qwen" --to-hf "$folder/seeing-qwen"
"$PYTHON" scripts/examples/tutorial/tiny_qwen.py ask "$folder/seeing-qwen" "$folder/data"
"$PYTHON" scripts/examples/tutorial/tiny_qwen.py tell "$folder"
