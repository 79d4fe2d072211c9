"""The benchmark of preprocessing compares two tools, and stops where they write different bytes."""

import os
import re
from pathlib import Path

import pytest

from tests.support.processes import run_script

SCRIPT = Path(__file__).parents[3] / "scripts" / "benchmarks" / "bench_preprocess.py"
SMALL = ("--megabytes", "0.2", "--vocabulary", "400", "--rounds")
CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
STAND_IN = """
import argparse
from megatron_hdp.cli.main import main
parser = argparse.ArgumentParser()
for name in ("input", "tokenizer-type", "tokenizer-model", "output-prefix", "workers"):
    parser.add_argument(f"--{name}", required=True)
parser.add_argument("--append-eod", action="store_true")
given = parser.parse_args()
assert given.append_eod and given.tokenizer_type == "HuggingFaceTokenizer"
main(["preprocess", "--input", given.input, "--tokenizer", f"hf:{given.tokenizer_model}",
      "--output-prefix", given.output_prefix + "_text_document", "--workers", given.workers])
"""


@pytest.fixture
def checkout(tmp_path):
    pytest.importorskip("tokenizers", reason="pip install 'megatron-hdp[tokenizers]'")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "preprocess_data.py").write_text(STAND_IN)
    return tmp_path


def check(done, rounds):
    assert done.returncode == 0, done.stderr
    text, ours, theirs, ratio = done.stdout.splitlines()
    assert re.fullmatch(r"0\.\d MB of text, 2 workers, \d+ CPUs, same .bin", text)
    for line, name in ((ours, "megatron-hdp preprocess"), (theirs, "tools/preprocess_data.py")):
        assert re.fullmatch(rf" *{name}: [\d.]+ MB/s \(seconds: ([\d.]+(, |\))){{{rounds}}}", line)
    assert re.fullmatch(r" *ratio of medians: [\d.]+", ratio)


def test_a_small_run(checkout):
    check(run_script(SCRIPT, "--megatron-lm", str(checkout), *SMALL, "1"), rounds=1)


@pytest.mark.slow
def test_other_bytes_are_no_result(checkout):
    tool = checkout / "tools" / "preprocess_data.py"
    tool.write_text(STAND_IN.replace('"--workers", given', '"--no-append-eod", "--workers", given'))
    done = run_script(SCRIPT, "--megatron-lm", str(checkout), *SMALL, "1")
    assert done.returncode == 1
    assert "wrote different .bin files" in done.stderr and "ratio" not in done.stdout


@pytest.mark.slow
@pytest.mark.megatron_lm
@pytest.mark.skipif(not CHECKOUT, reason="set MEGATRON_LM_PATH to a Megatron-LM checkout")
def test_beside_megatrons_own_tool():
    check(run_script(SCRIPT, "--megatron-lm", CHECKOUT, *SMALL, "2"), rounds=2)
