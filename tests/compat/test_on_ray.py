"""The words by which ranks find their Ray cluster; the cluster itself is in `tests/ray/test_ray_launch.py`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jupyter_distrib.compat import on_ray
from jupyter_distrib.worker.autoparallel import object_collectives


def test_ranks_send_no_secret_and_believe_only_the_texts_that_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "RAY_AUTH_TOKEN": "canary"}.items():
        monkeypatch.setenv(name, value)
    sent: list[Any] = []

    def gather(own: Any) -> list[Any]:
        sent.append(own)
        return [{**own, "environment": {"LD_PRELOAD": "theirs"}, "gpus": 3}]

    monkeypatch.setattr(object_collectives, "gather", gather)
    where, everyone = on_ray._exchanged()

    assert "canary" not in json.dumps(sent)
    assert everyone == [{**sent[0], "gpus": "3"}]
    assert on_ray._environment(where, "secret").keys() == {
        "RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ENABLE_UV_RUN_RUNTIME_ENV", "RAY_USAGE_STATS_ENABLED",
        "RAY_raylet_start_wait_time_s",
    }  # fmt: skip
