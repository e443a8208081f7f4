"""From the one rank that reads to those that share its batches: tensors, and nothing pickled.

A message is one buffer of bytes for each rank: a header of a fixed number of int64 that tells the layout,
then the tensors, integers in as few bytes as their values need. What a batch costs is latency more than
bytes, so header and tensors travel together: sender and receiver know from the batch before how many bytes
come first, and only what a larger batch has beyond that follows by itself. They travel on a process group of
their own, so that a background thread may use it beside the collectives of training.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from torchtune_cp.data.cut import CutBatch
from torchtune_cp.errors import UserError

#: What a message says.
BATCH, END, USER_ERROR, ERROR = range(4)

_DTYPES = (
    torch.int64,
    torch.int32,
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.bool,
    torch.uint8,
    torch.int16,
    torch.int8,
)
_MOST_ENTRIES, _MOST_DIMS, _NAME_BYTES = 48, 4, 32
_NAME = f"<{_NAME_BYTES // 8}q"  # a name as so many int64
# kind, bytes in all, number, entries; then for each entry dtype, dtype on the way, dimensions, sizes, name
_FIRST = 4
_PER_ENTRY = 3 + _MOST_DIMS + _NAME_BYTES // 8
_HEADER = _FIRST + _MOST_ENTRIES * _PER_ENTRY
#: Entries begin at multiples of this many bytes, so that they can be viewed in place.
_ALIGNMENT = 16
#: Where the tensors (or an error's text) begin.
_BODY = -(-8 * _HEADER // _ALIGNMENT) * _ALIGNMENT
#: What integers travel as, the first that holds them.
_NARROWER = (torch.int8, torch.int16, torch.int32)

# A rank that waits here waits for its reader, which may be busy with anything for any time. If the reader
# dies, its connections break; if it hangs, the collectives of training run into their own time-out.
_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class Message:
    """What a reader tells.

    Attributes:
        kind: BATCH, END, USER_ERROR or ERROR.
        number: With BATCH: the reader's place in the data after it; at the start, a count.
        entries: With BATCH: the receiving rank's tensors by name.
        text: Of an error.
    """

    kind: int
    number: int = 0
    entries: Mapping[str, torch.Tensor] | None = None
    text: str = ""


#: Groups that no loader uses any more, by their ranks, and the default group that they were made under.
#: A destroyed group's name would be given again to a new one of the same ranks, which would then meet
#: under the addresses that the old one left in the store; so none is destroyed by itself.
_free: dict[tuple[int, ...], list[dist.ProcessGroup]] = {}
_free_of: dist.ProcessGroup | None = None


def take_group(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Make a gloo group for CPU tensors, or take one that was given back.

    Args:
        ranks: Global ranks; they alone have to call this, all of them in the same order and, since torch
            names a group after the number of those that a rank has, with as many groups before.

    Returns:
        The group, None for a single rank.
    """
    global _free_of
    if len(ranks) < 2:
        return None
    if _free_of is not dist.group.WORLD:  # the processes have met anew since
        _free.clear()
        _free_of = dist.group.WORLD
    if _free.get(tuple(ranks)):
        return _free[tuple(ranks)].pop()
    return dist.new_group(
        list(ranks), backend="gloo", timeout=_TIMEOUT, use_local_synchronization=True
    )


def give_back(group: dist.ProcessGroup | None) -> None:
    """Let another loader of the same ranks have a group; nothing may be under way on it."""
    if group is not None and dist.is_initialized() and _free_of is dist.group.WORLD:
        _free.setdefault(tuple(dist.get_process_group_ranks(group)), []).append(group)


class Parcel:
    """A message made ready to be sent: nothing can go wrong with it any more."""

    def __init__(self, message: Message, batch: CutBatch | None = None, copies: int = 1) -> None:
        """Lay a message out.

        Args:
            message: What to tell; for BATCH without its entries.
            batch: With BATCH: what the ranks get.
            copies: How many ranks one behind the other get the same part of it.

        Raises:
            UserError: An entry that cannot be sent.
        """
        self._copies = 0  # of each row of the buffers
        if message.kind == BATCH:
            assert batch is not None
            self.message = Message(BATCH, message.number, batch.of_rank(0))
            self._copies = copies
            # The reader's own part is not sent, but to those that get the same.
            self._first_row = 0 if copies > 1 else 1
            self._buffers, self.size = _encode(message.number, batch, self._first_row)
        else:
            self.message = message
            text = bytearray(message.text.encode() or b" ")
            self.size = _BODY + len(text)
            self._buffers = torch.zeros(1, _with_room(self.size), dtype=torch.uint8)
            self._buffers[0, : 8 * _FIRST].view(torch.int64).copy_(
                torch.tensor([message.kind, self.size, message.number, 0])
            )
            self._buffers[0, _BODY : self.size] = torch.frombuffer(text, dtype=torch.uint8)

    def for_other(self, place: int, begin: int, end: int) -> torch.Tensor:
        """Bytes `begin` to `end` of what a rank behind the reader gets.

        Args:
            place: Of the rank among those that share batches, from 1 on.
            begin: First byte.
            end: Past the last; may be more than there is.
        """
        row = place // self._copies - self._first_row if self._copies else 0
        part = self._buffers[row, begin:end]
        lacking = end - begin - len(part)
        return F.pad(part, (0, lacking)) if lacking else part  # padding by nothing copies, too


class SliceChannel:
    """Carries messages from the first of some ranks to the others."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Make the process group; all of its ranks have to call this.

        Args:
            ranks: Global ranks; the first one reads.
        """
        self._ranks = list(ranks)
        self._group = take_group(self._ranks)
        self.is_reader = self._group is None or dist.get_rank() == self._ranks[0]
        self._at_first = _BODY

    def send(self, parcel: Parcel) -> Message:
        """Tell the others, as the reader; returns the message as the reader's own rank gets it."""
        if self._group is not None:
            self._send_all(parcel, 0, self._at_first)
            if parcel.size > self._at_first:
                self._send_all(parcel, self._at_first, parcel.size)
            self._expect(parcel.message.kind, parcel.size)
        return parcel.message

    def _send_all(self, parcel: Parcel, begin: int, end: int) -> None:
        started = [
            dist.isend(parcel.for_other(place, begin, end), rank, group=self._group)
            for place, rank in enumerate(self._ranks[1:], start=1)
        ]
        for work in started:
            assert work is not None, "only ranks of the group send"
            work.wait()

    def receive(self) -> Message:
        """Wait for what the reader tells, as one of the others."""
        buffer = torch.empty(self._at_first, dtype=torch.uint8)
        dist.recv(buffer, self._ranks[0], group=self._group)
        header = buffer[: 8 * _HEADER].view(torch.int64)
        kind, size, number, _ = header[:_FIRST].tolist()
        if size > len(buffer):
            rest = torch.empty(size - len(buffer), dtype=torch.uint8)
            dist.recv(rest, self._ranks[0], group=self._group)
            buffer = torch.cat([buffer, rest])
        self._expect(kind, size)
        if kind == BATCH:
            return Message(kind, number, _decode(header, buffer))
        return Message(kind, number, text=bytes(buffer[_BODY:size].tolist()).decode().strip())

    def _expect(self, kind: int, size: int) -> None:
        """Agree, without a word, on how much of the next message comes first: some more than of this."""
        if kind == BATCH:
            self._at_first = _aligned(size + size // 8)

    def close(self) -> None:
        """Give the process group back."""
        give_back(self._group)
        self._group = None


class Readers:
    """The reading ranks of all data-parallel groups, which end and fail together."""

    def __init__(self, ranks: Sequence[int]) -> None:
        """Make the process group; all of its ranks have to call this.

        Args:
            ranks: Global ranks.
        """
        self._ranks = list(ranks)
        self._group = take_group(self._ranks)

    def agree(self, message: Message) -> Message:
        """Tell the others how this rank's reading went.

        Args:
            message: What this rank has to say.

        Returns:
            It, unless another rank's data has ended or could not be read: then that.

        Raises:
            UserError: On all of them, where they have different numbers to tell: their data differ.
        """
        if self._group is None:
            return message
        kinds = [torch.zeros(3, dtype=torch.int64) for _ in self._ranks]
        text = message.text.encode()
        told = torch.tensor([message.kind, len(text), message.number])
        dist.all_gather(kinds, told, group=self._group)
        worst = max(range(len(kinds)), key=lambda place: int(kinds[place][0]))
        kind, size, _ = kinds[worst].tolist()
        numbers = [int(k[2]) for k in kinds]
        if all(int(k[0]) == kind for k in kinds) and len(set(numbers)) > 1:
            raise UserError(
                f"the data-parallel ranks read different data: they count {numbers} samples; give all"
                " of them the same dataset"
            )
        if kind == BATCH or (kind == END and message.kind == END):
            return message
        if kind == END:
            return Message(END)
        # A byte more than the text, for an empty one.
        buffer = torch.zeros(size + 1, dtype=torch.uint8)
        if dist.get_rank() == self._ranks[worst]:
            buffer[:size] = torch.tensor(list(text), dtype=torch.uint8)
        dist.broadcast(buffer, src=self._ranks[worst], group=self._group)
        if message.kind == kind:
            return message  # its own mistake, in its own words
        return Message(kind, text=bytes(buffer[:size].tolist()).decode())

    def close(self) -> None:
        """Give the process group back."""
        give_back(self._group)
        self._group = None


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _with_room(size: int) -> int:
    """Bytes for a message and what is sent more of it when the one before was larger, as a rule."""
    return _aligned(size + size // 4)


def _wire_dtype(entry: torch.Tensor) -> torch.dtype:
    """The narrowest dtype that holds an entry, where it is one of integers."""
    dtype = entry.dtype
    if dtype not in (torch.int64, torch.int32, torch.int16) or not entry.numel():
        return dtype
    ends = entry.aminmax()
    low, high = int(ends.min), int(ends.max)
    for narrow in _NARROWER:
        info = torch.iinfo(narrow)
        if narrow.itemsize < dtype.itemsize and info.min <= low and high <= info.max:
            return narrow
    return dtype


def _encode(number: int, batch: CutBatch, first_row: int) -> tuple[torch.Tensor, int]:
    """Lay a batch out in a buffer for each part from `first_row` on; gives them and the bytes used."""
    if len(batch.entries) > _MOST_ENTRIES:
        raise UserError(
            f"a batch of {len(batch.entries)} entries; at most {_MOST_ENTRIES} can be sent"
        )
    # Plain numbers, and one tensor of them at the end: what a batch costs are the many small calls.
    rows: list[int] = []
    places: list[tuple[str, int, int, torch.dtype]] = []
    total = _BODY
    for name, entry in batch.entries.items():
        encoded = name.encode()
        _check_entry(name, encoded, entry, whole=name not in batch.cut)
        shape = entry.shape[1:] if name in batch.cut else entry.shape
        wire = _wire_dtype(entry)
        rows += [_DTYPES.index(entry.dtype), _DTYPES.index(wire), len(shape)]
        rows += [*shape, *[0] * (_MOST_DIMS - len(shape))]
        rows += struct.unpack(_NAME, encoded.ljust(_NAME_BYTES, b"\0"))
        size = shape.numel() * wire.itemsize
        places.append((name, total, total + size, wire))
        total += _aligned(size)
    header = torch.tensor([BATCH, total, number, len(batch.entries), *rows])
    buffers = torch.zeros(batch.cp - first_row, _with_room(total), dtype=torch.uint8)
    buffers[:, : 8 * len(header)] = header.view(torch.uint8)
    for name, begin, end, wire in places:
        entry = batch.entries[name]
        # Casts, all parts at once.
        given = entry[first_row:].flatten(1) if name in batch.cut else entry.flatten()
        buffers[:, begin:end].view(wire).copy_(given)
    return buffers, total


def _check_entry(name: str, encoded: bytes, entry: Any, *, whole: bool) -> None:
    if (
        not isinstance(entry, torch.Tensor)
        or entry.device.type != "cpu"
        or entry.dtype not in _DTYPES
        or entry.ndim > _MOST_DIMS + (not whole)
        or len(encoded) > _NAME_BYTES
    ):
        what = (
            f"a {entry.dtype} tensor {list(entry.shape)} on {entry.device}"
            if isinstance(entry, torch.Tensor)
            else f"a {type(entry).__name__}"
        )
        raise UserError(
            f"batch entry {name!r} is {what}; a collate function gives CPU tensors of plain dtypes"
            f" with at most {_MOST_DIMS} dimensions, under names of at most {_NAME_BYTES} bytes"
        )


def _decode(header: torch.Tensor, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    entries, at = {}, _BODY
    numbers = header.tolist()
    for place in range(numbers[3]):
        row = numbers[_FIRST + place * _PER_ENTRY :][:_PER_ENTRY]
        dtype, wire, shape = _DTYPES[row[0]], _DTYPES[row[1]], row[3 : 3 + row[2]]
        size = math.prod(shape) * wire.itemsize
        name = struct.pack(_NAME, *row[3 + _MOST_DIMS :]).rstrip(b"\0").decode()
        entries[name] = buffer[at : at + size].view(wire).view(shape).to(dtype)
        at += _aligned(size)
    return entries
