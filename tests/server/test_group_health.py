"""What a run tells of the process groups of its ranks."""

from __future__ import annotations

import pytest

from jupyter_distrib.server.group_health import GroupHealth, ProgressReports


@pytest.mark.parametrize(
    ("clean", "sequences", "fit"), [(True, set(), True), (True, {4}, True), (True, {4, 5}, False), (False, {4}, False)]
)
def test_the_next_run_can_use_groups_that_ended_at_one_collective(clean: bool, sequences: set[int], fit: bool) -> None:
    assert GroupHealth(clean=clean, sequences=sequences).fit is fit


@pytest.mark.parametrize(
    ("finished", "stopped_at", "returned_at", "equal"),
    [
        ((True, True), (3, 3), set(), True),
        ((True, True), (3, 3), {3}, True),
        ((True, True), (3, 3), {4}, False),
        ((True, True), (3, 4), set(), False),
        ((True, False), (3, 3), set(), False),
        ((False, True), (3, 3), set(), False),
    ],
)
def test_ranks_are_equal_if_all_devices_have_finished_the_same_collective(
    finished: tuple[bool, bool], stopped_at: tuple[int, int], returned_at: set[int], equal: bool
) -> None:
    reports = ProgressReports()
    for rank in (0, 1):
        reports.expect(rank)
    for rank in (0, 1):
        reports.record(rank, finished=finished[rank], sequences=[stopped_at[rank]])

    assert not reports.awaited
    assert reports.equal(returned_at) is equal


def test_a_rank_that_does_not_report_has_not_finished() -> None:
    reports = ProgressReports()
    reports.expect(0)
    reports.expect(1)
    reports.record(0, finished=True, sequences=[3])
    assert reports.awaited == {1}

    reports.record_silence()
    assert not reports.awaited
    assert not reports.equal({3})

    late = ProgressReports()
    late.record_silence()
    assert late.equal(set())
