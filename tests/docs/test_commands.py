"""Every command that the docs show is run, here or by a test that they are listed with."""

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys

import pytest
from torch.distributed.run import get_args_parser

from megatron_hdp.cli.main import main
from megatron_hdp.data.mixture import read_data_file
from megatron_hdp.megatron.options import build_parser, parse_arguments
from megatron_hdp.options import yaml_to_argv
from megatron_hdp.training.loop import pretrain
from tests.docs.commands import COMMANDS, Elsewhere, Here, NotHere
from tests.docs.pages import (
    LANGUAGES,
    ROOT,
    Block,
    Command,
    all_blocks,
    all_commands,
    blocks,
    commands,
    split,
)

SMALL = ["--seq-length=256", "--hdp-tokens-per-rank=256", "--lr-decay-iters=8"]
TIMES = re.compile(r" +(planning|\d+\.\d+ ms)$", re.MULTILINE)
MARKERS = {"slow", "gpu", "megatron_lm"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where commands run: the repository's folders that they name, a corpus, its token files."""
    path = tmp_path_factory.mktemp("pages")
    for name in ("configs", "docs", "scripts"):
        (path / name).symlink_to(ROOT / name)
    (path / "data").mkdir()
    texts = ["x" * length for length in (250, 120, 100, 80, 60, 50, 40, 30, 20, 10)] * 10
    lines = [json.dumps({"text": text}) for text in texts]
    (path / "corpus.jsonl").write_text("\n".join(lines))
    (mix,) = (block.text for block in all_blocks() if block.text.startswith("# mix.yaml\n"))
    (path / "mix.yaml").write_text(mix)
    given = [command for command in shown("command") if " preprocess " in command.text]
    assert run_command(given[0], path) == 0
    for suffix in ("bin", "idx"):
        (path / f"corpus.{suffix}").symlink_to(path / "data" / f"corpus.{suffix}")
    return path


def shown(how):
    """The commands that are run by a function here, each once, in the order of the pages."""
    found = {command.text: command for command in reversed(all_commands())}
    return [one for text, one in reversed(found.items()) if COMMANDS.get(text) == Here(how)]


def run_command(command, path):
    """Runs ``megatron-hdp ...`` in this process."""
    with contextlib.chdir(path):
        return main(split(command.text)[1][1:])


def unlisted(found):
    """What is wrong with the list of commands, for these."""
    texts = {command.text for command in found}
    missing = [f"{one.page}: {one.text}" for one in found if one.text not in COMMANDS]
    return missing + [f"on no page: {text}" for text in COMMANDS if text not in texts]


def test_every_command_is_listed():
    found = all_commands()
    assert unlisted(found) == []
    assert unlisted([*found, Command("new.md", "rm -r /")]) == ["new.md: rm -r /"]
    kept = [one for one in found if one.text != "./scripts/gpu_check.sh --cpu"]
    assert unlisted(kept) == ["on no page: ./scripts/gpu_check.sh --cpu"]


@pytest.mark.parametrize("text", [t for t, by in COMMANDS.items() if isinstance(by, Elsewhere)])
def test_what_runs_elsewhere_runs_there(text):
    assert problem(text, COMMANDS[text]) is None


@pytest.mark.parametrize(
    ("by", "found"),
    [
        (("tests/scripts/test_quickstart.py::test_slowstart",), "no such test"),
        (("tests/scripts/test_quickstart.py::test_quickstart", "slow"), "needs nothing"),
        (("tests/scripts/gpu/test_gpu_check.py::test_the_whole_flow_on_a_cpu",), "needs slow"),
        ((".ci/run",), "does not run"),
    ],
)
def test_a_planted_mistake_in_the_list_is_found(by, found):
    assert found in problem("./scripts/other.sh", Elsewhere(*by))


def problem(text, by):
    """Why a command is not run where the list says."""
    path, _, name = by.test.partition("::")
    if not name:
        lines = (ROOT / path).read_text().splitlines()
        return None if any(text in line for line in lines) else f"{path} does not run {text}"
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    test = getattr(module, name, None)
    if test is None:
        return f"no such test: {by.test}"
    of_module = getattr(module, "pytestmark", [])
    marks = [*(of_module if isinstance(of_module, list) else [of_module])]
    marks += getattr(test, "pytestmark", [])
    needs = " ".join(sorted({mark.name for mark in marks} & MARKERS))
    return None if needs == by.needs else f"{by.test} needs {needs or 'nothing'}"


def test_what_is_not_run_has_a_reason():
    assert all(by.why for by in COMMANDS.values() if isinstance(by, NotHere))


def test_every_block_says_what_it_is():
    assert {block.language for block in all_blocks()} == LANGUAGES


def test_blocks_and_commands_are_found():
    page = "```bash\nA=1 run  one \\\n    --two    # three\n# four\n```\n\n"
    page += "```console\n$ say a\na\n$ say b\n```\n\n```{toctree}\nx\n```\n"
    first, second = blocks("p.md", page)
    assert commands(first) == [Command("p.md", "A=1 run one --two")]
    assert commands(second) == [Command("p.md", "say a", "a\n"), Command("p.md", "say b", "")]
    assert commands(Block("p.md", "text", "run\n")) == []
    assert split("A=1 run 'a b'") == ({"A": "1"}, ["run", "a b"])


@pytest.mark.parametrize("command", shown("command"), ids=lambda command: command.text[:60])
def test_a_command_prints_what_the_page_says(command, folder, capsys):
    assert run_command(command, folder) == 0
    if command.printed is not None:
        assert timeless(capsys.readouterr().out) == timeless(command.printed)


def timeless(printed):
    return TIMES.sub("", printed)


def test_times_alone_may_differ():
    assert timeless("  took  planning\na  0.5 s  0.22 ms\n") == "  took\na  0.5 s\n"
    assert timeless("a  0.5 s   0.22 ms\n") == timeless("a  0.5 s  71.39 ms\n")
    assert timeless("a  0.5 s   0.22 ms\n") != timeless("a  0.6 s   0.22 ms\n")


def losses(path, argv):
    """Body of a rank: (step, loss) of every step."""
    with contextlib.chdir(path), contextlib.redirect_stdout(io.StringIO()):
        return [(metrics.step, metrics.loss) for metrics in pretrain(parse_arguments(argv))]


@pytest.mark.slow
def test_training_commands_train(run_ranks, folder):
    """On ranks, one after the other, smaller: layouts share a curve, a resumed run goes on."""
    *of_train, of_its_own = sorted(shown("train"), key=lambda one: "tiny-cpu" not in one.text)
    runs = [trained(command, folder, run_ranks) for command in of_train]
    online, plain, pipelined, saving, resumed = (dict(run) for run in runs)
    for other in (online, pipelined, saving):
        assert other == pytest.approx(plain, rel=1e-5)
    assert list(plain) == [1, 2]
    assert list(resumed) == [3, 4]
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
    assert len(trained(of_its_own, folder, run_ranks)) == 4


@pytest.mark.parametrize("command", shown("train"), ids=lambda command: command.text[:60])
def test_the_flags_of_training_commands_are_taken(command):
    _, argv = launched(command)
    assert parse_arguments(argv).hybrid_data_parallel


def trained(command, path, run_ranks):
    """Steps and losses of the command's run, smaller."""
    num_ranks, argv = launched(command)
    argv += SMALL
    batch = "--global-batch-size" if "--global-batch-size" in argv else "--hdp-global-batch-tokens"
    argv.append(f"{batch}={8 if batch == '--global-batch-size' else 1024}")
    argv.append(f"--train-iters={4 if (path / 'checkpoints').exists() else 2}")
    return run_ranks(num_ranks, losses, path, argv)[0]


def launched(command):
    """How many ranks the command starts, and with which arguments, as torchrun reads it."""
    _, (launcher, *words) = split(command.text)
    assert launcher == "torchrun"
    options = get_args_parser().parse_args(words)
    assert options.module and options.training_script == "megatron_hdp.pretrain_gpt"
    return int(options.nproc_per_node), list(options.training_script_args)


def test_the_job_script_prints_its_commands(folder):
    (command,) = shown("dry_run")
    environment, words = split(command.text)
    environment = os.environ | environment | {"PYTHON": sys.executable}
    done = subprocess.run(
        words, env=environment, cwd=folder, capture_output=True, text=True, timeout=570
    )
    assert done.returncode == 0, done.stderr
    assert "torch.distributed.run" in done.stdout or "torchrun" in done.stdout


@pytest.mark.parametrize(
    "block", [block for block in all_blocks() if block.language == "yaml"], ids=lambda b: b.page
)
def test_yaml_is_read(block, tmp_path):
    (tmp_path / "models").symlink_to(ROOT / "configs" / "models")
    path = tmp_path / "page.yaml"
    path.write_text(block.text)
    if "\nsources:\n" in block.text:
        assert len(read_data_file(path).training.sources) > 1
        return
    argv = yaml_to_argv(path, build_parser())
    assert len(argv) > len(block.text.splitlines())
