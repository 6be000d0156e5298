"""What survives which failure, and the tests that show it. The README's table is made of this.

``python -m tests.faults.survival`` prints the table.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from ray_dcp.settings import Limits, RetryPolicy

RAISED_S = 1.0
DEAD_PROCESS_S = 5.0
LOST_NODE_S = 20.0
LOST_NODE_FAST_S = 5.0
_RETRY = RetryPolicy()
_DEFAULT = {field.name: getattr(Limits(), field.name) for field in dataclasses.fields(Limits)}


@dataclass(frozen=True)
class Row:
    """A kind of failure."""

    failure: str
    seen: str
    """By the other ranks."""
    within: str
    left: str
    """In storage."""
    tests: tuple[str, ...]
    """``module::function`` below ``tests``."""


def _seconds(name: str) -> str:
    return f"{_DEFAULT[name]:g} s (`{name}`)"


ROWS = (
    Row(
        "a rank raises: in `state_dict()`, a planner, a writer, `load_state_dict()`",
        "`CheckpointException`: rank, phase, cause; the same group goes on",
        f"{RAISED_S:g} s",
        "the previous checkpoint",
        (
            "faults.test_points::test_a_save_in_which_something_goes_wrong",
            "faults.test_points::test_a_load_in_which_something_goes_wrong",
            "protocol.test_failing_hooks::test_odd_exceptions_of_a_stateful",
        ),
    ),
    Row(
        "a rank's process is killed",
        "the same, naming the rank; re-form (`pool.restart()`, or Ray Train does it)",
        f"{DEAD_PROCESS_S:g} s",
        "the previous one; the new one if its commit had begun",
        (
            "faults.test_points::test_a_save_in_which_something_goes_wrong",
            "faults.test_points::test_a_load_in_which_something_goes_wrong",
            "cluster.test_ranks_without_actors::"
            "test_a_program_that_is_killed_is_lost_within_seconds_and_one_that_is_busy_for_longer_is_not",
            "cluster.test_group::test_an_actor_that_ray_starts_again_is_not_the_rank_that_joined",
        ),
    ),
    Row(
        "a node dies",
        "the same; fewer ranks load the same checkpoint",
        f"{LOST_NODE_S:g} s, {LOST_NODE_FAST_S:g} s with fast health checks",
        "as above",
        (
            "faults.test_lost_nodes::test_a_lost_node_is_named_in_time_under_rays_default_health_checks",
            "faults.test_lost_nodes::test_a_lost_node_is_named_within_seconds_under_fast_health_checks",
        ),
    ),
    Row(
        "a rank, its disk or its network stands still",
        "the same, naming rank and phase; one that moves bytes may take as long as it takes",
        _seconds("stall_timeout_s"),
        "the previous checkpoint",
        (
            "faults.test_stalls::test_a_save_in_which_somebody_stands_still",
            "faults.test_stalls::test_a_load_in_which_somebody_stands_still",
            "protocol.test_coordinator::test_a_slow_rank_that_moves_is_never_failed_and_a_silent_one_is",
        ),
    ),
    Row(
        "a rank does not make the call that others make, nor any other",
        "the same, naming the rank",
        _seconds("arrival_timeout_s"),
        "untouched",
        ("protocol.test_coordinator::test_a_rank_that_never_calls_is_named",),
    ),
    Row(
        "a rank forgets a call, makes one twice, or catches an error that the others do not, and goes on",
        "`CheckpointException` on all, naming both calls and their ranks; the next call that all make works",
        f"{RAISED_S:g} s",
        "the previous checkpoint",
        (
            "cluster.test_group::test_a_rank_that_forgets_a_save_is_named_at_once_and_the_next_save_works",
            "protocol.test_bad_input::test_what_ranks_save_after_one_has_forgotten_a_save_is_whole",
            "protocol.test_out_of_step::test_a_call_made_twice",
            "protocol.test_out_of_step::test_two_calls_the_wrong_way_round",
            "protocol.test_out_of_step::test_a_rank_that_catches_an_error_and_tries_again_alone",
        ),
    ),
    Row(
        "a rank never joins",
        "`JoinTimeoutError` naming it",
        "`timeout_s` of the join",
        "untouched",
        ("cluster.test_group::test_a_rank_that_never_joins_is_named",),
    ),
    Row(
        "the coordinator is killed, at any point",
        "nothing: it is started again, the save or load goes on and ends as if nothing had been",
        "what a process takes to start",
        "the new checkpoint",
        (
            "faults.test_points::test_a_save_in_which_something_goes_wrong",
            "faults.test_points::test_a_load_in_which_something_goes_wrong",
            "cluster.test_group::test_a_rank_that_dies_while_the_coordinator_starts_again_is_noticed",
        ),
    ),
    Row(
        "the coordinator freezes",
        "the same, after it has been replaced",
        f"{_seconds('coordinator_timeout_s')} and a process's start",
        "the new checkpoint",
        ("faults.test_stalls::test_a_frozen_coordinator_is_replaced_and_the_save_commits",),
    ),
    Row(
        "a write fails: disk full, no permission, an error of the device",
        "`CheckpointException` with the system's error, rank and file",
        f"{RAISED_S:g} s",
        "the previous or the new one, whole",
        (
            "faults.test_store_faults::test_a_save_that_fails_anywhere_leaves_the_previous_one_or_itself",
            "faults.test_store_faults::test_a_disk_that_is_full_after_some_bytes_fails_the_save_for_all",
            "faults.test_store_faults::test_a_load_that_fails_anywhere_fails_for_all_and_the_next_one_loads",
        ),
    ),
    Row(
        "an object store refuses connections, cuts them, or answers 5xx or 503",
        "nothing: requests are made again; if it goes on, `CheckpointException` that says how often and how long",
        f"{_RETRY.max_elapsed_s:g} s (`RetryPolicy.max_elapsed_s`)",
        "the previous checkpoint, or the new one, whole",
        (
            "faults.test_s3_faults::test_any_one_request_of_a_save_fails_and_nobody_notices",
            "faults.test_s3_faults::test_a_storm_that_does_not_end_fails_the_save_in_time_and_changes_nothing",
            "faults.test_s3_faults::test_the_server_dies_in_saves_and_loads_and_comes_back",
        ),
    ),
    Row(
        "a crash while an id is saved again",
        "",
        "",
        "the old or the new one, bit for bit",
        (
            "write.test_writer::TestFailures",
            "faults.test_points::test_a_save_in_which_something_goes_wrong",
        ),
    ),
    Row(
        "two saves of one id at once",
        "the one that started first gets `SupersededError`",
        "",
        "the one that started last",
        ("write.test_writer::TestTwoAttemptsAtOnePlace",),
    ),
    Row(
        "a frozen rank or node wakes up after the others have re-formed",
        "`StaleGenerationError` there; it commits nothing",
        "",
        "the newer group's",
        (
            "faults.test_stalls::test_a_frozen_rank_that_wakes_up_after_the_group_re_formed_changes_nothing",
            "faults.test_lost_nodes::test_a_frozen_node_that_was_declared_dead_wakes_up_and_changes_nothing",
            "faults.test_stalls::test_a_commit_that_was_given_up_and_goes_on_later_does_not_replace_a_newer_save",
        ),
    ),
    Row(
        "a rank is killed after its `async_save` has returned, or all of them",
        "of that save nothing: the node's agent writes what was staged, and the save commits",
        "",
        "the new checkpoint",
        (
            "cluster.test_node_agents::"
            "test_two_saves_commit_when_all_their_ranks_are_killed_and_the_agent_ends_a_while_after_the_group",
        ),
    ),
    Row(
        "a rank that saves with `async_save` is killed, and the group forms anew, of any number of ranks",
        "as above; what their node's agent still has in memory of the newest step is loaded from there, and checked as "
        "from storage; the rest from storage",
        "",
        "that step; with `memory_every=1` one step at most is repeated, though none of them is in storage",
        (
            "cluster.test_recovery_from_memory::test_a_rank_is_killed_and_all_load_from_memory_be_they_as_many_or_not",
            "cluster.test_recovery_from_memory::test_all_ranks_are_killed",
            "cluster.test_recovery_from_memory::"
            "test_a_rank_is_killed_with_memory_every_1_and_one_step_at_most_is_repeated",
            "protocol.test_steps_in_memory::"
            "test_what_is_lost_or_wrong_by_then_has_all_ranks_load_the_newest_in_storage",
        ),
    ),
    Row(
        "a node dies, and the group, which saves with `async_save(replicas=1)`, forms anew on the others",
        "what the node had staged is loaded from its copy in another node's memory, and checked; where there is none "
        "(the node dies before it is made, or both nodes of a pair do) from storage, with a warning",
        "",
        "that step",
        (
            "faults.test_lost_copies::test_a_node_is_lost_and_nothing_of_the_tensors_is_read_from_storage",
            "faults.test_lost_copies::test_a_node_that_is_lost_before_its_copy_is_made_costs_a_read_of_its_file",
            "protocol.test_peers::test_a_node_is_lost_and_nothing_is_read_from_storage",
            "protocol.test_peers::test_a_node_is_lost_around_its_copy",
            "protocol.test_peers::test_both_nodes_of_a_pair_are_lost",
        ),
    ),
    Row(
        "a bit flips in that memory, or its agent is killed or does not answer",
        "nothing: what is wrong or missing there is read from the next place, at last from storage",
        "1 s; 5 s for another node's that stops in the middle",
        "that step",
        (
            "protocol.test_loads_from_memory::test_a_bit_flipped_in_memory_is_found_and_the_file_read_from_the_store",
            "protocol.test_peers::test_a_bit_that_flips_in_a_copy_is_found_and_the_file_read_from_the_store",
            "protocol.test_peers::test_a_peer_that_is_gone_is_left_at_once_for_all_its_files",
            "cluster.test_recovery_from_memory::test_an_agent_that_is_killed_leaves_the_storage",
            "cluster.test_recovery_from_memory::test_an_agent_that_stands_still_is_not_waited_for",
        ),
    ),
    Row(
        "a process without a group is killed after its `async_save` has returned",
        "nothing: a child that writes for it (started with the first such save, without torch) commits in its place",
        "",
        "the new checkpoint",
        ("protocol.child.test_writer_process::test_a_process_that_is_killed_when_the_call_has_returned_loses_nothing",),
    ),
    Row(
        "a node agent is killed, or stands still and is ended",
        "nothing: the ranks write by themselves, and the next save has another agent; with a rank of its node killed, "
        "too, `CheckpointException` naming that rank",
        "20 s where it stands still",
        "the new checkpoint; the previous one",
        (
            "cluster.test_node_agents::test_an_agent_that_stands_still_is_ended_and_the_ranks_write_by_themselves",
            "cluster.test_node_agents::test_an_agent_that_is_killed_while_it_writes_leaves_its_part_to_the_ranks",
            "cluster.test_node_agents::test_a_rank_that_is_killed_with_its_agent_loses_the_save_and_is_named",
        ),
    ),
    Row(
        "saves are asked for faster than storage takes them",
        "the third waits until the first has ended (`max_in_flight=2`); or is skipped, or raises, on all ranks alike "
        "(`when_busy=`)",
        "",
        "each with the values of its call, in order",
        (
            "protocol.test_in_flight::test_one_more_waits_until_another_has_ended",
            "protocol.test_in_flight::test_one_more_is_skipped_by_all_where_one_rank_is_busy",
            "protocol.test_in_flight::test_one_more_raises_on_all_ranks_alike",
            "protocol.test_in_flight::test_each_of_three_has_the_values_of_its_call_and_they_are_committed_in_order",
        ),
    ),
    Row(
        "the state is changed while it is staged beside the training (`overlap=True`)",
        "a step of a torch optimizer waits for the copy; any other change that torch counts fails the save on all "
        "ranks (`TornStagingError`)",
        "1 s",
        "the previous checkpoint",
        (
            "protocol.test_overlap::test_a_step_of_an_optimizer_waits_for_it",
            "protocol.test_overlap::test_what_was_changed_meanwhile_is_not_committed_on_any_rank",
        ),
    ),
    Row(
        "an asynchronous save fails and nobody looks",
        "the next save or load does its own work, then raises it on the ranks where nobody looked; told on stderr "
        "where no call comes",
        "",
        "the previous checkpoint; saves after it are committed",
        (
            "protocol.test_async_save::test_a_failure_nobody_awaited_is_raised_by_the_next_call_when_that_has_done_its_work",
        ),
    ),
    Row(
        "a process, or a pool, ends while it saves in the background",
        "the save is finished first (`finish_timeout_s` for a pool), or an error says that it was cut off",
        "",
        "the new checkpoint",
        (
            "test_lifetime::test_a_save_and_a_sweep_under_way_are_finished_when_the_process_ends_and_nothing_is_said",
            "test_pool::test_saves_that_take_too_long_are_named_and_do_not_hide_the_blocks_own_error",
        ),
    ),
    Row(
        "a process is forked while it saves (a DataLoader worker)",
        "the fork is told at once that it is not a rank; with `no_dist=True` it saves and loads by itself",
        "",
        "the new checkpoint",
        ("test_lifetime::test_a_fork_saves_and_loads_by_itself_and_waits_for_nothing_of_its_parent",),
    ),
    Row(
        "a stored byte changes, a file is cut short or gone",
        "the load is refused, naming file and tensor; `manager.load(state, fallback=True)` takes an older step",
        "",
        "",
        (
            "reads.test_damage::test_a_flipped_bit_in_any_payload_names_file_value_and_place",
            "test_fallback::test_the_newest_step_is_damaged_and_an_older_one_is_loaded_on_all_ranks",
        ),
    ),
    Row(
        "files that failed saves left",
        "no reader sees them; the next save under that root removes them, or `ray-dcp prune`",
        "",
        "",
        (
            "maintenance.test_after_save::test_what_a_failed_save_left_goes_with_the_next_under_that_root",
            "faults.test_store_faults::test_a_prune_that_fails_anywhere_deletes_nothing_that_is_needed_and_can_be_run_again",
        ),
    ),
    Row(
        "an id is saved again and again",
        "a load that has begun has until the next save but one; then it fails and finds the newer one",
        "",
        "the newest and the one before",
        (
            "maintenance.test_after_save::test_ten_saves_of_one_id_leave_the_files_of_the_last_and_of_the_one_before",
            "maintenance.test_after_save::test_a_load_that_had_opened_the_replaced_checkpoint_ends_as_it_began",
        ),
    ),
)


def table() -> str:
    """In Markdown."""
    lines = ["| what fails | what the other ranks see | within | what is in storage |", "| --- | --- | --- | --- |"]
    lines += [f"| {row.failure} | {row.seen} | {row.within} | {row.left} |".replace("|  |", "| |") for row in ROWS]
    return "\n".join(line.replace("|  |", "| |") for line in lines)


if __name__ == "__main__":
    print(table())
