"""All that a GPU machine can tell about this tree: tests, questions, benchmarks, a picture.

Run by scripts/gpu_check.sh. It works from the source tree with one GPU and without internet, and
leaves the machine's packages alone: what they lack goes into build/gpu-check. Every part has a
deadline, and a part that fails stops only those that need it. Exit code 0: nothing failed, 1:
something did, 2: there is no GPU.
"""

import argparse
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import needs
from questions import TOPICS
from running import Finished, run

ROOT = Path(__file__).parents[2]
BENCHMARKS = ("bench_rings", "bench_attention", "bench_offload", "bench_loss")
PARTS = ("questions", "tests", "benchmarks", "checkout", "lost-rank")
_DEVICE = """
import json, sys, torch
gpu = torch.cuda.is_available()
about = torch.cuda.get_device_properties(0) if gpu else None
print(json.dumps({
    "gpu": about and f"{about.name}, {about.total_memory / 2**30:.0f} GiB, "
    f"sm_{about.major}{about.minor}",
    "gpus": torch.cuda.device_count(),
    "versions": f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    + (f", CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
       if gpu else ""),
}))
"""
_RESULT = re.compile(r"^(tests/\S+?::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b")


@dataclass
class Row:
    """One line of the last table."""

    part: str
    result: str
    seconds: float = 0.0
    figures: str = ""


@dataclass
class Check:
    """One run of all parts, or of some of `PARTS`."""

    out: Path  # folder of the log and the tables
    work: Path  # folder of what was built or installed for this interpreter
    limit_s: float  # that everything may take
    device: str  # "cuda" or "cpu"
    wheels: Path | None = None
    te_bundle: Path | None = None
    parts: Sequence[str] = PARTS
    num_gpus: int = 1
    rows: list[Row] = field(default_factory=list)
    failed_tests: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.started = time.monotonic()
        self.out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        self.log = (self.out / "check.log").open("w", buffering=1)
        paths = [ROOT, self.work / "site", *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "PYTHONUNBUFFERED": "1",
            "MEGATRON_HDP_BUILD_JOBS": str(os.cpu_count()),
            "OUT": str(self.out),
        }
        self.environment.setdefault("OMP_NUM_THREADS", "1")
        self.environment.setdefault("PYTHONWARNINGS", "ignore")  # Megatron's, of what it lacks

    def say(self, line: str) -> None:
        """Print a line, into the log too."""
        print(line, flush=True)
        self.log.write(line + "\n")

    def left_s(self) -> float:
        """Seconds until everything must be over."""
        return self.limit_s - (time.monotonic() - self.started)

    def command(
        self,
        command: Sequence[str | Path],
        deadline_s: float,
        say: Callable[[str], object] | None = None,
    ) -> Finished:
        """Run a command in the tree, no longer than there is time."""
        say = say or self.say
        deadline_s = max(1.0, min(deadline_s, self.left_s()))
        words = " ".join(map(str, command))
        say(f"$ {words if len(words) < 300 else words[:300] + ' ...'}")
        how = {"environment": self.environment, "folder": ROOT}
        return run(command, deadline_s=deadline_s, say=say, **how)

    def part(self, name: str, run_part: Callable[[], Row]) -> bool:
        """Run a part and note its row; returns whether it did not fail."""
        self.say(f"\n== {name} ({self.left_s():.0f} s left)")
        started = time.monotonic()
        row = run_part()
        row.seconds = time.monotonic() - started
        self.rows.append(row)
        self.say(f"== {name}: {row.result}, {row.seconds:.0f} s")
        return not row.result.startswith("failed")

    def packages(self) -> Row:
        """Install what the interpreter lacks beside it."""
        sys.path.insert(0, str(self.work / "site"))
        lacking = needs.lacking(needs.requirements())
        if not lacking:
            return Row("packages", "ok", figures="nothing lacking")
        source = ["--no-index", "--find-links", self.wheels] if self.wheels else []
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        target = ["--upgrade", "--target", self.work / "site"]
        done = self.command([*pip, *source, *target, *lacking], 90)
        return _row("packages", done, f"{len(lacking)} installed")

    def planner(self) -> Row:
        """Build the C++ parts in place unless that has been done for these sources."""
        digest = hashlib.sha256(sys.implementation.cache_tag.encode())
        for path in [ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*.[ch]pp"))]:
            digest.update(path.read_bytes())
        stamp = self.work / "planner"
        tag = sys.implementation.cache_tag
        files = (f"planner/_core.{tag}*", f"data/_order.{tag}*", f"media/_items.{tag}*")
        built = all(any((ROOT / "megatron_hdp").glob(one)) for one in files)
        if built and stamp.exists() and stamp.read_text() == digest.hexdigest():
            return Row("planner", "ok", figures="built before")
        done = self.command([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], 240)
        if done.code == 0:
            parts = "import megatron_hdp.planner, megatron_hdp.data, megatron_hdp.media"
            done = self.command([sys.executable, "-c", parts], 60)
        if done.code == 0:
            stamp.write_text(digest.hexdigest())
        return _row("planner", done, "built")

    def transformer_engine(self) -> Row:
        """Bring TransformerEngine up from a bundle; without it, what is installed serves."""
        name = "TransformerEngine"
        if self.te_bundle is None:
            found = needs.is_here("transformer-engine")
            return Row(name, "ok" if found else "skipped", figures="" if found else "no bundle")
        script = ROOT / "scripts/gpu/bring_up_te.py"
        done = self.command([sys.executable, script, self.te_bundle, self.work / "te"], 180)
        if done.code == 0:
            found = json.loads((self.work / "te/environment.json").read_text())
            site = found.pop("PYTHONPATH")
            self.environment["PYTHONPATH"] += os.pathsep + site
            self.environment |= found
        return _row(name, done, done.lines[-1] if done.lines else "")

    def doctor(self) -> Row:
        """What the package itself says of the machine."""
        code = "import sys; from megatron_hdp.cli.main import main; sys.exit(main(['doctor']))"
        done = self.command([sys.executable, "-c", code], 90)
        kernel = [line for line in done.lines if line.startswith("attention kernel")]
        return _row("doctor", done, " ".join(" ".join(kernel).split()))

    def tests(self) -> Row:
        """The tests marked gpu; of those for the CPU only a few, to try the flow."""
        files, marked = files_with_gpu_tests(ROOT / "tests"), "gpu and not slow"
        if self.device == "cpu":
            files, marked = ["tests/runtime/test_clocks.py"], "not slow"
        reserve_s = 45.0 * len(BENCHMARKS) if "benchmarks" in self.parts else 0.0
        deadline_s = min(240.0, self.left_s() - reserve_s)
        options = ["-v", "-ra", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
        done = self.command(
            [sys.executable, "-m", "pytest", *options, "--timeout=200", "-m", marked, *files],
            max(60.0, deadline_s),
        )
        results = dict(match.groups() for line in done.lines if (match := _RESULT.match(line)))
        failed = ("FAILED", "ERROR")
        self.failed_tests = [test for test, result in results.items() if result in failed]
        counts = [list(results.values()).count(word) for word in ("PASSED", "FAILED", "SKIPPED")]
        figures = "{} passed, {} failed, {} skipped".format(*counts)
        return _row("tests", done, figures, always=True)

    def questions(self, topic: str) -> Row:
        """What was decided by reading and only a GPU can settle, a topic in a process."""
        script = ROOT / "scripts/gpu/ask.py"
        command = [sys.executable, script, topic, "--device", self.device]
        done = self.command(command, TOPICS[topic])
        told = self._figures(f"questions of {topic}", done)
        return _row(f"questions: {topic}", done, told, always=bool(told))

    def benchmark(self, name: str, parts_left: int) -> Row:
        """One benchmark script, which keeps to its time."""
        script = ROOT / f"scripts/gpu/{name}.py"
        if name == "bench_rings" and self.device == "cuda" and self.num_gpus < 2:
            return Row(name, "skipped", figures="one GPU here, and rings need two")
        share = min(120.0, self.left_s() / parts_left)
        seconds = share - 20.0  # what starting and a last slow row may take
        if seconds < 15:
            return Row(name, "skipped", figures="no time left")
        options = ["--device", self.device, "--seconds", f"{seconds:.0f}"]
        small = ["--small"] if self.device == "cpu" else []
        done = self.command([sys.executable, script, *options, *small], share)
        table = [line for line in done.lines if line.startswith("|")]
        rows = sum(not set(line) <= set("|-: ") for line in table) - 1
        return _row(name, done, self._figures(name, done) or f"{max(0, rows)} rows")

    def checkout(self) -> Row:
        """Training in a Megatron-LM checkout, stock and under HDP, where one is named."""
        name = "bench_checkout"
        if "MEGATRON_LM_PATH" not in self.environment:
            return Row(name, "skipped", figures="MEGATRON_LM_PATH names no checkout")
        if self.left_s() < 120:
            return Row(name, "skipped", figures="no time left")
        seconds = min(300.0, self.left_s()) - 20.0
        script = ROOT / f"scripts/gpu/{name}.py"
        options = ["--device", self.device, "--seconds", f"{seconds:.0f}"]
        small = ["--small"] if self.device == "cpu" else []
        done = self.command([sys.executable, script, *options, *small], seconds + 20.0)
        return _row(name, done, self._figures(name, done))

    def _figures(self, heading: str, done: Finished) -> str:
        """Keeps what a script printed, and gives what it said in short."""
        self.tables += [f"## {heading}", "", *done.lines, ""]
        found = [line.removeprefix("figures:") for line in done.lines if line[:8] == "figures:"]
        return " ".join(found).strip()

    def picture(self) -> Row:
        """A trace of one step on four lanes."""
        script, picture = ROOT / "scripts/gpu/trace_step.py", self.out / "trace-step.png"
        options = ["--device", self.device, *(["--small"] if self.device == "cpu" else [])]
        if self.left_s() < 20:
            return Row("trace of a step", "skipped", figures="no time left")
        done = self.command([sys.executable, script, picture, *options], 160)
        return _row("trace of a step", done, done.lines[-1] if done.lines else "")

    def lost_rank(self) -> Row:
        """A rank of three is killed, and the others go on, on one GPU or on their own."""
        name = "lost rank"
        if self.device == "cpu" or self.left_s() < 90:
            why = "needs a GPU" if self.device == "cpu" else "no time left"
            return Row(name, "skipped", figures=why)
        options = ["-s", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-m", "gpu"]
        command = [sys.executable, "-m", "pytest", *options, "tests/gpu/test_lost_rank.py"]
        done = self.command(command, 240.0)
        found = [line for line in done.lines if "from the kill" in line]
        return _row(name, done, " ".join(found).lstrip("."))

    def all_parts(self) -> None:
        """Run everything in order."""
        ready = self.part("packages", self.packages) and self.part("planner", self.planner)
        if not ready:
            return
        self.part("TransformerEngine", self.transformer_engine)
        self.part("doctor", self.doctor)
        for topic in TOPICS if "questions" in self.parts else ():
            self.part(f"questions: {topic}", lambda topic=topic: self.questions(topic))
        if "tests" in self.parts:
            self.part("tests", self.tests)
        for number, name in enumerate(BENCHMARKS if "benchmarks" in self.parts else ()):
            left = len(BENCHMARKS) - number + 1  # the picture comes behind them
            self.part(name, lambda name=name, left=left: self.benchmark(name, left))
        if "benchmarks" in self.parts:
            self.part("trace of a step", self.picture)
        if "checkout" in self.parts:
            self.part("bench_checkout", self.checkout)
        if "lost-rank" in self.parts:
            self.part("lost rank", self.lost_rank)

    def summary(self, about: str) -> str:
        """The last table, in Markdown."""
        lines = [about, "", "| part | result | seconds | figures |", "|---|---|---|---|"]
        lines += [f"| {r.part} | {r.result} | {r.seconds:.0f} | {r.figures} |" for r in self.rows]
        lines += ["", *(f"failed: {test}" for test in self.failed_tests)]
        lines.append(f"{time.monotonic() - self.started:.0f} s in all")
        return "\n".join(lines)

    def has_failed(self) -> bool:
        """True if any part failed, or the first ones kept the others from running."""
        return any(row.result.startswith("failed") for row in self.rows)


def files_with_gpu_tests(tests: Path) -> list[str]:
    """Return the test files that mark a test gpu, themselves or by a helper they import.

    So the others, which may import what a GPU machine lacks, are not even looked at.
    """
    texts = {path: path.read_text() for path in tests.rglob("*.py")}
    marking = [path.stem for path, text in texts.items() if "mark.gpu" in text]
    helpers = [f".{name} import" for name in marking if not name.startswith("test_")]
    words = ["mark.gpu", *helpers]
    return sorted(
        str(path.relative_to(ROOT))
        for path, text in texts.items()
        if path.stem.startswith("test_") and any(word in text for word in words)
    )


def _row(part: str, done: Finished, figures: str, *, always: bool = False) -> Row:
    """A part's row from the command that it ran.

    If it failed, the last line of output tells more than its figures, unless they always count.
    """
    if done.timed_out:
        return Row(part, "failed: no time left", figures=figures)
    if done.code == 0:
        return Row(part, "ok", figures=figures)
    last = next((line for line in reversed(done.lines) if line.strip()), "")
    told = figures if always else last[:160].replace("|", "/")
    return Row(part, f"failed: exit code {done.code}", figures=told)


def _folder(text: str) -> Path:
    path = Path(text).resolve()
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is no folder")
    return path


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check.sh", description=__doc__)
    own = os.environ.get
    for flag, variable, text in (
        ("--wheels", "GPU_CHECK_WHEELS", "what scripts/gpu_wheels.sh collected; else pip's index"),
        (
            *("--te-bundle", "GPU_CHECK_TE_BUNDLE"),
            "a bundle of TransformerEngine, see scripts/gpu/bring_up_te.py",
        ),
    ):
        text = f"{text} (or {variable})"
        parser.add_argument(flag, type=_folder, default=own(variable), help=text)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=PARTS, help="parts that run; without it all do"
    )
    parser.add_argument("--cpu", action="store_true", help="try the flow without a GPU, small")
    parser.add_argument("--limit-s", type=float, default=525.0, help="seconds for everything")
    parser.add_argument(
        "--out", type=Path, default=own("OUT"), help="log and tables (or OUT; build/gpu-check)"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all parts and print the table; returns the exit code."""
    arguments = _arguments(argv)
    work = ROOT / "build/gpu-check" / sys.implementation.cache_tag
    check = Check(
        out=Path(arguments.out or ROOT / "build/gpu-check").resolve(),
        work=work,
        limit_s=arguments.limit_s,
        device="cpu" if arguments.cpu else "cuda",
        wheels=arguments.wheels,
        te_bundle=arguments.te_bundle,
        parts=arguments.only,
    )
    asked = check.command([sys.executable, "-c", _DEVICE], 120, say=check.log.write)
    if asked.code:
        check.say(f"{sys.executable} has no torch that loads: set PYTHON to one that has")
        return 2
    found = json.loads(asked.lines[-1])
    if found["gpu"] is None and not arguments.cpu:
        check.say("no NVIDIA GPU here: nothing to check (--cpu tries the flow without one)")
        return 2
    check.num_gpus = found["gpus"]
    gpus = f"{found['gpus']} x {found['gpu']}" if found["gpu"] else "no GPU"
    about = f"{gpus}; {found['versions']}"
    check.all_parts()
    (check.out / "check.md").write_text("\n".join([check.summary(about), "", *check.tables]))
    check.say("\n" + check.summary(about))
    return 1 if check.has_failed() else 0


if __name__ == "__main__":
    sys.exit(main())
