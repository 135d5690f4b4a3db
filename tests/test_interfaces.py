"""What a rank says when NCCL does not find its way to other nodes."""

from __future__ import annotations

import re

import pytest

from jupyter_distrib.worker import failure, interfaces

NCCL = (
    "NCCL error in: ProcessGroupNCCL.cpp:93, internal error - please report this issue to the NCCL developers, NCCL "
    "version 2.27.5\nncclInternalError: Internal check failed.\nLast error:\nsocketStartConnect: Connect to 10.0.0.9"
)


def test_the_interfaces_of_this_machine_have_addresses() -> None:
    assert interfaces.addresses()["lo"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("told", "begins"),
    [("eth7", "NCCL was to use the interface eth7; this node has "), (None, "NCCL chose an interface by itself; this")],
)
def test_the_hint_names_what_was_used_and_what_is_there(
    told: str | None, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if told:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", told)
    else:
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    (hint,) = failure.describe(RuntimeError(NCCL), run="r", by_value=False).notes
    assert hint.startswith(begins)
    assert re.search(r"\blo \(127\.0\.0\.1\).*--env NCCL_SOCKET_IFNAME=NAME names another", hint)


def test_other_errors_get_no_such_hint() -> None:
    assert failure.describe(RuntimeError("NCCL is mentioned"), run="r", by_value=False).notes == ()
