"""Which test runs each command that the docs show."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Here:
    """tests/docs/test_commands.py runs it; of training, slow tests do, others try the flags."""

    how: str


@dataclass(frozen=True)
class Elsewhere:
    """Another test runs it, perhaps with other figures; some need what not every machine has."""

    test: str
    needs: str = ""


@dataclass(frozen=True)
class NotHere:
    """No test runs it."""

    why: str


CI = Elsewhere(".ci/run")
TRAINS = Here("train")
COMMAND = Here("command")
IN_A_CHECKOUT = "megatron_lm"
TRAIN = (
    "torchrun --nproc-per-node {} -m megatron_hdp.pretrain_gpt --config configs/tiny-cpu.yaml "
    "--hybrid-data-parallel --data-path data/corpus {}"
)
DATA_PLAN = "megatron-hdp data plan mix.yaml --steps 60 --hdp-global-batch-tokens 2048"
SIMULATE = (
    "megatron-hdp simulate --config configs/bytescale/llama-7b-2m.yaml --gpus 1024 --data "
    "preset:byted --strategies static,naive,auto --steps 3"
)
SAVING = "--save checkpoints --load checkpoints --save-interval 2"

COMMANDS = {
    "./scripts/quickstart.sh": Elsewhere("tests/scripts/test_quickstart.py::test_quickstart"),
    "NPROC=2 ./scripts/quickstart.sh": Elsewhere(
        "tests/scripts/test_quickstart.py::test_quickstart"
    ),
    "python scripts/examples/quickstart/simulated.py runs/quickstart": Elsewhere(
        "tests/scripts/test_quickstart.py::test_quickstart"
    ),
    TRAIN.format(4, "").replace("corpus ", "pairs.jsonl ")
    + "--hdp-objective dpo --hdp-long-sequence error --pretrained-checkpoint checkpoints "
    "--hdp-reference-checkpoint checkpoints --metrics-path metrics.jsonl": Elsewhere(
        "tests/training/test_preference.py::test_a_run_and_its_reference"
    ),
    "./scripts/tutorial.sh": Elsewhere(
        "tests/scripts/test_tutorial.py::test_the_tutorial", needs="slow"
    ),
    "./scripts/test.sh": CI,
    "./scripts/docs.sh": CI,
    "./scripts/test.sh smoke": NotHere("a selection of what ./scripts/test.sh runs"),
    "./scripts/test.sh all": NotHere("hours; the same script as without the word"),
    "./scripts/test.sh tests/planner -x": NotHere("the same script on some of the tests"),
    "python -m pip install --no-build-isolation '.[verl]'": NotHere(
        "needs verl; tests/verl/test_plugin.py reads the entry point that it installs"
    ),
    "python -m pip install megatron-bridge==0.6.2": NotHere(
        "gigabytes for GPUs; tests/bridge/loop.py says what to install where there is none"
    ),
    "export VERL_ENGINE_VENDOR=hdp": Elsewhere(
        "tests/verl/test_engine.py::test_losses_and_gradients_are_those_of_one_rank", needs="slow"
    ),
    "python -m pip install '.[plot,tensorboard]'": NotHere(
        "it would install over what is tested; scripts/_env.sh installs the same before CI's tests"
    ),
    "megatron-hdp launch --nproc-per-node 4 -m megatron_hdp.pretrain_gpt --config "
    "configs/tiny-cpu.yaml --hybrid-data-parallel --hdp-survive": Elsewhere(
        "tests/training/test_lost_rank.py::test_the_command_replaces_a_rank", needs="slow"
    ),
    "megatron-hdp launch --nnodes 2 --node-rank 0 --rdzv-endpoint node0:29500 --nproc-per-node 8 "
    "-m megatron_hdp.pretrain_gpt --config my.yaml --hybrid-data-parallel --hdp-survive": Elsewhere(
        "tests/training/test_lost_node.py::test_a_host_is_lost_and_comes_back", needs="slow"
    ),
    "megatron-hdp launch --nproc-per-node 4 -m megatron_hdp run pretrain_gpt.py "
    "--hybrid-data-parallel --hdp-survive --hdp-tokens-per-rank 8192 ...": Elsewhere(
        "tests/megatron/lm/test_lost_rank.py::test_the_command_loses_a_rank",
        needs="megatron_lm slow",
    ),
    "megatron-hdp doctor": Elsewhere(
        "tests/megatron/doctor/test_doctor.py::test_training_can_run_here"
    ),
    "megatron-hdp doctor --clean-up": Elsewhere(
        "tests/megatron/doctor/test_doctor.py::test_what_dead_jobs_left_behind_is_shown_and_removed"
    ),
    "cd Megatron-LM; megatron-hdp doctor": Elsewhere(
        "tests/megatron/lm/test_checkout.py::test_every_patch_is_listed_with_its_reason_and_what_does_not_fit"
    ),
    "megatron-hdp preprocess --input corpus.jsonl --tokenizer byte --output-prefix data/corpus": (
        COMMAND
    ),
    "megatron-hdp plan --lengths data/corpus.idx --ranks 16 --tokens-per-rank 8192 "
    "--max-length 65536": COMMAND,
    "megatron-hdp plan --lengths docs/example-lengths.txt --ranks 16 --tokens-per-rank 8192": (
        COMMAND
    ),
    "megatron-hdp plan --lengths docs/example-lengths.txt --ranks 16 --tokens-per-rank 8192 "
    "--output plan.json --plot plan.png --trace trace.json": COMMAND,
    "megatron-hdp plan --lengths preset:github --ranks 64 --tokens-per-rank 32768 "
    "--pipeline-stages 8 --sequence-parts 16": COMMAND,
    "megatron-hdp plan --items docs/example-sizes.txt --ranks 256 --compare": COMMAND,
    "megatron-hdp check configs/qwen3-vl-8b.yaml --gpus 64 --items docs/example-sizes.txt": COMMAND,
    "megatron-hdp plan --lengths preset:github --ranks 64 --tokens-per-rank 8192 --compare": (
        COMMAND
    ),
    "torchrun --nproc-per-node 2 -m megatron_hdp.profile --config configs/tiny-cpu.yaml "
    "--output cost-model.json --picture profile.png": Elsewhere(
        "tests/profile/test_profile.py::test_two_ranks_tell_what_the_fit_has_not_seen",
        needs="slow",
    ),
    "megatron-hdp profile --config configs/tiny-cpu.yaml --output cost-model.json": Elsewhere(
        "tests/profile/test_profile.py::test_one_process", needs="slow"
    ),
    "megatron-hdp plan --lengths docs/example-lengths.txt --ranks 16 --tokens-per-rank 8192 "
    "--cost-model cost-model.json": Elsewhere(
        "tests/profile/test_profile.py::test_one_process", needs="slow"
    ),
    "torchrun --nproc-per-node 2 -m megatron_hdp.pretrain_gpt --config configs/tiny-cpu.yaml "
    "--hybrid-data-parallel --hdp-data mix.yaml": Elsewhere(
        "tests/training/test_mixture.py::test_a_mixture_follows_the_loss_and_a_run_goes_on_exactly"
    ),
    "megatron-hdp data prepare mix.yaml": COMMAND,
    "megatron-hdp data describe mix.yaml": COMMAND,
    "megatron-hdp data top": Elsewhere(
        "tests/cli/data_commands/test_top.py::test_a_plane_that_runs_is_shown"
    ),
    "megatron-hdp data top --json --once": Elsewhere(
        "tests/cli/data_commands/test_top.py::test_json_is_one_object"
    ),
    f"{DATA_PLAN} --output plan.json": COMMAND,
    "megatron-hdp simulate --config configs/bytescale/llama-7b-256k.yaml --gpus 1024 --data "
    "preset:byted --strategies static,naive,bytescale,dynamic-cp,auto --steps 3 --output "
    "report.json -- --hdp-offload off": COMMAND,
    "megatron-hdp simulate --config configs/bytescale/llama-7b-256k.yaml --gpus 1024 --data "
    "preset:byted --strategies auto --steps 1 --mtbf 7.9 --restart-minutes 5 -- --hdp-offload "
    "off": COMMAND,
    f"{SIMULATE} --report report.html --report report.png": COMMAND,
    f"{SIMULATE} --noise 0.1 --slow 7:0.8": COMMAND,
    "megatron-hdp simulate --config configs/bytescale/llama-7b-2m.yaml --gpus 1024 --data "
    "preset:byted --steps 2 --noise 0.05 --slow 7:0.5": COMMAND,
    "megatron-hdp plan --lengths preset:github --ranks 64 --tokens-per-rank 8192 "
    "--model mistral-8x7b --expert-parallel-size 8": COMMAND,
    "megatron-hdp check configs/bytescale/llama-7b-256k.yaml --gpus 1024": COMMAND,
    "./scripts/tuned_llama.sh": Elsewhere(
        "tests/scripts/test_tuned_llama.py::test_the_tutorial", needs="slow"
    ),
    "./scripts/charts_qwen.sh": Elsewhere(
        "tests/scripts/test_charts_qwen.py::test_the_tutorial", needs="slow"
    ),
    "./scripts/longer_llama.sh": Elsewhere(
        "tests/scripts/test_longer_llama.py::test_the_tutorial", needs="slow"
    ),
    "megatron-hdp convert --from-hf Llama-3.1-8B --to weights --config llama.yaml": Elsewhere(
        "tests/convert/test_command.py::test_as_documented"
    ),
    "megatron-hdp convert --from weights --to-hf Llama-3.1-8B-again": Elsewhere(
        "tests/convert/test_command.py::test_as_documented"
    ),
    "megatron-hdp verify checkpoints": Elsewhere(
        "tests/cli/test_verify.py::test_the_latest_is_damaged"
    ),
    "python scripts/benchmarks/bench_data.py": Elsewhere(
        "tests/scripts/benchmarks/test_bench_data.py::test_a_small_run", needs="slow"
    ),
    "python scripts/benchmarks/bench_data.py --tables 1000000 50000000 200000000 "
    "--sparse 1000000000": (
        Elsewhere(
            "tests/scripts/benchmarks/test_bench_data.py::test_a_small_run_of_tables", needs="slow"
        )
    ),
    "python scripts/benchmarks/bench_data_plane.py memory": Elsewhere(
        "tests/scripts/benchmarks/test_bench_data_plane.py::test_memory", needs="slow"
    ),
    "python scripts/benchmarks/bench_data_plane.py speed": Elsewhere(
        "tests/scripts/benchmarks/test_bench_data_plane.py::test_speed", needs="slow"
    ),
    "python scripts/benchmarks/bench_data_plane.py recovery --kills 5 --token-us 10": Elsewhere(
        "tests/scripts/benchmarks/test_bench_data_plane.py::test_recovery", needs="slow"
    ),
    "torchrun --nproc-per-node 2 scripts/examples/own_loop/train.py": Elsewhere(
        "tests/scripts/examples/test_own_loop.py::test_any_number_of_ranks_trains_alike", "slow"
    ),
    "torchrun --nproc-per-node 2 scripts/examples/own_loop/preference.py": Elsewhere(
        "tests/scripts/examples/test_own_loop.py::test_any_number_of_ranks_trains_alike", "slow"
    ),
    "torchrun --nproc-per-node 2 scripts/examples/own_loop/pictures.py": Elsewhere(
        "tests/scripts/examples/test_own_loop.py::test_any_number_of_ranks_trains_alike", "slow"
    ),
    TRAIN.format(4, "--metrics-path metrics.jsonl"): TRAINS,
    TRAIN.format(4, "--metrics-path metrics.jsonl --hdp-cost-model online"): TRAINS,
    TRAIN.format(8, "--pipeline-model-parallel-size 2"): TRAINS,
    TRAIN.format(4, f"--metrics-path metrics.jsonl {SAVING} --async-save"): TRAINS,
    TRAIN.format(6, f"--metrics-path metrics.jsonl {SAVING}"): TRAINS,
    "torchrun --nproc-per-node 2 -m megatron_hdp.pretrain_gpt --hybrid-data-parallel "
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 4096 "
    "--attention-dropout 0 --hidden-dropout 0 --train-iters 6 --lr 1e-3 --data-path corpus "
    "--split 1,0,0 --global-batch-size 3000 --hdp-tokens-per-rank 8192 --metrics-path m.jsonl": (
        TRAINS
    ),
    "torchrun --nproc-per-node 8 -m megatron_hdp run pretrain_gpt.py --hybrid-data-parallel "
    "--hdp-tokens-per-rank 8192 --global-batch-size 512 --attention-dropout 0 "
    "--data-path data/corpus ...": Elsewhere(
        "tests/megatron/lm/test_training.py::test_two_ranks_have_the_losses_of_one",
        needs=IN_A_CHECKOUT,
    ),
    "git apply --unidiff-zero .../patches/megatron-lm/core_v0.19.0.patch": Elsewhere(
        "tests/megatron/lm/test_patch_files.py::test_it_applies_and_activates_first_of_all",
        needs=IN_A_CHECKOUT,
    ),
    "torchrun --nproc-per-node 8 pretrain_gpt.py --hybrid-data-parallel "
    "--hdp-tokens-per-rank 8192 ...": Elsewhere(
        "tests/megatron/lm/test_training.py::test_a_patched_checkout_is_the_same_run",
        needs=f"{IN_A_CHECKOUT} slow",
    ),
    "python scripts/dev/plot_lost_rank.py traces/steps-2-60.json lost-rank.png": Elsewhere(
        "tests/training/test_lost_rank.py::test_lost_ranks_are_replaced", needs="slow"
    ),
    "python scripts/dev/plot_trace.py traces/steps-5-7.json step-5.png 5": Elsewhere(
        "tests/scripts/dev/test_plots.py::test_a_traced_step_is_drawn_and_another_is_refused"
    ),
    "DRY_RUN=1 CONFIG=configs/tiny-cpu.yaml ./scripts/slurm/pretrain.sbatch": Here("dry_run"),
    "CONFIG=configs/tiny-cpu.yaml sbatch scripts/slurm/pretrain.sbatch --data-path data/corpus": (
        Elsewhere(
            "tests/slurm/test_pretrain_on_slurm.py::test_a_warning_saves_and_queues_again",
            needs="slow",
        )
    ),
    TRAIN.format(4, "--hdp-loaders ray"): Elsewhere(
        "tests/training/test_data_plane.py::test_the_same_run", needs="slow"
    ),
    "DRY_RUN=1 CONFIG=configs/tiny-cpu.yaml ./scripts/slurm/data_plane.sbatch": Elsewhere(
        "tests/slurm/test_pretrain_script.py::test_the_documented_way_from_the_repository"
    ),
    "DRY_RUN=1 CONFIG=configs/tiny-cpu.yaml ./scripts/slurm/survive.sbatch": Elsewhere(
        "tests/slurm/test_pretrain_script.py::test_the_documented_way_from_the_repository"
    ),
    "CONFIG=configs/tiny-cpu.yaml sbatch scripts/slurm/data_plane.sbatch --data-path data/corpus": (
        NotHere("it becomes pretrain.sbatch with one flag more, as its tests show")
    ),
    "./scripts/gpu_wheels.sh wheels": NotHere("it downloads wheels of another platform"),
    "./scripts/gpu_check.sh --wheels wheels": Elsewhere(
        "tests/scripts/gpu/test_gpu_check.py::test_wheels_are_taken_without_an_index"
    ),
    "./scripts/gpu_check.sh --only questions": Elsewhere(
        "tests/scripts/gpu/test_gpu_check.py::test_some_parts_only"
    ),
    "MEGATRON_LM_PATH=~/Megatron-LM ./scripts/gpu_check.sh --only checkout": Elsewhere(
        "tests/scripts/gpu/test_gpu_check.py::test_some_parts_only"
    ),
    "./scripts/gpu_check.sh --cpu": Elsewhere(
        "tests/scripts/gpu/test_gpu_check.py::test_the_whole_flow_on_a_cpu", needs="slow"
    ),
    "/usr/bin/time -v megatron-hdp plan --lengths lengths.txt --ranks 1024 "
    "--tokens-per-rank 8192": Elsewhere(
        "tests/cli/test_plan_memory.py::test_ten_million_sequences", needs="slow"
    ),
    "python scripts/benchmarks/bench_preprocess.py --megatron-lm Megatron-LM --rounds 5": Elsewhere(
        "tests/scripts/benchmarks/test_bench_preprocess.py::test_beside_megatrons_own_tool",
        needs=f"{IN_A_CHECKOUT} slow",
    ),
    "python scripts/benchmarks/bench_lost_rank.py --seconds 130": Elsewhere(
        "tests/scripts/benchmarks/test_bench_lost_rank.py::test_a_small_run", needs="slow"
    ),
    "python scripts/benchmarks/bench_survive.py --blocks 16 --block 8": Elsewhere(
        "tests/scripts/benchmarks/test_bench_survive.py::test_a_small_run", needs="slow"
    ),
    "python scripts/benchmarks/bench_preference.py": Elsewhere(
        "tests/scripts/benchmarks/test_bench_preference.py::test_a_small_run", needs="slow"
    ),
    "python scripts/benchmarks/bench_verl.py": Elsewhere(
        "tests/scripts/benchmarks/test_bench_verl.py::test_a_small_run", needs="slow"
    ),
    "python scripts/benchmarks/bench_planner.py --strategies dp-balance "
    "--latency 15 25 10": Elsewhere(
        "tests/scripts/benchmarks/test_bench_planner.py::test_a_run_with_latency_and_noise"
    ),
    "python scripts/benchmarks/bench_planner.py --strategies static dp-balance "
    "--noise 5 10": Elsewhere(
        "tests/scripts/benchmarks/test_bench_planner.py::test_a_run_with_latency_and_noise"
    ),
    "python scripts/benchmarks/bench_planner.py --pipelines": Elsewhere(
        "tests/scripts/benchmarks/test_bench_pipelines.py::test_a_run_of_pipelines"
    ),
    "python scripts/benchmarks/bench_planner.py --pipelines --experts": Elsewhere(
        "tests/scripts/benchmarks/test_bench_pipelines.py"
        "::test_pipelines_that_share_experts_are_judged_in_lockstep"
    ),
    "python scripts/benchmarks/bench_planner.py --experts --strategies dp-balance auto "
    "--seeds 2": Elsewhere(
        "tests/scripts/benchmarks/test_bench_planner.py::test_cases_of_experts_are_judged_in_lockstep"
    ),
    "python scripts/benchmarks/bench_planner.py --step --cases github-N1024-C8K "
    "github-N16384-C8K": Elsewhere(
        "tests/scripts/benchmarks/test_bench_planner.py::test_the_step_of_a_rank", needs="slow"
    ),
    "python scripts/benchmarks/bench_planner.py --seeds 3 --json bench.json": Elsewhere(
        "tests/scripts/benchmarks/test_bench_planner.py::test_a_run_from_the_command_line"
    ),
    "python scripts/benchmarks/bench_planner.py --strategies static dynamic-cp auto "
    "--cases 'github-N64-*K' 'byted-N64-*K' '*-N1024-*'": Elsewhere(
        "tests/scripts/benchmarks/test_bench_planner.py::test_a_run_from_the_command_line"
    ),
    "python scripts/benchmarks/bench_planner.py --pipelines --strategies static dynamic-cp auto "
    "--cases '*-N64-C8K-P4' '*-N256-C8K-P4'": Elsewhere(
        "tests/scripts/benchmarks/test_bench_planner.py::test_a_run_from_the_command_line"
    ),
    "megatron-hdp plan --lengths preset:github --ranks 64 --tokens-per-rank 8192 "
    "--strategy dynamic-cp": COMMAND,
    "python scripts/benchmarks/reproduce_bytescale.py": Elsewhere(
        "tests/scripts/benchmarks/test_reproduce_bytescale.py::test_a_cell_again"
    ),
    "python scripts/benchmarks/reproduce_overlord.py": Elsewhere(
        "tests/scripts/benchmarks/test_reproduce_overlord.py::test_it_prints_its_tables"
    ),
    "python scripts/gpu/bench_loss.py --device cpu --small": Elsewhere(
        "tests/scripts/gpu/test_gpu_benches.py::test_a_small_run", needs="slow"
    ),
}
"""Every command on every page, on one line."""
