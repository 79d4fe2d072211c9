"""The benchmark of checksums runs, small, and prints what it compares."""

from pathlib import Path

from tests.support.processes import free_port, run_script

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_checkpoint.py"


def test_a_small_run(tmp_path):
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    small = ("--layers", "1", "--hidden-size", "32", "--rounds", "2", "--folder", str(tmp_path))
    done = run_script(SCRIPT, *small, MASTER_PORT=str(free_port()), **rank)
    assert done.returncode == 0, done.stderr
    for what in ("save: ", "load: ", "summing a file: "):
        assert what in done.stdout
    assert not list(tmp_path.iterdir())
