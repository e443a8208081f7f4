"""Host buffers in pieces: little is lost to the rounding of pinned memory, and no byte is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from torchtune_cp.training.memory.host import MOST_PIECES, SMALLEST_PIECE, HostBytes, piece_sizes


def _rounded(size: int) -> int:
    """What torch takes for a pinned buffer: the next power of two."""
    return 1 << (size - 1).bit_length() if size else 0


@given(st.integers(min_value=1, max_value=2**44))
def test_pieces_add_up_and_lose_a_sixteenth_at_most(num_bytes):
    sizes = piece_sizes(num_bytes)
    assert sum(sizes) == num_bytes
    assert len(sizes) <= MOST_PIECES
    assert sizes == sorted(sizes, reverse=True)
    lost = sum(map(_rounded, sizes)) - num_bytes
    # Of a large buffer; what is smaller than a piece is not cut.
    assert lost <= max(num_bytes / 16, SMALLEST_PIECE)


def test_a_buffer_without_bytes_is_one_empty_piece():
    assert piece_sizes(0) == [0]


@pytest.mark.parametrize("num_bytes", [1, SMALLEST_PIECE, 3 * SMALLEST_PIECE + 5])
def test_bytes_come_back_as_they_went(num_bytes):
    buffer = HostBytes(num_bytes, torch.device("cpu"))
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8)
    buffer.fill(source)
    target = torch.zeros_like(source)
    buffer.copy_to(target)
    assert torch.equal(target, source)
    source.zero_()
    again = torch.ones_like(target)
    buffer.copy_to(again)
    assert torch.equal(again, target), "the buffer is no view of what was copied"


def test_pieces_of_more_than_2_to_the_31_bytes_lie_side_by_side():
    with FakeTensorMode():  # sizes and offsets without the memory
        count = 9 * 2**30 + 5
        buffer = HostBytes(count, torch.device("cpu"))
        source = torch.empty(count, dtype=torch.uint8)
        buffer.fill(source)
        buffer.copy_to(source)
        parts = [
            (int(part.storage_offset()), part.numel(), piece.numel())
            for piece, part in buffer._cut(source)
        ]
    assert [size for _, size, _ in parts] == [size for _, _, size in parts] == piece_sizes(count)
    assert [at + size for at, size, _ in parts][:-1] == [at for at, _, _ in parts][1:]
    assert parts[0][0] == 0
    assert parts[-1][0] + parts[-1][1] == count
    assert parts[-1][0] > 2**31
