# Head of the tutorials' scripts; sourced by them with the tutorial's name and its usual STEPS.
#
#   STEPS=N    steps of each run, at least 2
#   OUT=DIR    where models, data and checkpoints go (default: runs/NAME)
#
# Afterwards `folder` is that place, empty; `hdp` is the command megatron-hdp, and `train NAME FLAGS...`
# trains on `ranks` ranks by $folder/training.yaml, its metrics in NAME.jsonl, its checkpoint in NAME.
set -euo pipefail

STEPS=${STEPS:-$2}
[[ $STEPS =~ ^([2-9]|[1-9][0-9]{1,3})$ ]] ||
    { echo "error: STEPS=$STEPS: expected a number of steps, 2 to 9999" >&2; exit 1; }

source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

folder=${OUT:-runs/$1}
ranks=2
export OMP_NUM_THREADS=1
export CUDA_VISIBLE_DEVICES="" # small enough for CPUs, on every machine

hdp() {
    "$PYTHON" -m megatron_hdp.cli.main "$@"
}

train() { # name, flags...
    local name=$1
    shift
    "$PYTHON" -m torch.distributed.run --nnodes 1 --nproc-per-node "$ranks" \
        --rdzv-backend c10d --rdzv-endpoint localhost:0 \
        -m megatron_hdp.pretrain_gpt --config "$folder/training.yaml" --hybrid-data-parallel \
        --train-iters "$STEPS" --metrics-path "$folder/$name.jsonl" --save "$folder/$name" "$@"
}

rm -rf "${folder:?}"
