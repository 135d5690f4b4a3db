"""A device that is behind the program, without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jupyter_distrib.worker import host_copy


class FeignedDevice:
    """Tensors of the CPU are sent to the host as if from a device, which has done nothing until it is `there`."""

    device = torch.device("cpu")

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.there, self.waits, self.copies = False, 0, 0
        monkeypatch.setattr(host_copy, "sent_to_host", self.sent_to_host)

    def sent_to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        self.copies += 1
        return tensor.clone(), self

    def query(self) -> bool:
        return self.there

    def synchronize(self) -> None:
        self.waits += 1
