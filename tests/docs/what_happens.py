"""Which tests show what the table in docs/failures.md says, row by row."""

SURVIVAL = "tests/training/test_survival.py::"
LOST = "tests/training/test_lost_rank.py::"
LOST_NODE = "tests/training/test_lost_node.py::"
ERRORS = "tests/training/test_pretrain_errors.py::"
MISHAPS = "tests/training/test_mishaps.py::"
DAMAGED = "tests/training/test_damaged_checkpoint.py::"
CHECKPOINT = "tests/training/test_checkpoint.py::"
PLANE = "tests/data_plane/test_faults.py::"
NODES = "tests/training/test_data_plane_lost.py::"
RUN_FOLDER = "tests/megatron/checkpoint/test_run_folder.py::"

SHOWN_BY = {
    "a flag, a file or the data is wrong": (
        f"{ERRORS}test_a_bad_flag_is_refused",
        f"{ERRORS}test_bad_data_is_refused",
    ),
    "a process was not started as a rank, or its job's port is in use": (
        "tests/megatron/test_joining.py::test_without_torchrun_it_says_how_to_start",
        "tests/megatron/test_joining.py::test_a_port_in_use_is_named",
    ),
    "ranks got different flags, data or cost models": (
        "tests/megatron/step/test_disagreement.py::test_other_data",
        "tests/megatron/step/test_disagreement.py::test_other_flags",
        "tests/megatron/step/test_disagreement.py::test_another_cost_model",
    ),
    "a rank dies": (f"{SURVIVAL}test_a_rank_that_fails_is_named_and_all_end",),
    "a rank dies, with [`--hdp-survive`](lost-rank.md)": (f"{LOST}test_a_rank_dies",),
    "the same beside an asynchronous save (`--async-save`)": (
        "tests/training/test_lost_saves.py::test_a_save_under_way_is_made_again",
    ),
    "a node is lost, with `--hdp-survive`": (f"{LOST_NODE}test_a_host_is_lost_and_comes_back",),
    "a node stood still, or was cut off, meanwhile": (
        f"{LOST_NODE}test_a_host_that_stood_still_writes_nothing",
    ),
    "SIGTERM to the agent of one node, with `--hdp-survive`": (
        f"{LOST_NODE}test_a_host_that_is_drained_leaves_behind_its_step",
    ),
    "the first node's agent dies, or its node": (
        "tests/launching/test_nodes.py::test_all_end_with_the_first_agent",
    ),
    "a rank or a node is lost, and too few ranks are left": (
        f"{LOST}test_too_few_are_left",
        f"{LOST_NODE}test_the_only_host_is_drained_while_a_rank_is_lost",
    ),
    "a rank dies before the first step": (
        f"{SURVIVAL}test_a_rank_that_dies_at_the_start_is_named",
    ),
    "a rank raises an exception": (
        f"{SURVIVAL}test_a_rank_that_fails_is_named_and_all_end",
        f"{SURVIVAL}test_an_exception_is_printed_under_torchrun",
    ),
    "a rank gets slow, with [`--hdp-online`](online.md)": (
        "tests/megatron/step/test_learning.py::test_a_slow_rank_is_found_and_its_work_moves",
    ),
    "a rank hangs, or all ranks wait for each other": (
        f"{SURVIVAL}test_a_rank_that_fails_is_named_and_all_end",
        "tests/runtime/health/test_heartbeat.py::test_ranks_that_wait_for_each_other_end",
    ),
    "torchrun is killed": (
        "tests/training/test_left_behind.py::test_nothing_outlives_a_launcher_that_is_killed",
    ),
    "the loss is NaN or infinite": (
        "tests/training/test_non_finite.py::test_the_micro_batch_is_named_and_weights_stay",
    ),
    "a gradient is NaN or infinite": (
        "tests/training/test_non_finite.py::test_the_micro_batch_is_named_and_weights_stay",
        "tests/training/test_non_finite.py::test_all_ranks_stop",
    ),
    "SIGTERM, SIGUSR1 or Ctrl-C to any rank": (
        f"{SURVIVAL}test_a_signal_to_one_rank_saves_and_ends_all",
        f"{SURVIVAL}test_torchrun_passes_a_signal_on",
    ),
    "the same before the first step": (f"{SURVIVAL}test_a_signal_before_the_first_step_ends_all",),
    "Ctrl-C a second time": (
        "tests/runtime/health/test_signals.py::test_a_second_interrupt_ends_the_process",
    ),
    "a document is corrupt": (
        f"{MISHAPS}test_corrupt_documents_are_skipped_alike_on_any_ranks",
        f"{MISHAPS}test_too_many_corrupt_documents_in_a_row",
    ),
    "a run, or `megatron-hdp data prepare`, is killed while it tokenises": (
        "tests/data/prepare/test_resume.py::test_a_killed_run_is_continued",
    ),
    "two jobs tokenise the same source": (
        "tests/data/prepare/test_resume.py::test_processes_at_the_same_time_make_it_once",
        "tests/test_files.py::test_who_waits_says_so_and_gives_up",
    ),
    "the disk is full while a source is tokenised": (
        "tests/data/prepare/test_resume.py::test_a_full_disk",
    ),
    "the planner fails": (
        f"{MISHAPS}test_a_failing_planner_costs_balance_only",
        f"{MISHAPS}test_a_planner_that_fails_twice_in_a_row_is_fatal",
    ),
    "a file that is tokenised on the fly changes or is gone": (
        "tests/data/on_the_fly/test_places.py::test_a_file_that_changes_is_named",
    ),
    "too much of a source that is tokenised on the fly is bad": (
        "tests/data/on_the_fly/test_decoder.py::test_too_many_bad_records_are_an_error",
    ),
    "a loader of the [data plane](data-plane.md) dies": (
        f"{PLANE}test_a_loader_the_planner_and_the_constructor_die",
        f"{PLANE}test_a_source_without_a_shadow_waits_for_its_loader",
        f"{PLANE}test_text_that_is_tokenised_on_the_fly_survives_its_loaders",
    ),
    "the data plane's planner or a constructor dies": (
        f"{PLANE}test_a_loader_the_planner_and_the_constructor_die",
        f"{PLANE}test_random_kills",
    ),
    "the data plane of a node is lost: its host, or Ray": (
        f"{PLANE}test_what_never_comes_back_is_told_at_once",
        f"{NODES}test_a_node_is_lost_and_the_run_goes_on_without_it",
    ),
    "a source gives the data plane no tokens for `timeout-s`": (
        "tests/data_plane/test_asker.py::test_a_source_that_gives_nothing_is_named",
    ),
    "the same, or its file changes or is gone, with `on-failure: go-on-without`": (
        "tests/training/test_data_plane_lost.py::test_a_source_that_hangs",
        "tests/data_plane/roles/test_failures.py::test_one_node_cannot_read_and_both_go_on_without",
    ),
    "a `.bin` is cut while training reads it": (
        "tests/training/test_changed_data.py::test_a_bin_that_is_cut_ends_the_run_with_its_name",
    ),
    "a `.bin` differs between ranks, or from the one that a resumed run had": (
        "tests/megatron/step/test_disagreement.py::test_other_tokens_under_the_same_index",
        "tests/training/test_changed_data.py::test_another_bin_under_the_same_idx_is_not_resumed",
    ),
    "`megatron-hdp` gets Ctrl-C, SIGTERM or SIGHUP": (
        "tests/cli/test_preprocess.py::test_a_signal_leaves_nothing",
    ),
    "the metrics file cannot be written": (
        "tests/training/test_metrics.py::test_a_path_that_cannot_be_written_is_refused_at_once",
        "tests/training/test_metrics.py::test_a_full_disk_is_named",
    ),
    "`--save` cannot be written": (
        f"{ERRORS}test_a_place_that_cannot_take_checkpoints_is_refused_before_training",
    ),
    "the disk is full while saving": (
        f"{CHECKPOINT}test_a_full_disk_ends_the_run_and_leaves_the_old_checkpoint",
        "tests/training/test_lost_saves.py::test_a_full_disk_behind_a_death_ends_the_job",
    ),
    "a weight is NaN or infinite when it is to be saved": (
        f"{DAMAGED}test_weights_that_are_not_finite_are_not_saved",
    ),
    "the job is killed while it saves": (
        "tests/megatron/checkpoint/test_folder.py::test_a_kill_leaves_the_old_or_the_new_checkpoint",
        "tests/training/test_kills.py::test_a_kill_at_every_change",
    ),
    "a checkpoint is damaged": (
        f"{DAMAGED}test_a_damaged_file_is_named_on_every_rank",
        "tests/cli/test_verify.py::test_the_latest_is_damaged",
    ),
    "the file that names the latest checkpoint is lost or garbage": (
        f"{DAMAGED}test_a_lost_tracker_is_no_new_beginning",
        f"{RUN_FOLDER}test_a_garbage_tracker_is_named_at_the_start",
    ),
    "a checkpoint of an older release is resumed": (
        "tests/training/test_changed_data.py::test_a_run_of_an_older_release_keeps_its_order",
        f"{DAMAGED}test_an_older_checkpoint_loads_and_that_is_said_once",
    ),
    "`--save` holds another run's checkpoints": (
        f"{RUN_FOLDER}test_a_new_run_is_refused_by_a_folder_that_holds_another",
    ),
    "another job saves into the same folder": (
        f"{DAMAGED}test_a_second_job_is_refused_before_it_trains",
    ),
    "a job was suspended, and another one has taken its folder over": (
        f"{RUN_FOLDER}test_who_was_followed_by_another_job_publishes_nothing",
    ),
}
