"""The CPU shim: Megatron sees a CPU that answers for CUDA, everybody else sees no change."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from megatron_hdp.megatron.cpu import shim

# What every script may use. `snapshot` holds whatever the shim could touch, by reference, so that
# identity can be compared; modules that appear later are left out.
PRELUDE = """
import sys
import torch
from megatron_hdp.megatron.cpu import shim, stand_in

MISSING = object()

def snapshot():
    owners = {name: m for name, m in sys.modules.items() if name.split(".")[0] == "megatron"}
    owners |= {"torch": torch, "torch.cuda": torch.cuda, "torch.cuda.random": torch.cuda.random}
    owners |= {"torch.distributed": torch.distributed, "Tensor": torch.Tensor}
    owners |= {"Module": torch.nn.Module}
    found = {(o, n): v for o, owner in owners.items() for n, v in list(vars(owner).items())}
    for name in ("cuda", "type", "record_stream"):
        found["Tensor", name] = vars(torch.Tensor).get(name, MISSING)
    return found

def changed(before, after):
    return sorted(key for key in before if before[key] is not after.get(key, MISSING))

def left_behind():
    "Whatever of the shim's can still be reached from a megatron module or its loader."
    found = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] != "megatron":
            continue
        loader = getattr(module, "__loader__", None)
        if "exec_module" in getattr(loader, "__dict__", {}):
            found.append((name, "__loader__"))
        for attribute, value in list(vars(module).items()):
            ours = (type(value).__module__, getattr(value, "__module__", None))
            if {shim.__name__, stand_in.__name__} & set(ours):
                found.append((name, attribute))
    return found
"""


# Forks a process for every script, having imported what is slow and not Megatron's.
SERVER = """
import json, os, sys, tempfile, traceback
import torch, torch.distributed.tensor, torch._inductor.compile_fx

for line in sys.stdin:
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
            failed = 0
            try:
                exec(compile(json.loads(line), "script", "exec"), {"__name__": "__main__"})
            except BaseException:
                failed = 1
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(failed)
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        print(json.dumps([status, output.read().decode()]), flush=True)
"""


@pytest.fixture(scope="module")
def run():
    """Runs a script after the prelude in a process of its own; fails with its output."""
    command = [sys.executable, "-W", "ignore", "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run_script(script):
        server.stdin.write(json.dumps(PRELUDE + textwrap.dedent(script)) + "\n")
        server.stdin.flush()
        status, output = json.loads(server.stdout.readline())
        assert status == 0, output

    with server:
        yield run_script
        server.stdin.close()


def test_revert_restores_every_original(run):
    run("""
    import megatron.core.optimizer, megatron.core.models.gpt, megatron.core.tensor_parallel
    import importlib, logging
    finders, before = list(sys.meta_path), snapshot()
    shim.apply()
    touched = changed(before, snapshot())
    assert {name for _, name in touched} == {
        "torch", "cuda", "type", "record_stream", "_get_cuda_rng_state", "_set_cuda_rng_state",
    }, touched
    owners = {o for o, _ in touched if not o.startswith("megatron.")}
    assert owners == {"Tensor", "Module"}, owners
    assert len(touched) > 50
    importlib.import_module("megatron.core.datasets.gpt_dataset")
    importlib.reload(sys.modules["megatron.core.utils"])
    names_of_utils = vars(sys.modules["megatron.core.utils"])
    assert names_of_utils["torch"] is not torch
    assert left_behind()
    shim.revert()
    assert names_of_utils["torch"] is torch
    after = snapshot()
    reloaded = {key for key in changed(before, after) if key[0] == "megatron.core.utils"}
    assert set(changed(before, after)) == reloaded
    assert left_behind() == []
    assert sys.meta_path == finders
    assert not logging.getLogger("megatron.core.tensor_parallel.random").filters
    assert not shim.is_active()
    """)


def test_torch_itself_is_untouched_while_applied(run):
    run("""
    import megatron.core.tensor_parallel
    before = snapshot()
    with shim.applied():
        for name in ("torch", "torch.cuda", "torch.cuda.random", "torch.distributed"):
            assert [key for key in changed(before, snapshot()) if key[0] == name] == []
        assert not torch.cuda.is_available()
        for call in (lambda: torch.zeros(1, device="cuda"), torch.cuda.current_device):
            try:
                call()
            except (AssertionError, RuntimeError):
                continue
            raise SystemExit("torch outside megatron answered for CUDA")
        inside = sys.modules["megatron.core.tensor_parallel.layers"].torch
        assert inside.zeros(1, device="cuda", pin_memory=True).device.type == "cpu"
        assert inside.empty(1, device=inside.cuda.current_device()).device.type == "cpu"
        assert inside.float32 is torch.float32 and inside.nn is torch.nn
        assert not inside.cuda.is_available()
    """)


def test_modules_imported_later_enter_and_leave(run):
    run("""
    shim.apply()
    import megatron.core.tensor_parallel.random as rng
    assert rng.torch is not torch
    assert rng._get_cuda_rng_state is stand_in._get_rng_state
    shim.revert()
    assert rng.torch is torch
    assert rng._get_cuda_rng_state.__module__ == rng.__name__
    assert left_behind() == []
    import megatron.core.models.gpt.gpt_model as late
    assert late.torch is torch
    """)


def test_a_loader_that_outlives_the_shim_is_not_left_patched(run):
    run("""
    import importlib.util
    import megatron.core
    shim.apply()
    spec = importlib.util.find_spec("megatron.core.utils")
    import megatron.core.parallel_state as state
    shim.revert()
    for found in (spec, state.__spec__):
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        assert module.torch is torch
    assert left_behind() == []
    """)


IMPORT = "import megatron.core.tensor_parallel.layers"
APPLY, REVERT = "shim.apply()", "shim.revert()"
INSIDE = "assert sys.modules['megatron.core.tensor_parallel.layers'].torch is not torch"
OUTSIDE = "assert sys.modules['megatron.core.tensor_parallel.layers'].torch is torch"
END = "assert left_behind() == [] and 'cuda' not in vars(torch.Tensor)"


@pytest.mark.parametrize(
    "order",
    [
        (IMPORT, APPLY, INSIDE, REVERT, OUTSIDE),
        (APPLY, IMPORT, INSIDE, REVERT, OUTSIDE),
        pytest.param((APPLY, APPLY, IMPORT, INSIDE, REVERT, OUTSIDE), marks=pytest.mark.slow),
        pytest.param((IMPORT, APPLY, APPLY, INSIDE, REVERT, OUTSIDE), marks=pytest.mark.slow),
        (APPLY, REVERT, IMPORT, OUTSIDE),
        (REVERT, IMPORT, OUTSIDE, APPLY, INSIDE, REVERT, REVERT, OUTSIDE),
        pytest.param(
            (APPLY, IMPORT, REVERT, APPLY, INSIDE, REVERT, OUTSIDE), marks=pytest.mark.slow
        ),
        pytest.param(
            (IMPORT, APPLY, REVERT, APPLY, INSIDE, REVERT, OUTSIDE), marks=pytest.mark.slow
        ),
    ],
)
def test_import_order_does_not_matter(run, order):
    run("\n".join([*order, END]))


def test_tensor_type_answers_megatron_and_others_differently(run):
    run("""
    asked = {}
    for name in ("megatron.core.optimizer.optimizer", "megatron_hdp.megatron.model", "__main__"):
        space = {"__name__": name}
        exec("def ask(tensor, *args): return tensor.type(*args)", space)
        asked[name] = space["ask"]
    megatron, ours, others = asked.values()
    full, half, whole = torch.zeros(1), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1).long()
    before = [ask(x) for ask in (ours, others) for x in (full, half, whole)]
    with shim.applied():
        assert megatron(full) == megatron(full.double()) == "torch.cuda.FloatTensor"
        assert megatron(half) == "torch.cuda.BFloat16Tensor"
        assert megatron(whole) == "torch.LongTensor"
        assert megatron(full, torch.float64).dtype == torch.float64
        assert [ask(x) for ask in (ours, others) for x in (full, half, whole)] == before
    assert megatron(full) == "torch.FloatTensor"
    """)


def test_revert_refuses_when_somebody_replaced_after_us(run):
    run("""
    import megatron.core.utils as utils
    shim.apply()
    ours, utils.torch = utils.torch, "theirs"
    try:
        shim.revert()
    except RuntimeError as error:
        assert "megatron.core.utils.torch" in str(error), error
    else:
        raise SystemExit("reverted over somebody else's change")
    assert shim.is_active() and "cuda" in vars(torch.Tensor)
    utils.torch = ours
    shim.revert()
    assert utils.torch is torch and left_behind() == []
    """)


def test_a_missing_target_refuses_as_a_whole(run):
    run("""
    import megatron.core.tensor_parallel.random as rng
    finders, function = list(sys.meta_path), rng._set_cuda_rng_state
    del rng._set_cuda_rng_state
    try:
        shim.apply()
    except RuntimeError as error:
        assert "_set_cuda_rng_state" in str(error), error
    else:
        raise SystemExit("applied without its target")
    assert not shim.is_active() and sys.meta_path == finders
    assert left_behind() == [] and "cuda" not in vars(torch.Tensor)
    """)


def test_experts_meet_a_cpu(run):
    run("""
    from unittest import mock
    import megatron.core.transformer.moe.moe_utils as utils
    import megatron.core.transformer.moe.token_dispatcher as dispatchers
    dispatcher = dispatchers.MoEAlltoAllTokenDispatcher
    defined = hasattr(utils, "te_general_gemm")  # by Megatron itself, from 0.17 on
    with shim.applied():
        assert utils.te_general_gemm is None
        assert isinstance(dispatcher.cuda_dtoh_stream, stand_in.NoStream)
        inside = sys.modules["megatron.core.tensor_parallel.mappings"].torch.distributed
        with mock.patch.object(torch.distributed, "all_to_all_single") as exchange:
            inside.all_to_all_single(1, 2, input_split_sizes=torch.tensor([3, 4]), group=5)
            inside.all_to_all_single(1, 2, [6], [7])
        first, second = exchange.call_args_list
        assert first == mock.call(1, 2, None, [3, 4], group=5)
        assert second == mock.call(1, 2, [6], [7])
    assert hasattr(utils, "te_general_gemm") == defined
    assert dispatcher.cuda_dtoh_stream is None
    import importlib
    with shim.applied():
        importlib.reload(utils)
        assert utils.te_general_gemm is None
    assert hasattr(utils, "te_general_gemm") == defined
    """)


def test_routers_stay_in_double_precision_only_where_they_are(run):
    run("""
    import megatron.core.transformer.moe.moe_utils as utils
    logits = torch.randn(5, 4, dtype=torch.float64)
    expected = torch.zeros(5, 4, dtype=torch.float64)
    top = logits.topk(2)
    expected.scatter_(1, top.indices, top.values.softmax(-1))
    def distance(logits):
        probs, _ = utils.topk_routing_with_score_function(logits, 2)
        assert probs.dtype == logits.dtype
        return (probs - expected).abs().max().item()
    assert 1e-10 < distance(logits) < 1e-6
    with shim.applied():
        assert distance(logits) < 1e-15
        assert utils.torch.softmax(logits, -1, dtype=torch.bfloat16).dtype == torch.bfloat16
        half = utils.torch.softmax(logits.bfloat16(), dim=-1, dtype=torch.float32)
        assert half.dtype == torch.float32
    """)


def test_refuses_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(RuntimeError, match="is_available"):
        shim.apply()
    assert not shim.is_active()
    assert "cuda" not in vars(torch.Tensor)


def test_the_checks_see_a_module_that_kept_the_stand_in(run):
    with pytest.raises(AssertionError, match="megatron.core.utils"):
        run("""
        import megatron.core.utils as utils
        shim.apply()
        copy = utils.torch
        shim.revert()
        utils.copy = copy
        assert left_behind() == [], left_behind()
        """)


def test_redirects_name_every_global_replacement():
    text = " ".join(shim.REDIRECTS)
    names = "Tensor.cuda Tensor.float Tensor.type Tensor.record_stream Module.cuda softmax"
    names += " all_to_all_single all_gather reduce_scatter te_general_gemm cuda_dtoh_stream"
    assert not [name for name in names.split() if name not in text]
