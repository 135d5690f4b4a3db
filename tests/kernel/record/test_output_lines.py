"""The lines that are kept of the output of several ranks."""

from __future__ import annotations

import random

import pytest

from jupyter_distrib.kernel.record.output_lines import HEAD_LINES, TAIL_LINES, Lines, line_of


@pytest.mark.parametrize("seed", range(20))
def test_lines_that_come_together_are_kept_as_those_that_come_one_by_one(seed: int) -> None:
    chance = random.Random(seed)
    together, single = Lines(), Lines()
    looks = [0]
    for batch in range(12):
        rank, stream = chance.randrange(3), chance.choice(["stdout", "stderr"])
        count = chance.choice([0, 1, HEAD_LINES, TAIL_LINES, 2 * TAIL_LINES + 7])
        texts = [f"{batch} {number}" for number in range(count)]
        together.extend(rank, stream, texts)
        for text in texts:
            single.append(line_of(rank, stream, text))
        if chance.random() < 0.2:
            together.clear(rank, stream)
            single.clear(rank, stream)
        looks.append(single.entries)

    assert (together.count, together.entries) == (single.count, single.entries)
    for entry in looks:
        assert together.since(entry) == single.since(entry)
