"""What is measured as experts: routers and routed experts, of the layers that have them."""

from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from megatron_hdp.megatron import parallel
from megatron_hdp.megatron.model import building
from megatron_hdp.megatron.options import model_shape
from megatron_hdp.megatron.step import setup
from megatron_hdp.profile.cases import EXPERTS, Case
from megatron_hdp.profile.measuring import Bench
from megatron_hdp.runtime.timeline import Timeline
from tests.support.gradients import VOCABULARY, moe_arguments, write_corpus

TOKENS = 24


def measured(arguments):
    """Body of a rank: operations instead of seconds."""
    parallel.initialise(arguments)
    parallel.set_seeds(1)
    chunks = building.build_chunks(arguments, VOCABULARY)
    bench = Bench(arguments, setup.build_executor(arguments, chunks, Timeline()), VOCABULARY)
    with mock.patch.object(Bench, "_timed", lambda self, run: operations_of(run)):
        return bench._experts_s(Case(EXPERTS, (TOKENS,)))


class Counter(TorchDispatchMode):
    """Adds up what PyTorch says of each matrix product."""

    total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            self.total += flop_registry[func._overloadpacket](*args, out_val=out)
        return out


def operations_of(run):
    with Counter() as counter:
        run()
    return counter.total


def test_neither_shared_experts_nor_dense_layers_count(run_ranks, tmp_path):
    more = {"num_layers": 3, "moe_layer_freq": "[0]+[1]*2"}
    more |= {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True}
    stages = {"pipeline_model_parallel_size": 2, "decoder_first_pipeline_num_layers": 2}
    prefix = write_corpus(tmp_path, [TOKENS])
    for ranks, layout in ((1, {}), (2, stages)):
        arguments = moe_arguments(prefix, **more | layout)
        shape = model_shape(arguments, 0)
        routers = 2 * arguments.hidden_size * arguments.num_experts
        met = shape.expert_parameters + routers
        assert run_ranks(ranks, measured, arguments) == [6 * TOKENS * met] * ranks
