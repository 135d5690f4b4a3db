"""Some seconds of random cells and faults; `python -m tests.gpu_bed.campaign` goes on for longer."""

from __future__ import annotations

import pytest

from tests.gpu_bed import GpuBed
from tests.gpu_bed.campaign import Campaign

pytestmark = pytest.mark.slow


def test_no_lease_is_lost_or_given_twice_and_no_rank_is_left(bed: GpuBed) -> None:
    campaign = Campaign(bed, seed=11)
    campaign.run(12.0)

    assert campaign.steps > 5
