"""Sums by which ranks compare what they hold: in bounded memory, with one transfer."""

from __future__ import annotations

import pytest
import torch

from jupyter_distrib.worker.autoparallel.checks import tensor_sums
from jupyter_distrib.worker.autoparallel.training import weight_sync
from tests.worker.autoparallel.made_tensors import MadeTensors

PIECE_BYTES = 8 * 1024
LAYOUTS = {
    "plain": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous().t(),
    "at an odd place": lambda t: torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape),
    "every second": lambda t: torch.stack([t, t], -1)[..., 0],
}
TYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_sums, "PIECE_ELEMENTS", PIECE_BYTES // 8)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_equal_contents_have_equal_sums_in_any_layout(kind: torch.dtype, layout: str) -> None:
    plain = torch.randn(203, 37).to(kind)
    other = LAYOUTS[layout](plain)
    assert torch.equal(other.to(torch.complex64), plain.to(torch.complex64))

    assert tensor_sums.bits([other]) == tensor_sums.bits([plain])
    totals = zip(tensor_sums.magnitudes([other])[0], tensor_sums.magnitudes([plain])[0], strict=True)
    assert all(mine == pytest.approx(theirs) for mine, theirs in totals)


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_one_bit_changes_the_fingerprint(kind: torch.dtype) -> None:
    before = torch.zeros(11, 7).to(kind)
    after = before.clone()
    after.view(-1)[-1] = 1
    assert tensor_sums.bits([before]) != tensor_sums.bits([after])


def test_conjugates_empty_sparse_and_absent_tensors_are_taken() -> None:
    conjugate = torch.randn(5, dtype=torch.complex64).conj()
    others = [torch.empty(0, 3), torch.tensor(2.0), torch.eye(3).to_sparse(), torch.empty(3, device="meta")]

    assert tensor_sums.bits([conjugate]) == tensor_sums.bits([conjugate.resolve_conj()])
    assert len(tensor_sums.bits(others)) == len(tensor_sums.magnitudes(others)) == 4
    assert tensor_sums.magnitudes(others)[1] == (2.0, 2.0)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32], ids=str)
def test_no_copy_of_a_tensor_is_made(kind: torch.dtype) -> None:
    weights = [torch.ones(512, 512, dtype=kind) for _ in range(3)]  # 64 pieces each, or 32 as bytes of bfloat16
    weights[1] = weights[1].t()
    with MadeTensors() as made:
        tensor_sums.magnitudes(weights)
    assert made.largest_bytes <= PIECE_BYTES

    with MadeTensors() as made:
        weight_sync.fingerprint(weights[:1])
    assert made.largest_bytes <= 64  # sums only


def test_the_host_waits_once_for_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    move = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: moved.append(tensor) or move(tensor))
    weights = [torch.ones(3) for _ in range(50)]

    weight_sync.fingerprint(weights)
    assert len(moved) == 1
    tensor_sums.magnitudes(weights)
    assert len(moved) == 2
