"""The better direction of a metric, by its name. Kernel side; pure functions.

`direction` in `static/words.js` knows the same words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

LARGER_IS_BETTER = ("acc", "auc", "f1", "precision", "recall", "reward", "score", "bleu", "iou")
"""Prefixes of a metric name's last word that mean higher is better."""
SMALLER_IS_BETTER = ("loss", "err", "perplexity", "ppl", "nll", "mse", "mae", "rmse", "cost")
"""Prefixes that mean lower is better."""

Point = tuple[float, float]


def direction(name: str) -> Literal[-1, 0, 1]:
    """Return 1 if larger values are better, -1 if smaller ones are, 0 if the name does not tell."""
    word = re.split(r"[/_.\-\s]+", re.sub(r"[/_.-](train(ing)?|val(id(ation)?)?|eval|test)$", "", name.lower()))[-1]
    if word.startswith(LARGER_IS_BETTER):
        return 1
    return -1 if word.startswith(SMALLER_IS_BETTER) else 0


def best_of(name: str, points: Sequence[Point]) -> Point | None:
    """Return the first best point, (step, value); None if the name does not tell which is better."""
    sign = direction(name)
    return max(points, key=lambda point: sign * point[1]) if sign and points else None
