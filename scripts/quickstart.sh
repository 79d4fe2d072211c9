#!/usr/bin/env bash
# Trains a small GPT on the Python standard library twice, on the static DP x CP mesh and with hybrid
# data parallelism, and compares: ./scripts/quickstart.sh [flags of the training command]
#
#   NPROC=4    ranks
#   STEPS=N    steps (default: train-iters of configs/tiny-cpu.yaml)
#   OUT=DIR    where data, metrics and picture go (default: runs/quickstart)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

NPROC=${NPROC:-4}
folder=${OUT:-runs/quickstart}
prefix=$folder/data/stdlib
mkdir -p "$folder"

export OMP_NUM_THREADS=1
export CUDA_VISIBLE_DEVICES="" # the comparison is made on CPUs, on every machine
# What megatron-core tells every rank about GPU libraries
PYTHONWARNINGS="ignore:Transformer Engine and Apex,ignore:Apex is not installed"
export PYTHONWARNINGS="$PYTHONWARNINGS,ignore:full scope is deprecated"

list_sources() { # the standard library's own files, without tests and installed packages
    "$PYTHON" - <<'PY'
import pathlib, sysconfig
skipped = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
root = pathlib.Path(sysconfig.get_path("stdlib"))
for path in sorted(root.rglob("*.py")):
    if not skipped & set(path.relative_to(root).parts):
        print(path)
PY
}

train() { # name, flags...
    local name=$1
    shift
    echo
    echo "== training: $name"
    rm -f "$folder/$name/metrics.jsonl"
    "$PYTHON" -m torch.distributed.run --nnodes 1 --nproc-per-node "$NPROC" \
        --rdzv-backend c10d --rdzv-endpoint localhost:0 \
        -m megatron_hdp.pretrain_gpt --config configs/tiny-cpu.yaml --hybrid-data-parallel \
        --hdp-cost-model configs/tiny-cpu-cost-model.json \
        --data-path "$prefix" --metrics-path "$folder/$name/metrics.jsonl" \
        ${STEPS:+--train-iters "$STEPS"} "$@"
}

sources=()
while IFS= read -r path; do
    sources+=("$path")
done < <(list_sources)
[[ ${#sources[@]} -gt 0 ]] || die "$PYTHON has no standard library in source form: use another"

echo "== data: ${#sources[@]} files of the standard library"
"$PYTHON" -m megatron_hdp.cli.main preprocess --input "${sources[@]}" --tokenizer byte \
    --output-prefix "$prefix"

train static --hdp-strategy static "$@"
plot_step=$((${STEPS:-2} < 2 ? 1 : 2)) # a step of long and short sequences
train hdp --hdp-strategy auto --hdp-plot-plan "$folder/plan.png" --hdp-plot-step "$plot_step" "$@"

echo
"$PYTHON" scripts/quickstart_report.py "$folder"/{static,hdp}/metrics.jsonl
echo
echo "metrics: $folder/static/metrics.jsonl, $folder/hdp/metrics.jsonl"
echo "the plan of step $plot_step: $folder/plan.png"
