"""From the one rank that reads to those that share its batches: tensors as safetensors, nothing pickled.

A message is a header of three int64 (what it is, a number, bytes of the body) and a body: a batch as
safetensors lay it out, or the text of an error. They travel on a process group of their own, so that a
background thread may use it beside the collectives of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save

from torchtune_cp.errors import UserError

#: What a message says.
BATCH, END, USER_ERROR, ERROR = range(4)

# A rank that waits here waits for its reader, which may be busy with anything for any time. If the reader
# dies, its connections break; if it hangs, the collectives of training run into their own time-out.
_TIMEOUT = timedelta(days=7)


@dataclass(frozen=True)
class Message:
    """What a reader sends.

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


def checked_entries(entries: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Refuse entries of a batch that cannot be sent.

    Raises:
        UserError: Naming the entry.
    """
    for name, entry in entries.items():
        if (
            not isinstance(entry, torch.Tensor)
            or entry.device.type != "cpu"
            or entry.layout != torch.strided
        ):
            what = (
                f"a {entry.layout} tensor on {entry.device}"
                if isinstance(entry, torch.Tensor)
                else f"a {type(entry).__name__}"
            )
            raise UserError(
                f"batch entry {name!r} is {what}; a collate function gives dense CPU tensors"
            )
    return entries


def encoded(message: Message) -> torch.Tensor:
    """The body of a message, bytes.

    Raises:
        UserError: An entry that cannot be sent.
    """
    if message.entries is None:
        body = message.text.encode()
    else:
        whole = {
            name: entry.contiguous() for name, entry in checked_entries(message.entries).items()
        }
        try:
            body = save(whole)
        except (SafetensorError, ValueError, KeyError) as error:
            dtypes = ", ".join(f"{name} {entry.dtype}" for name, entry in whole.items())
            raise UserError(f"a batch cannot be sent: {error} ({dtypes})") from error
    return torch.frombuffer(bytearray(body or b" "), dtype=torch.uint8)


#: Module-level state, for they outlive the loaders: groups that no loader uses any more, by their ranks, and
#: the default group that they were made under. A destroyed group's name would be given again to a new one of
#: the same ranks, which would then meet under the addresses that the old one left in the store; so none is
#: destroyed by itself.
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

    def send(self, messages: Sequence[Message], bodies: Sequence[torch.Tensor]) -> Message:
        """Send each rank its message, as the reader.

        Args:
            messages: For each rank; the first is the reader's own and not sent.
            bodies: What :func:`encoded` made of the others.

        Returns:
            The reader's own.
        """
        started = []
        for rank, message, body in zip(self._ranks[1:], messages[1:], bodies, strict=True):
            header = torch.tensor([message.kind, message.number, len(body)])
            started += [dist.isend(part, rank, group=self._group) for part in (header, body)]
        for work in started:
            assert work is not None, "only ranks of the group send"
            work.wait()
        return messages[0]

    def receive(self) -> Message:
        """Wait for what the reader sends, as one of the others."""
        header = torch.empty(3, dtype=torch.int64)
        dist.recv(header, self._ranks[0], group=self._group)
        kind, number, size = header.tolist()
        body = torch.empty(size, dtype=torch.uint8)
        dist.recv(body, self._ranks[0], group=self._group)
        content = body.numpy().tobytes()
        if kind == BATCH:
            return Message(kind, number, load(content))
        return Message(kind, number, text=content.decode().strip())

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
