"""The test of a module is found by its name: in a file of that name in the same folder, or in the table below."""

from __future__ import annotations

import fnmatch
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE, TESTS = ROOT / "jupyter_distrib", ROOT / "tests"

TESTED_IN = {
    "agent/test_admission.py": "server/pending_cell",
    "agent/test_devices.py": "agent/launch_rank",
    "agent/test_forkservers.py": "agent/fork_orders worker/forkserver",
    "agent/test_gpu_inventory.py": "agent/nvml",
    "agent/test_group_repair.py": "agent/settling server/drain_reports server/group_health",
    "agent/test_group_store.py": "agent/rank_table",
    "agent/test_install_packages.py": "agent/package_sync",
    "agent/test_other_gpus.py": "agent/torch_build",
    "agent/test_output.py": "agent/log_file",
    "agent/test_server.py": "server/server server/service server/watched_link system/launch",
    "agent/test_usage.py": "agent/usage_sampler",
    "checkpoints/test_checkpoints.py": "checkpoints/contents checkpoints/folder checkpoints/layout checkpoints/optimizers",
    "checkpoints/test_checkpoints_ranks.py": "checkpoints/foreground checkpoints/meeting checkpoints/share checkpoints/snapshot",
    "checkpoints/test_other_users.py": (
        "checkpoints/checks checkpoints/part checkpoints/place checkpoints/reader checkpoints/strict_metadata "
        "system/other_users"
    ),
    "checkpoints/test_periodic.py": "checkpoints/position checkpoints/schedule checkpoints/series",
    "compat/test_horovod_elastic.py": "compat/horovod/elastic compat/horovod/state",
    "compat/test_horovod_torch.py": "compat/horovod/*",
    "compat/test_launchers.py": "compat/horovod_* compat/launching compat/on_ranks compat/torch_distributor",
    "compat/test_seed_notebooks.py": "compat/serverless_gpu compat/serverless_gpu_runtime",
    "compat/test_spark_lines.py": "compat/spark/entry compat/spark/lines",
    "compat/test_spark_log_server.py": "compat/spark/log_server",
    "compat/test_stand_ins.py": "compat/databricks_air gpu_types system/stand_ins",
    "coordinator/test_file_sync.py": "coordinator/folder_listings coordinator/project_copy",
    "coordinator/test_placement.py": "coordinator/node_source",
    "coordinator/test_relay.py": "coordinator/relay_inbox",
    "coordinator/test_remote_node.py": (
        "coordinator/delivery coordinator/engine coordinator/incoming_content coordinator/part_transfer"
    ),
    "coordinator/test_source_archive.py": "system/process_environment",
    "coordinator/test_worker_group.py": (
        "coordinator/allocation_end coordinator/log_collection coordinator/node_replacement coordinator/node_report coordinator/run "
        "coordinator/start_progress coordinator/watch server/worker_group"
    ),
    "deepspeed/test_distributor.py": "compat/deepspeed_distributor",
    "deepspeed/test_explicit.py": "libraries/deepspeed",
    "deepspeed/test_strategy.py": "strategies/deepspeed worker/autoparallel/engines",
    "frameworks/test_launching.py": "worker/pytorch/spawn_guard",
    "frameworks/test_loaders.py": "worker/autoparallel/loaders",
    "gpu_bed/test_choice.py": "agent/gpu_allocation agent/gpu_choice",
    "gpu_bed/test_hosts.py": "pools/command/host_gpus pools/command/host_report",
    "gpu_bed/test_leases.py": "agent/gpu_usage agent/idle_gpus",
    "kernel/capture/test_names.py": "kernel/capture/scope kernel/capture/syntax",
    "kernel/history/test_history.py": "kernel/history/*",
    "kernel/notebook/test_decorator.py": "kernel/session/cell_sources worker/standalone",
    "kernel/notebook/test_live_view.py": "kernel/notebook/widget_model",
    "kernel/notebook/test_magic.py": (
        "kernel/notebook/completion kernel/notebook/explain kernel/notebook/extension kernel/notebook/strategy_preview"
    ),
    "kernel/notebook/test_network_report.py": "worker/network_check",
    "kernel/notebook/test_status.py": (
        "kernel/notebook/line_magics kernel/notebook/pool_magic kernel/session/pool_manager wire/messages/status"
    ),
    "kernel/record/test_displays.py": "worker/matplotlib_backend",
    "kernel/record/test_failures.py": "kernel/record/stand_in_errors kernel/record/traceback_text",
    "kernel/record/test_record.py": (
        "kernel/record/clearing kernel/record/nested_progress kernel/record/rank_record kernel/record/run_facts "
        "kernel/record/terminal_*"
    ),
    "kernel/record/test_shares.py": "kernel/views/shares",
    "kernel/record/test_timeline.py": "kernel/views/timeline",
    "kernel/session/test_connections.py": "kernel/session/connection",
    "kernel/session/test_detached.py": "kernel/session/kernel_identity",
    "kernel/session/test_environment.py": "kernel/session/missing_modules",
    "kernel/session/test_gpu_variables.py": "system/load_time",
    "kernel/session/test_lost_runs.py": "kernel/session/saving system/last_seen",
    "kernel/session/test_notebook_packages.py": "system/distributions",
    "kernel/session/test_observers.py": "kernel/record/observer kernel/session/observed_runs",
    "kernel/session/test_run_queue.py": (
        "kernel/session/new_runs kernel/session/run kernel/session/run_clock "
        "kernel/session/run_start kernel/session/session"
    ),
    "kernel/session/test_selection.py": "kernel/session/worker_group",
    "kernel/session/test_trackers.py": "system/entry_points",
    "kernel/settings/test_cell_options.py": (
        "kernel/notebook/magic_requests kernel/settings/available kernel/settings/group_size kernel/settings/help kernel/settings/option_conflicts "
        "kernel/settings/written_options options"
    ),
    "kernel/settings/test_config_files.py": (
        "kernel/settings/find_files kernel/settings/pool_definitions kernel/settings/project_files "
        "kernel/settings/settings kernel/settings/trusted_files"
    ),
    "kernel/sidebar/test_bridge.py": "kernel/sidebar/broadcast kernel/sidebar/saved_runs",
    "kernel/views/test_html.py": (
        "kernel/views/chart kernel/views/inline_styles kernel/views/markup kernel/views/png kernel/views/sanitize_html"
    ),
    "kernel/views/test_state_delta.py": "kernel/views/state",
    "kernel/views/test_text.py": "kernel/views/folding system/formatting",
    "libraries/test_known.py": "libraries/*",
    "pools/command/test_command.py": "pools/ssh/command",
    "pools/command/test_connect.py": ("pools/command/bootstrap pools/command/channel pools/command/piped_relay"),
    "pools/command/test_contract.py": "pools/command/pool pools/command/serve",
    "pools/command/test_hosts.py": "pools/command/reservation",
    "pools/test_pools.py": "pools/base pools/inline/* pools/local testing/*",
    "pools/test_server_home.py": "server/socket_name",
    "system/test_confinement.py": "system/confinement_report",
    "pools/test_slurm_requests.py": "pools/slurm/requests",
    "pools/test_slurm_words.py": "pools/slurm/command pools/slurm/report",
    "pools/test_stepped_ranks.py": "pools/inline/stepped_run pools/inline/steps pools/inline/steps_view",
    "product/test_breakpoints.py": "worker/pytorch/patience",
    "product/test_confinement.py": "kernel/notebook/confinement_findings",
    "product/test_crashes.py": (
        "agent/rank agent/rank_connections agent/rank_notes agent/rank_process agent/run agent/worker_group errors "
        "system/crash_notes wire/endings"
    ),
    "product/test_debugger.py": (
        "agent/rank_debugger kernel/session/debug_prompt kernel/session/failure_examination kernel/session/prompts "
        "wire/messages/debugger worker/debugger worker/debugger_channel worker/kept_failure"
    ),
    "product/test_detach.py": "kernel/notebook/detached_view server/detached_runs",
    "product/test_diff.py": (
        "kernel/notebook/diff_magic kernel/session/rank_differences worker/autoparallel/value_digests"
    ),
    "product/test_export.py": "kernel/notebook/export kernel/session/program worker/under_torchrun",
    "product/test_flame.py": "kernel/notebook/flame_magic",
    "product/test_forked_children.py": "worker/forked_child",
    "product/test_headless.py": "kernel/notebook/json_lines",
    "product/test_history.py": "kernel/notebook/runs_magic",
    "product/test_interrupt.py": (
        "agent/stop_ladder kernel/session/presses kernel/session/stop_order server/time_limit system/library_imports "
        "worker/interrupts worker/pytorch/data_loaders"
    ),
    "product/test_lifetime.py": "agent/group_start agent/leftovers agent/rank_starter worker/process_reset",
    "product/test_output.py": "agent/group_output agent/rank_streams",
    "product/test_profile.py": "worker/pytorch/profiler",
    "product/test_programs.py": "kernel/session/travelling_environment worker/spawned_process",
    "product/test_restarts.py": "agent/restarts server/attempts",
    "product/test_scripts.py": "kernel/notebook/command_line kernel/notebook/script worker/script",
    "product/test_shares.py": "worker/pytorch/phase_clock",
    "product/test_stacks.py": "agent/stack_requests worker/stack",
    "product/test_stall.py": "agent/watch server/stalls",
    "product/test_submit.py": (
        "kernel/notebook/runs_view kernel/notebook/sweep kernel/session/pool_capacity kernel/views/run_table"
    ),
    "product/test_values.py": "kernel/session/handles kernel/session/rank_queries worker/outcome",
    "ray/test_clusters.py": "pools/ray/cluster",
    "ray/test_contract.py": "pools/ray/host pools/ray/object_store pools/ray/pool pools/ray/serve",
    "ray/test_ray_launch.py": "compat/ray_launch",
    "repository/test_extend.py": "extend",
    "repository/test_readme.py": "pages",
    "serialization/test_payload.py": "serialization/picklers wire/versions",
    "server/test_idle.py": "coordinator/server",
    "server/test_journal.py": "server/compaction",
    "slurm/test_slurm.py": "pools/slurm/allocation pools/slurm/pool pools/slurm/reservation",
    "spark/test_connect_models.py": "compat/spark/connect_models",
    "spark/test_distributors.py": "compat/spark/distributors compat/spark/launched compat/spark/task",
    "spark/test_pool.py": "pools/spark/*",
    "ssh/test_contract.py": "pools/ssh/pool",
    "strategies/test_ddp.py": "worker/autoparallel/* worker/by_hand worker/end_of_cell",
    "strategies/test_fsdp.py": (
        "worker/autoparallel/gather_shards worker/autoparallel/sharded worker/autoparallel/state_dict_loading"
    ),
    "strategies/test_loaders.py": "worker/autoparallel/loader_shares worker/autoparallel/stream_shares",
    "strategies/test_option_refusals.py": "worker/strategy",
    "strategies/test_parallel.py": "parallel/*",
    "strategies/test_tp.py": "worker/autoparallel/meshes",
    "tensorflow/test_tensorflow.py": (
        "compat/mirrored_strategy_runner libraries/keras libraries/tensorflow strategies/tensorflow worker/tensorflow"
    ),
    "trackers/test_event_files.py": "trackers/tensorboard trackers/wandb",
    "trackers/test_mlflow.py": "libraries/mlflow",
    "wire/test_link.py": "wire/messages/*",
    "worker/autoparallel/test_gradient_reducer.py": "worker/host_copy",
    "worker/autoparallel/test_tensor_sums.py": "worker/autoparallel/weight_sync",
    "system/test_private_names.py": "system/private_torch",
    "worker/pytorch/test_group_sightings.py": "worker/pytorch/private",
    "worker/pytorch/test_rendezvous.py": (
        "worker/pytorch/ddp_regroup worker/pytorch/pytorch worker/pytorch/rank_store worker/pytorch/store_board"
    ),
    "worker/pytorch/test_trace_events.py": "worker/pytorch/rank_clock",
    "worker/test_cell.py": (
        "kernel/session/cell_order strategies/none worker/cell_environment worker/execution worker/main "
        "worker/rank_environment worker/threads"
    ),
    "worker/test_runtime.py": "runtime worker/identity",
}
"""The test files, below `tests/`, of modules that have none of their own name; below `jupyter_distrib/`, without `.py`.
`*` stands for all others of a folder."""


def modules() -> dict[str, bool]:
    """Return the modules of the package, and whether each has a test file of its own."""
    paths = {file.relative_to(PACKAGE) for file in PACKAGE.rglob("*.py") if not file.name.startswith("__")}
    return {
        path.with_suffix("").as_posix(): (TESTS / path.parent / f"test_{path.name}").exists() for path in sorted(paths)
    }


def test_each_module_has_a_test_file_of_its_name_or_a_row_of_the_table() -> None:
    patterns = " ".join(TESTED_IN.values()).split()
    without = [module for module, has_one in modules().items() if not has_one]
    assert [each for each in without if not any(fnmatch.fnmatch(each, pattern) for pattern in patterns)] == []


def test_each_row_of_the_table_is_of_a_test_file_and_of_modules_that_are_there() -> None:
    assert [file for file in TESTED_IN if not (TESTS / file).exists()] == []
    patterns = " ".join(TESTED_IN.values()).split()
    assert len(patterns) == len(set(patterns))
    assert [pattern for pattern in patterns if not fnmatch.filter(modules(), pattern)] == []
