"""Some seconds of random cells and faults; `python -m tests.gpu_bed.campaign` goes on for longer."""

from __future__ import annotations

import pytest

from tests.gpu_bed import GpuBed
from tests.gpu_bed.campaign import Campaign

pytestmark = pytest.mark.slow
STEPS = 25


@pytest.mark.parametrize("two_agents", [False, True])
def test_no_lease_is_lost_or_given_twice_and_no_rank_is_left(bed: GpuBed, two_agents: bool) -> None:
    campaign = Campaign(bed, seed=11, two_agents=two_agents)
    for _ in range(STEPS):
        campaign.step()
    campaign.end()

    assert bed.violations() == []
