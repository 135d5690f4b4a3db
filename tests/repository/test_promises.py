"""What docs/security.md and docs/promises.md say is tested: each of their sentences, and each row of their tables, names
the tests that hold it. Who adds or changes a sentence names its tests here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import jupyter_distrib

ROOT = Path(__file__).parent.parent.parent
PACKAGE, TESTS, DOCS = ROOT / "jupyter_distrib", ROOT / "tests", ROOT / "docs"

HELD: dict[str, dict[str, str]] = {
    "security.md": {
        "This page is for people who decide whether the package may run on a shared machine, a cluster or a hub.": "- says whom the page is for",
        "To report a vulnerability, see [the policy](../.github/SECURITY.md).": "- a link",
        "Anyone who can run cells in a notebook can run programs as its user, with or without this package.": "- about Jupyter",
        "The package adds no rights: ranks are processes of the same user.": "repository/test_promises.py::test_the_package_asks_for_no_other_rights",
        "It uses no setuid program and no system service.": "repository/test_promises.py::test_the_package_asks_for_no_other_rights",
        "| you | everything that your account may do |": "- about the system",
        "| another user of the machine | see that a GPU is leased, and by whom; take the lease of a free GPU; connect to torch's ports (below) |": (
            "agent/test_gpu_leases.py::test_only_the_same_user_is_told_the_notebook "
            "agent/test_gpu_leases.py::test_a_lease_is_between_users "
            "agent/test_server.py::test_another_user_is_refused "
            "pools/test_server_link.py::test_a_socket_of_another_user_is_told_nothing"
        ),
        "| a folder that you have opened | by its settings file, choose a strategy and numbers of ranks (no more than cores or GPUs), and keep its runs unsaved; anything else only after you [trust](pools.md#a-file-that-comes-with-a-folder) that file. Packages that are in the folder add no pools, strategies, observers or trackers. Where trackers record the commit, and where files are copied to hosts, git runs no program that the folder names. Python itself imports modules from the folder, as in every notebook |": (
            "kernel/settings/test_config_files.py::test_only_these_keys_options_and_kinds_of_pools_need_no_trust "
            "kernel/settings/test_config_files.py::test_more_ranks_than_the_machine_has_need_trust "
            "kernel/settings/test_config_files.py::test_another_file_of_the_same_size_and_time_is_read "
            "kernel/settings/test_config_files.py::test_what_a_project_may_set_is_taken_unasked "
            "kernel/settings/test_config_files.py::test_what_a_project_may_not_set_leaves_the_users_own_and_is_reported "
            "kernel/settings/test_config_files.py::test_a_project_that_saves_nothing_keeps_only_its_own_runs_out "
            "kernel/settings/test_pool_names.py::test_packages_that_lie_in_the_notebooks_folder_bring_no_code "
            "kernel/settings/test_pool_names.py::test_a_package_in_the_notebooks_folder_does_not_replace_an_installed_strategy "
            "kernel/settings/test_pool_names.py::test_a_program_that_only_a_projects_file_names_is_not_run "
            "kernel/settings/test_pool_names.py::test_a_projects_file_does_not_start_the_users_own_remote_pool "
            "system/test_git_folder.py::test_no_program_runs_that_the_folder_names"
        ),
        "| a notebook that you have opened | show saved output without scripts; run code only when you run its cells |": (
            "kernel/views/test_html.py::test_nothing_that_a_rank_writes_or_displays_can_run "
            "kernel/views/test_html.py::test_no_script_no_style_tag_and_every_tag_closed"
        ),
        "| a host on which your ranks run | everything that your account may do, also on the notebook's machine: a value that a cell returns, and an exception that it raises, are pickles. Use hosts whose administrators you trust |": "repository/test_objects_from_bytes.py::test_the_table_names_every_place_and_no_other",
        "| another machine on the network | connect to torch's ports between nodes (below), and to the ports of Ray and Spark |": (
            "agent/test_server.py::test_nothing_listens_but_on_loopback "
            "ssh/test_notebook.py::test_the_store_listens_on_the_address_by_which_the_host_was_reached"
        ),
        "Kernel, agent and ranks talk through inherited pipes, or through Unix sockets in a folder that only you can open.": (
            "agent/test_server.py::test_socket_and_logs_are_the_users_alone "
            "system/test_paths.py::test_a_folder_is_made_private_whatever_the_umask "
            "system/test_paths.py::test_somebody_elses_folder_is_refused"
        ),
        "The user id of the other side is checked.": (
            "agent/test_server.py::test_another_user_is_refused "
            "pools/test_server_link.py::test_a_socket_of_another_user_is_told_nothing "
            "wire/test_link.py::test_the_peers_user_is_known "
            "pools/test_server_home.py::test_the_socket_of_another_user_is_not_connected_to"
        ),
        "Nothing is unpickled before that.": (
            "wire/test_link.py::test_nothing_is_unpickled "
            "wire/test_link.py::test_only_messages_come_out "
            "agent/test_server.py::test_commands_before_the_greeting_are_refused"
        ),
        "To [take up a broken connection](ssh.md#what-is-sent-and-what-listens), the command is run again, and hands its pipe to the ranks' process on the host through a Unix socket in that process's own folder.": "pools/command/test_takeover.py::test_the_owner_with_the_secret_goes_on_where_the_connection_broke",
        "Both sides check the user id.": (
            "pools/command/test_takeover.py::test_another_user_is_refused_even_with_the_secret "
            "pools/command/test_takeover.py::test_nothing_is_told_to_whoever_has_put_something_in_the_relays_place"
        ),
        "The process requires a random key that it was given when it started.": "pools/command/test_takeover.py::test_whoever_says_something_else_gets_nothing_and_disturbs_nothing",
        "If hosts are reached over ssh or by another command, everything goes through the pipe of that command, and this package opens no port for it.": "pools/command/test_connect.py::test_a_relay_opens_no_port_and_its_folder_is_the_users_alone",
        "Only values over 32 MB go another way if the hosts share the notebook's folder: as files in a folder there that only you can open.": (
            "pools/command/test_transfer.py::test_a_large_value_goes_by_the_folder_that_all_hosts_share_and_leaves_nothing_there "
            "pools/command/test_transfer.py::test_files_in_a_shared_folder_are_the_users_alone "
            "pools/command/test_transfer.py::test_parts_are_never_written_into_a_folder_that_has_taken_the_place_of_the_hidden_one"
        ),
        "Ranks on another host use the notebook's folder there only if it has the same owner, or is yours; otherwise its files are copied.": (
            "coordinator/test_file_sync.py::test_a_folder_that_a_stranger_has_made_alike_is_not_the_notebooks "
            "coordinator/test_file_sync.py::test_the_stamp_of_a_strangers_folder_names_them"
        ),
        "Only regular files are copied.": "coordinator/test_file_sync.py::test_what_is_no_file_is_not_read",
        "Links to hidden files elsewhere, such as your keys, are left out.": "coordinator/test_file_sync.py::test_links_of_a_downloaded_folder_bring_no_hidden_file_of_the_user",
        "**Jupyter's server reaches the kernel** by TCP on this machine, by default without encryption.": "- about Jupyter",
        "With ipykernel 7.4 the kernel warns of that in its log when it starts.": "product/test_warnings.py::test_the_kernels_warning_about_its_own_connection_reaches_no_cell",
        "This package does not change that.": "product/test_warnings.py::test_the_kernels_warning_about_its_own_connection_reaches_no_cell",
        "A rank is not a kernel and opens no such port.": (
            "product/test_warnings.py::test_the_kernels_warning_about_its_own_connection_reaches_no_cell "
            "agent/test_server.py::test_nothing_listens_but_on_loopback"
        ),
        "**Torch opens TCP ports**: its store, and the connections of gloo or NCCL between the ranks.": "agent/test_server.py::test_nothing_listens_but_on_loopback",
        "On one machine they are on loopback; between nodes they are on the interface that leads to the other nodes.": (
            "agent/test_server.py::test_nothing_listens_but_on_loopback "
            "system/test_network_interfaces.py::test_the_interface_is_the_one_by_which_the_others_are_reached "
            "ssh/test_notebook.py::test_the_store_listens_on_the_address_by_which_the_host_was_reached"
        ),
        "Torch does not check who connects there, and encrypts nothing; nor does TensorFlow.": "- about torch and TensorFlow",
        "So every user of the machine, or of that network, can connect to them.": "- follows from the above",
        "Whoever does can read and change what ranks exchange, such as gradients and random states, or make them wait.": "- follows from the above",
        "But the name of a checkpoint that arrives this way leads no rank out of the folder that its own cell names (`checkpoints/series.py`).": (
            "checkpoints/test_forged_messages.py::test_no_shard_is_written_outside_the_folder "
            "checkpoints/test_forged_messages.py::test_no_file_of_a_shard_has_a_path_for_a_name "
            "checkpoints/test_forged_messages.py::test_nothing_is_resumed_from_outside_the_folder "
            "checkpoints/test_forged_messages.py::test_nothing_is_loaded_from_outside_the_folder"
        ),
        "Therefore what this package itself sends between ranks is JSON and tensors (`worker/autoparallel/object_collectives.py`), never a pickle, and no password or token of a service: also when ranks write a checkpoint together, start a Ray cluster, or train a `Pipeline`.": (
            "repository/test_objects_from_bytes.py::test_the_table_names_every_place_and_no_other "
            "worker/autoparallel/test_object_collectives.py::test_nothing_that_comes_is_unpickled "
            "worker/autoparallel/test_object_collectives.py::test_nothing_that_is_gathered_is_unpickled "
            "compat/test_on_ray.py::test_ranks_send_no_secret_and_believe_only_the_texts_that_they_need "
            "strategies/test_parallel.py::test_a_pipeline_trains_as_the_whole_model "
            "checkpoints/test_other_users.py::test_ranks_that_save_their_shards_do_not_believe_the_parts_of_a_colleague"
        ),
        "Pickles pass there only if the cell itself calls what exchanges them:": "repository/test_objects_from_bytes.py::test_the_table_names_every_place_and_no_other",
        "`all_gather_object` and the like, Horovod's `broadcast_object`, or torch's own checkpoints.": (
            "repository/test_objects_from_bytes.py::test_the_table_names_every_place_and_no_other "
            "compat/test_horovod_torch.py::test_objects"
        ),
        "Use closed networks, as torch's own documentation advises.": "- advice",
        "**This package opens TCP ports in three cases**, and accepts only text or bytes there:": "repository/test_promises.py::test_the_package_opens_no_other_ports",
        "Spark's distributors have the ranks' lines sent to a port of the driver.": "compat/test_spark_log_server.py::test_lines_come_in_their_order_once_the_token_has_come",
        "A connection counts once it has sent the run's token; until then it is given 64 KB and ten minutes, and nothing it sends is shown (`compat/spark/log_server.py`).": (
            "compat/test_spark_log_server.py::test_nothing_of_a_stranger_is_taken "
            "compat/test_spark_log_server.py::test_a_silent_stranger_is_sent_away "
            "compat/test_spark_log_server.py::test_of_many_lines_before_the_token_few_are_held "
            "compat/test_spark_log_server.py::test_a_line_that_does_not_end_is_given_up"
        ),
        "TensorFlow's ranks send their addresses to rank 0, as JSON.": "worker/test_address_exchange.py::test_every_rank_has_all_texts_by_rank",
        "Rank 0 closes a connection that has sent no such line within 5 s or 1 MB, and keeps listening to the others (`worker/address_exchange.py`).": (
            "worker/test_address_exchange.py::test_many_strangers_who_say_nothing_are_not_waited_for "
            "worker/test_address_exchange.py::test_a_process_that_is_not_a_rank_of_this_run_is_not_heard "
            "worker/test_address_exchange.py::test_a_stranger_who_does_not_end_a_line_is_not_waited_for"
        ),
        "While `%distributed_status --doctor` measures the network between nodes, a port on each answers one connection that knows a token.": "kernel/notebook/test_network_report.py::test_a_node_answers_only_who_knows_its_token",
        "**Ray** is refused without a token unless you add `--insecure` ([more](ray.md)).": (
            "pools/ray/test_cluster.py::test_a_cluster_without_a_token_is_refused_unless_the_user_allows_it "
            "ray/test_clusters.py::test_a_cluster_with_a_token_wants_the_right_one"
        ),
        "**Spark** opens ports on all addresses, as it always does ([more](ray.md#what-listens)).": "- about Spark",
        "A pickle can run any code when it is loaded.": "- about Python",
        "This table lists every place in the package where bytes become objects or code; a test compares it with the source.": "repository/test_objects_from_bytes.py::test_the_table_names_every_place_and_no_other",
        "Everything else that is read from files, sockets and messages is JSON, TOML or plain text.": "repository/test_objects_from_bytes.py::test_the_table_names_every_place_and_no_other",
        "| `checkpoints/reader.py` | `pickle.load` `torch.load` `torch.distributed.checkpoint.state_dict_loader.load` `torch.distributed.checkpoint.filesystem.FileSystemReader` | loads pickles only from files and folders that are yours or root's, and that nobody else can write to. It checks the file descriptor that it then reads. Everything else loads with `weights_only`. Each rank reads for itself |": (
            "checkpoints/test_other_users.py::test_a_file_that_others_could_have_put_there_is_read_without_running_it "
            "checkpoints/test_other_users.py::test_a_planted_pickle_does_not_run "
            "checkpoints/test_other_users.py::test_modes_count_only_where_a_file_has_the_mode_it_was_given "
            "checkpoints/test_other_users.py::test_a_colleagues_checkpoint_loads"
        ),
        "| `checkpoints/strict_metadata.py` | `pickle.Unpickler` | reads the `.metadata` of others: it replaces eight classes of torch by stand-ins, accepts types, shapes and paths, and refuses every other name |": (
            "checkpoints/test_other_users.py::test_metadata_of_somebody_else_may_name_nothing_but_their_own_classes "
            "checkpoints/test_other_users.py::test_metadata_of_somebody_else_change_no_class"
        ),
        "| `compat/horovod/state.py` | `pickle.loads` `torch.load` | only where the cell calls `broadcast_object`, `allgather_object` or `broadcast_optimizer_state`, which Horovod defines this way: through torch's ports, as above |": (
            "compat/test_horovod_torch.py::test_objects "
            "compat/test_horovod_torch.py::test_the_state_of_one_rank_is_brought_to_all"
        ),
        "| `compat/on_ranks.py` | `runpy.run_path` | the script that your notebook names |": "compat/test_launchers.py::test_a_script_in_a_folder_of_a_repository_runs_with_its_arguments",
        "| `compat/serverless_gpu_data.py` | `torch.distributed.checkpoint.filesystem.FileSystemReader` | torch's own reader under another name, for a folder that the cell itself gives to `torch.distributed.checkpoint.load` |": "compat/test_serverless_gpu_data.py::test_a_checkpoint_is_written_by_all_ranks_and_read_back",
        "| `dry_run/side_effects.py` | `torch.load` | the call of the cell itself, which a dry run passes on unless the cell has saved that file |": "dry_run/test_dry_run.py::test_what_was_saved_cannot_be_read",
        "| `kernel/notebook/export.py` | `pickle.loads` | in the script that it writes, for the values that it writes next to it |": "product/test_export.py::test_an_exported_cell_trains_to_the_same_weights_under_torchrun",
        "| `kernel/notebook/script.py` | `runpy.run_module` | the module that your notebook names |": "product/test_scripts.py::test_a_module_of_a_package_runs_as_by_torchrun_m",
        "| `kernel/notebook/sweep.py` | `eval` | an expression of your own cell |": "product/test_submit.py::test_two_names_give_all_combinations_and_may_be_read_from_the_notebook",
        "| `parallel/pipeline.py` | `torch.distributed.pipelining.PipelineStage` | it is given the shapes of all tensors, which came as JSON; otherwise its ranks would exchange them as pickles |": "strategies/test_parallel.py::test_a_pipeline_trains_as_the_whole_model",
        "| `pools/command/bootstrap.py` | `exec` | the package's own program, which goes to another machine through the pipe of your command |": "pools/command/test_connect.py::test_a_relay_starts_behind_whatever_is_printed_before_it_and_leaves_nothing",
        "| `pools/ray/reservation.py` | `ray.get` | the answer of a placement group, from a cluster that was refused unless it has a token |": "pools/ray/test_cluster.py::test_a_cluster_without_a_token_is_refused_unless_the_user_allows_it",
        "| `serialization/definitions.py` | `pickle.loads` | a part of a value that came as in the next row |": "serialization/test_definitions.py::test_an_instance_of_a_notebook_class_comes_back_as_one",
        "| `serialization/tensors.py` | `torch.jit.load` | a part of a value that came as in the previous row |": "serialization/test_tensors.py::test_modules_and_functions_of_torchscript_are_sent_and_returned",
        "| `serialization/payload.py` | `pickle.loads` | values between your notebook and your ranks. They come through inherited pipes, sockets whose peer has your user id, the pipe of your command, private files, or Ray's own channels |": (
            "agent/test_server.py::test_another_user_is_refused "
            "pools/test_server_link.py::test_a_socket_of_another_user_is_told_nothing "
            "pools/command/test_transfer.py::test_files_in_a_shared_folder_are_the_users_alone"
        ),
        "| `system/subprocess_future.py` | `pickle.loads` | from a fork of this process, through a pipe of its own |": "system/test_subprocess_future.py::test_what_another_process_raises_is_raised_here",
        "| `cells/cell.py` | `exec` `eval` | your cell |": "worker/test_cell.py::test_globals_holds_what_the_cell_and_the_notebook_defined",
        "| `worker/pytorch/private.py` | `pickle.loads` | torch's record of the last collectives, which torch made in this process |": "product/test_stall.py::test_check_names_calls_that_do_not_match",
        "| `worker/environment/shell.py` | `exec` `eval` `runpy.run_module` | lines of your cell, such as `%timeit`, and the script or module that it names |": "product/test_scripts.py::test_a_script_has_its_arguments_and_returns_nothing worker/test_shell.py::test_line_magics",
        "| `worker/environment/child_processes.py` | `cloudpickle.loads` | definitions of your cell, from the rank that spawned the process |": "product/test_programs.py::test_a_spawned_process_finds_what_notebook_and_cell_define",
        "**Somebody else's checkpoint** loads if its values are numbers, strings, lists, dicts and tensors.": "checkpoints/test_other_users.py::test_a_colleagues_checkpoint_loads",
        "Anything more is an error that names the file and its owner; if you trust them, copy the folder and load the copy.": "checkpoints/test_other_users.py::test_a_value_that_needs_code_is_refused_with_its_owner_until_it_is_copied",
        "A few bytes of it cannot make an object of any size, and compressed or overlapping parts are refused.": (
            "checkpoints/test_other_users.py::test_a_pickle_of_somebody_else_makes_no_object_of_a_size_that_it_only_names "
            "checkpoints/test_other_users.py::test_an_entry_of_somebody_else_takes_no_more_memory_and_time_than_it_has_bytes "
            "checkpoints/test_checkpoints.py::test_entries_that_share_their_bytes_are_not_loaded"
        ),
        "It is also an error if a value could not be read to its end (`checkpoints/strict_metadata.py`).": "checkpoints/test_other_users.py::test_a_pickle_of_somebody_else_neither_ends_the_process_nor_keeps_it_busy",
        "`save` refuses a folder that belongs to anybody but you and root, since they could change what is in it; root may write into any folder that is not open to every user, as in a container.": (
            "checkpoints/test_other_users.py::test_a_folder_of_somebody_else_is_refused_by_name_and_one_in_it_is_good "
            "checkpoints/test_other_users.py::test_what_a_colleague_has_put_into_the_series_beforehand_is_refused_by_name_and_never_read "
            "checkpoints/test_other_users.py::test_root_saves_into_a_folder_of_somebody_else_unless_everybody_may_write_there "
            "checkpoints/test_other_users.py::test_a_folder_of_root_is_as_good_as_ones_own"
        ),
        "If another folder takes the place of yours during a run, nothing is created or removed there.": (
            "checkpoints/test_other_users.py::test_a_series_whose_place_another_folder_takes_makes_and_removes_nothing_there "
            "checkpoints/test_other_users.py::test_a_checkpoint_whose_place_another_one_takes_before_it_is_written_leaves_that_one "
            "checkpoints/test_other_users.py::test_no_rank_writes_into_what_has_taken_the_place_of_its_new_folder"
        ),
        "`resume` skips `save-*` folders that belong neither to you nor to the owner of the folder around them, and says so.": (
            "checkpoints/test_other_users.py::test_a_planted_checkpoint_with_a_higher_number_is_not_the_newest "
            "checkpoints/test_other_users.py::test_a_folder_that_is_planted_after_the_first_save_is_passed_over"
        ),
        "| sockets and locks | `JUPYTER_DISTRIB_RUNTIME_DIR`, or the system's folder for such files if only you can write to it; if somebody else has taken the folder in `/tmp`, one with a random name next to it | you |": (
            "agent/test_server.py::test_socket_and_logs_are_the_users_alone "
            "system/test_paths.py::test_variables_choose_the_folders "
            "system/test_paths.py::test_a_runtime_folder_that_everybody_can_write_to_is_not_used "
            "system/test_paths.py::test_a_stranger_who_makes_the_usual_folder_first_stops_nobody "
            "product/test_damaged_files.py::test_two_notebooks_share_an_agent_where_a_stranger_has_made_the_folder_for_sockets"
        ),
        "| leases of GPUs | a socket name in the system, with the GPU's id | all users of the machine; the notebook's name, only you |": (
            "agent/test_gpu_leases.py::test_a_lease_is_between_users "
            "agent/test_gpu_leases.py::test_only_the_same_user_is_told_the_notebook"
        ),
        "| what ranks print | one log for each rank, in `JUPYTER_DISTRIB_LOG_DIR` | you |": (
            "agent/test_output.py::test_a_log_is_the_users_alone_whatever_the_umask "
            "system/test_paths.py::test_variables_choose_the_folders"
        ),
        "| runs that have ended, with code and output | [the history](history.md) | you |": "kernel/history/test_history.py::test_only_the_user_can_read_it",
        "| detached runs: the cell's name, and the folders of logs and checkpoints | `detached` next to the history | you |": (
            "system/test_paths.py::test_a_file_of_ours_is_opened_for_this_user_alone_and_never_through_a_link "
            "kernel/session/test_saved_runs.py::test_after_the_loss_of_agent_ranks_and_kernel_it_is_told_which_run_was_lost"
        ),
        "| captured values | sealed shared memory without a name, some of it until the next cells; for other hosts, as above | you |": (
            "serialization/test_value_cache.py::test_memory_of_others_is_not_opened_and_ours_is_sealed "
            "product/test_unchanged_values.py::test_the_memory_is_gone_when_the_kernel_is_killed "
            "serialization/test_shared_memory.py::test_the_memory_is_sealed_against_change_and_truncation "
            "serialization/test_shared_memory.py::test_without_memfd_an_unlinked_private_file_does "
            "pools/command/test_transfer.py::test_files_in_a_shared_folder_are_the_users_alone"
        ),
        "| on other hosts: this package, and copies of your files | a temporary folder, removed at the end | you |": (
            "pools/command/test_connect.py::test_a_relay_opens_no_port_and_its_folder_is_the_users_alone "
            "pools/command/test_connect.py::test_a_relay_starts_behind_whatever_is_printed_before_it_and_leaves_nothing"
        ),
        "| checkpoints | where the cell says | as your umask says; nobody else can write into them |": "checkpoints/test_other_users.py::test_files_of_a_checkpoint_can_be_written_by_nobody_else_whatever_the_umask",
        "| other files that a cell writes | where it writes them | as your umask says |": "product/test_values.py::test_files_that_ranks_write_have_the_modes_that_the_notebook_wants",
        "The notebook's environment variables are sent to ranks on the same machine.": (
            "worker/test_cell.py::test_the_kernels_environment_and_folder_are_the_ranks_too "
            "agent/test_server.py::test_secrets_of_the_environment_stay_there"
        ),
        "Other machines get the variables that were set after the kernel had started, and those about communication (`NCCL_`, `GLOO_`, `TORCH_DISTRIBUTED_`).": (
            "kernel/session/test_environment.py::test_other_machines_get_what_the_notebook_has_set_and_no_key "
            "ray/test_notebook.py::test_the_environment_of_the_kernels_machine_stays_there"
        ),
        "Ray and Spark write some of what they get into their own logs.": "- about Ray and Spark",
        "Command lines, which all users of a machine can see, contain no token of a cluster, and no Spark settings whose names say that they are secrets.": "spark/test_pool.py::test_no_command_line_has_the_token_of_the_cluster",
        "Strings of pools and of `--env` do not reach observers and trackers, and those of a declared run are not in IPython's history.": (
            "kernel/session/test_observers.py::test_it_knows_what_the_cell_is_run_with "
            "product/test_shell_runs.py::test_variables_of_a_declared_cell_are_not_kept"
        ),
        "Your own settings file is read only if it is yours or root's, and nobody else can write to it, unless `JUPYTER_DISTRIB_CONFIG` names it.": (
            "kernel/settings/test_config_files.py::test_the_users_file_is_not_read_if_it_is_somebody_elses "
            "kernel/settings/test_config_files.py::test_the_users_file_is_not_read_if_others_may_write_it"
        ),
        "Folders for these files that are missing are made for you alone, whatever the umask is.": "system/test_paths.py::test_a_folder_is_made_private_whatever_the_umask kernel/settings/test_pool_files.py::test_the_folders_of_the_users_own_file_are_the_users_alone_whatever_the_umask",
        "The package reads such a file only if it is a regular file and yours.": (
            "repository/test_kept_files.py::test_kept_files_are_read_in_one_place "
            "system/test_record_file.py::test_whatever_is_at_the_path_is_an_error_at_once"
        ),
        "It does not follow links, and does not wait for FIFOs.": (
            "system/test_record_file.py::test_whatever_is_at_the_path_is_an_error_at_once "
            "product/test_damaged_files.py::test_cells_run_whatever_the_files_are"
        ),
        "Damaged files are skipped, and a message says how many (`system/record_file.py`).": (
            "kernel/history/test_history.py::test_damage_is_counted_in_one_note "
            "kernel/session/test_saved_runs.py::test_damaged_files_are_left_out"
        ),
        "Addresses of services (Ray, MLflow, W&B, Spark, proxies, package indexes) are shown and saved without user names, passwords, queries and fragments (`addresses.py`).": (
            "test_addresses.py::test_an_address_is_shown_without_secrets "
            "test_addresses.py::test_no_spelling_of_a_password_is_shown "
            "product/test_secrets.py::test_a_password_in_an_address_is_neither_shown_nor_saved"
        ),
        "The same goes for programs that a dry run names.": "dry_run/test_coverage.py::test_the_programs_that_are_named_are_shown_without_secrets",
        "The same goes for addresses in error messages of their libraries, in the doctor's report and in the names of runs.": (
            "product/test_secrets.py::test_a_password_in_an_address_is_neither_shown_nor_saved "
            "test_addresses.py::test_a_sentence_is_shown_without_secrets"
        ),
        "If an argument of a function or a script is called a password, a token or the like, its string is not in the run's name.": (
            "test_addresses.py::test_a_command_line_is_shown_without_secrets "
            "product/test_shell_runs.py::test_secrets_among_the_arguments_of_a_script_are_not_in_its_name "
            "kernel/notebook/test_decorator.py::test_the_runs_of_several_calls_are_told_apart_by_their_arguments"
        ),
        "`...` replaces whatever cannot be told apart from a password.": "test_addresses.py::test_no_spelling_of_a_password_is_shown",
        "What your code prints or contains is not changed.": "- what is not covered",
        "Of the files that a rank names in its traceback, the notebook quotes modules of Python and its own cells, and no others.": "kernel/session/test_cell_sources.py::test_a_host_has_no_other_file_quoted_in_the_notebook kernel/session/test_cell_sources.py::test_a_cell_is_shown",
        "What ranks print is always shown as text: a terminal gets its colours, and no other codes.": (
            "product/test_shell_runs.py::test_logs_on_a_terminal_have_colours_and_no_other_codes "
            "kernel/views/test_html.py::test_nothing_that_a_rank_writes_or_displays_can_run "
            "kernel/views/test_text.py::test_the_markup_escapes_everything_and_needs_no_script"
        ),
        "While the run goes on, HTML that they display is in a frame that runs no scripts and loads nothing.": (
            "kernel/views/static/displays.test.mjs "
            "browser/test_run_view.py::test_html_from_a_rank_cannot_run_or_load_anything"
        ),
        "In the saved notebook it is reduced to harmless tags.": (
            "kernel/views/test_html.py::test_what_is_left_of_html "
            "kernel/views/test_html.py::test_no_script_no_style_tag_and_every_tag_closed"
        ),
        "HTML that takes longer than 15 s to check is left out, and a sentence says so.": (
            "kernel/views/test_html.py::test_html_that_takes_long_to_check_is_cut "
            "kernel/views/test_html.py::test_all_displays_share_the_time"
        ),
        "JavaScript and widgets of a rank never reach the page.": "worker/test_displaying.py::test_code_of_a_rank_is_not_for_the_notebook",
        "Links are kept only if they use `http` or `https`.": (
            "kernel/views/test_html.py::test_addresses_in_notes_are_links_and_nothing_else_is "
            "kernel/views/test_html.py::test_nothing_that_a_rank_writes_or_displays_can_run"
        ),
        "Front ends typeset formulas in all text.": "- about front ends",
        "So TeX commands that make links, or load or style something, are left out (`kernel/views/markup.py`).": (
            "kernel/views/test_html.py::test_no_formula_that_a_rank_writes_or_displays_can_do_anything "
            "kernel/views/test_html.py::test_other_formulas_and_output_stay"
        ),
        "Control characters in the name of a folder with a settings file, or in that file, are shown as `?`.": (
            "kernel/settings/test_config_files.py::test_control_characters_of_a_folder_do_not_reach_the_screen "
            "kernel/settings/test_config_files.py::test_control_characters_of_a_file_do_not_reach_the_screen"
        ),
        "Other users choose the names of their processes and jobs.": "- about the system",
        "These are shown as part of one line, without control characters, and shortened.": (
            "system/test_outside_text.py::test_a_text_becomes_part_of_one_line "
            "pools/test_slurm_words.py::test_the_name_of_a_job_adds_no_job"
        ),
        "Who holds a GPU is taken from the system.": (
            "agent/test_gpu_leases.py::test_a_holder_that_does_not_answer_is_named_by_the_system "
            "system/test_outside_text.py::test_a_process_of_another_user_is_named_as_it_is"
        ),
        "What another user's process says about itself is not read.": "agent/test_gpu_leases.py::test_words_of_another_user_are_never_shown",
        "`auto` finds only Ray clusters that you or root have started.": "pools/ray/test_cluster.py::test_a_cluster_of_another_user_is_not_joined_unasked",
        "The form for a pool offers hosts and contexts only from files that nobody but you and root can write.": "pools/test_discovery.py::test_a_file_that_another_user_may_have_written_offers_no_hosts",
    },
    "promises.md": {
        "Versions follow [Semantic Versioning](https://semver.org/); below 1.0 a minor version may change things, and [the changes](../CHANGELOG.md) say so.": "repository/test_packaging.py::test_version_and_address_are_the_same_everywhere",
        "| options of `%%distributed` and keywords of `@distributed`, as listed in [the table](options.md) | a name keeps its meaning |": (
            "repository/test_readme.py::test_the_tables_of_options_are_those_made_from_the_options "
            "kernel/settings/test_cell_options.py::test_keywords_become_the_same_options"
        ),
        "| [line magics](magics.md) | names and arguments stay; the text that they print may change |": (
            "repository/test_readme.py::test_every_line_magic_has_its_row_in_the_docs "
            "repository/test_readme.py::test_every_line_magic_and_error_that_the_docs_name_exists"
        ),
        "| what `import jupyter_distrib` provides ([API](python-api.md#all-functions-and-classes)) | stays |": "repository/test_promises.py::test_the_api_page_has_what_the_package_gives",
        "| [`jupyter distrib`](command-line.md): commands, exit statuses, keys of declared runs and of its JSON | stay; keys may be added |": (
            "product/test_shell_runs.py::test_a_detached_run_is_listed_followed_and_attached_with_the_status_of_its_end "
            "product/test_shell_runs.py::test_a_run_that_does_not_exist_and_wrong_words_are_refused_with_status_2 "
            "product/test_shell_runs.py::test_a_declared_script_has_its_arguments_environment_and_options"
        ),
        "| keys of [`--json`](headless.md#what-a-program-reads) and of [the notebook file](live-view.md#in-the-notebook-file) | stay; keys may be added |": (
            "product/test_headless.py::test_each_run_is_one_line_of_json_with_the_documented_keys "
            "kernel/notebook/test_live_view.py::test_a_run_is_watched_in_a_widget_and_leaves_static_output"
        ),
        "| keys of the [settings files](settings.md), and [environment variables](settings.md#environment-variables) for you to set | stay |": (
            "repository/test_readme.py::test_every_key_of_the_settings_files_is_in_the_docs "
            "repository/test_readme.py::test_every_environment_variable_is_in_the_docs_and_the_other_way_round"
        ),
        "| `jupyter_distrib.extend` and `jupyter_distrib.testing`, for pools, strategies and observers | change only with an entry in the changelog |": "repository/test_extend.py::test_all_of_it_is_named",
        "| all other modules, messages between processes, files of the history | may change with every version |": "- promises nothing",
        "Kernel, agent and ranks always have the same version of the package.": (
            "wire/test_link.py::test_the_protocol_differs_with_fields_only "
            "pools/test_server_home.py::test_another_version_has_an_agent_of_its_own"
        ),
        "Another version starts processes of its own.": "pools/test_server_home.py::test_another_version_has_an_agent_of_its_own",
        "The notebook's kernel is never forked, has no CUDA context and joins no process group.": "product/test_values.py::test_the_kernel_stays_as_it_was_also_after_a_cell_that_fails",
        "A cell that fails on the ranks leaves it as it was.": (
            "product/test_values.py::test_the_kernel_stays_as_it_was_also_after_a_cell_that_fails "
            "product/test_values.py::test_out_keeps_what_it_had_when_a_cell_fails"
        ),
        "Stop ends a cell on all ranks, even in a collective.": (
            "product/test_interrupt.py::test_it_stops_and_ranks_and_kept_values_live_on "
            "product/test_interrupt.py::test_a_collective_is_interrupted_20_times_of_20"
        ),
        "Ranks that respond keep what `--keep` left, and the names of the stopped cell's own `--keep`.": (
            "product/test_interrupt.py::test_it_stops_and_ranks_and_kept_values_live_on "
            "product/test_values.py::test_a_cell_that_is_stopped_keeps_its_names_as_they_are_then "
            "product/test_values.py::test_an_interrupted_run_still_gives_handles_to_what_finished_ranks_kept"
        ),
        "When the kernel ends, ranks and everything they had started are gone within 2 s, unless the run is detached.": (
            "product/test_lifetime.py::test_a_kernel_takes_its_ranks_with_it "
            "product/test_detach.py::test_a_restarted_kernel_attaches_the_run_and_gets_all_of_it"
        ),
        "Only processes that this package started are ended.": (
            "system/test_reap.py::test_marked_processes_are_killed_and_no_others "
            "system/test_reap.py::test_a_session_is_killed_and_nothing_else"
        ),
        "A cell sees the notebook's values as they were when it began.": (
            "kernel/notebook/test_magic.py::test_every_rank_has_its_own_copy "
            "product/test_submit.py::test_what_the_notebook_changes_after_submitting_does_not_reach_a_queued_run"
        ),
        "In the notebook it changes only `_` and the names of `--out` and `--keep`.": (
            "product/test_values.py::test_the_kernel_stays_as_it_was_also_after_a_cell_that_fails "
            "product/test_values.py::test_out_binds_the_values_to_a_name"
        ),
        "Each of these has tests, on CPU ranks, on simulated GPUs, and on several nodes with Ray, ssh, Slurm and Spark.": "repository/test_promises.py::test_the_tests_that_are_named_exist",
        "**The same numbers as on one device.** A mean over ranks is summed in a different order.": "- promises nothing",
        "[Strategies](strategies.md) says what is equal, and how closely.": "strategies/test_docs_table.py::test_the_table_is_that_of_the_tests",
        "**That any cell becomes distributed.** The header of the run lists what is done with a model.": "strategies/test_ddp.py::test_the_head_of_the_run_says_what_was_done_and_nothing_if_nothing_was",
        "Code that is not understood is left alone, with a note in the header.": (
            "strategies/test_ddp.py::test_the_head_does_not_claim_what_was_left_to_others "
            "strategies/test_ddp.py::test_what_is_done_by_hand_already_is_left_alone"
        ),
        "**GPUs.** A [table](gpus.md#what-was-tested-and-where) lists what was tried on real GPUs, and what only on simulated ones.": "- a link",
        "**Speed on a busy machine.** The [figures](benchmarks.md) name their machine.": "- a link",
        "**Windows** without WSL, and GPUs on macOS.": "- promises nothing",
    },
}
"""The tests of each statement; after a dash, the reason why it has none."""

MORE_RIGHTS = re.compile(
    r"\bos\.set(?:re|res|e)?[ug]ids?\(|\bos\.(?:setgroups|initgroups)\(|\bsudo\b|\bsystemctl\b|\bpkexec\b"
)
PORTS = {
    "agent/groups/store.py": "torch's store, which rank 0 serves; TensorFlow's ranks meet there",
    "worker/pytorch/host_lookup.py": "torch's store, on loopback, for milliseconds when torch is loaded",
    "compat/on_ray.py": "a free port, for Ray",
    "strategies/tensorflow.py": "a free port, for TensorFlow",
    "worker/network_check.py": "the measurement of the doctor",
    "compat/spark/log_server.py": "the lines of Spark's distributors",
}


def statements(page: str) -> Iterator[str]:
    """The sentences of a page, and the rows of its tables below their heads."""
    for block in re.split(r"\n\s*\n", re.sub(r"^#+ .*$", "", page, flags=re.MULTILINE)):
        lines = [" ".join(line.split()) for line in block.strip().splitlines()]
        if lines and lines[0].startswith("|"):
            yield from lines[2:]
            continue
        for item in re.split(r"(?:^|\n)- ", "\n".join(lines)):
            yield from filter(None, re.split(r"(?<=[.!?:])\s+(?=[A-Z`*\[])", item.replace("\n", " ")))


@cache
def names_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def is_there(test: str) -> bool:
    file, _, name = test.partition("::")
    path = TESTS / file
    return path.is_file() and (name in names_in(path) if name else path.suffix == ".mjs")


@pytest.mark.parametrize("page", HELD)
def test_each_statement_of_the_two_pages_names_its_tests(page: str) -> None:
    found = list(statements((DOCS / page).read_text("utf-8")))
    assert [each for each in found if each not in HELD[page]] == [], "name the tests that hold these"
    assert [each for each in HELD[page] if each not in found] == [], "these stand in the page no more"


@pytest.mark.parametrize("page", HELD)
def test_the_tests_that_are_named_exist(page: str) -> None:
    named = {each for value in HELD[page].values() if not value.startswith("- ") for each in value.split()}
    assert sorted(each for each in named if not is_there(each)) == []
    assert all(HELD[page].values())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# Head\n\nOne `a.b`. Two, which\ngoes on: three.\n", ["One `a.b`.", "Two, which goes on: three."]),
        ("It does:\n\n- this. And\n  that.\n- `more`\n", ["It does:", "this.", "And that.", "`more`"]),
        ("| a | b |\n|---|---|\n| x. Y | z |\n", ["| x. Y | z |"]),
    ],
)
def test_sentences_items_and_rows_are_statements(text: str, found: list[str]) -> None:
    assert list(statements(text)) == found


@pytest.mark.parametrize(
    "test", ["nowhere.py::test_x", "repository/test_promises.py::test_x", "repository/test_promises.py"]
)
def test_a_test_that_does_not_exist_is_found(test: str) -> None:
    assert not is_there(test)


def test_the_package_asks_for_no_other_rights() -> None:
    found = {
        str(path.relative_to(PACKAGE)): MORE_RIGHTS.findall(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")
    }
    assert {path: words for path, words in found.items() if words} == {}
    assert MORE_RIGHTS.search("os.setuid(0)")


def test_the_package_opens_no_other_ports() -> None:
    """Servers on TCP, in whatever way they are made here."""
    server = re.compile(
        r"\bnetwork_interfaces\.listen\(|\bcreate_server\(|\bstart_server\(|TCPServer\(|HTTPServer\(|\.bind\(\("
    )
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if server.search(path.read_text("utf-8"))}
    assert found - {"system/network_interfaces.py"} == PORTS.keys(), "but for the function that these call"


def test_the_api_page_has_what_the_package_gives() -> None:
    page = (DOCS / "python-api.md").read_text("utf-8")
    named = set(re.findall(r"^\.\. auto\w+:: jupyter_distrib\.(\w+)$", page, re.MULTILINE)) - {
        "runtime",
        "errors",
        "extend",
        "testing",
    }
    errors = {name for name in jupyter_distrib.__all__ if name.endswith("Error")}
    assert set(jupyter_distrib.__all__) - errors - {"__version__", "runtime"} == named
