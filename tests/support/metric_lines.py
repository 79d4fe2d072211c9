"""What a file of metrics says of steps but how long they took: equal for equal runs."""

import json

TIMES = {
    *{"model_flops_per_second", "model_flops_per_second_per_rank"},
    *{"seconds", "tokens_per_second", "measured_efficiency", "makespan_s"},
    *{"idle_share_max", "idle_share_mean", "ring_wait_s", "pipeline_wait_s", "sync_s"},
    *{"planning_ms", "data_wait_ms", "loaders", "steps_ahead"},
}


def lines_of(path):
    """Every line as it is."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(path):
    """Every line without times."""
    return [{k: v for k, v in one.items() if k not in TIMES} for one in lines_of(path)]
