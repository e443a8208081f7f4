"""The data loader of context parallelism: one rank of a group reads, every rank gets its slices.

Within a data-parallel group the first rank reads samples, tokenises, masks and packs them; the others get
their part of each batch as tensors. All of it runs in a background thread, one batch ahead of training.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from torchtune_cp.attention import AttentionMask
from torchtune_cp.data.collate import collate
from torchtune_cp.data.loader import CollateFn, MapDataset, TokenDataLoader
from torchtune_cp.data.resumable_loader import ResumableLoader
from torchtune_cp.data.sampler import GlobalBatchSampler
from torchtune_cp.data.slice_channel import (
    BATCH,
    END,
    ERROR,
    USER_ERROR,
    Message,
    Readers,
    SliceChannel,
    encoded,
)
from torchtune_cp.distributed.context_parallel.cut import balanced_slices
from torchtune_cp.errors import UserError

#: Seconds that `close` waits for a transfer that is under way.
_CLOSING_S = 30.0


@dataclass(frozen=True)
class LoaderGroup:
    """Who shares batches with this rank, and who reads.

    Attributes:
        ranks: The global ranks of this data-parallel group, those of a context-parallel rank side by side;
            the first one reads.
        cp: Context-parallel degree.
        dp_rank: This group's place among the data-parallel groups.
        dp_degree: Their number.
        peers: The ranks at this one's place in every group, this rank alone where the others are not known.
    """

    ranks: list[int]
    cp: int
    dp_rank: int
    dp_degree: int
    peers: list[int]

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> LoaderGroup:
        """Read them off a device mesh: "cp" and "tp" share, every other dimension is data-parallel.

        Args:
            mesh: Has named dimensions; those that are missing have the size 1.

        Raises:
            UserError: The dimensions have no names.
        """
        names = mesh.mesh_dim_names
        if names is None:
            raise UserError(
                "create_cp_dataloader: the mesh's dimensions have no names; give init_device_mesh"
                ' mesh_dim_names=("dp_shard", "cp") or the like'
            )
        shared = [names.index(name) for name in ("cp", "tp") if name in names]
        others = [place for place in range(len(names)) if place not in shared]
        ranks = mesh.mesh.permute(*others, *shared).cpu()
        groups = ranks.reshape(-1, torch.Size(ranks.shape[len(others) :]).numel())
        mine = int((groups == dist.get_rank()).any(1).nonzero())
        return cls(
            ranks=groups[mine].tolist(),
            cp=mesh.size(names.index("cp")) if "cp" in names else 1,
            dp_rank=mine,
            dp_degree=len(groups),
            peers=groups[:, groups[mine].tolist().index(dist.get_rank())].tolist(),
        )

    @classmethod
    def of_group(
        cls,
        group: dist.ProcessGroup | None,
        size: int | None,
        rank: int | None,
        dp_rank: int,
        dp_degree: int,
    ) -> LoaderGroup:
        """Take a context-parallel process group, and who reads which samples from the caller.

        Raises:
            UserError: `size` or `rank` are not those of the group.
        """
        ranks = [dist.get_rank() if dist.is_initialized() else 0]
        if group is not None:
            ranks = dist.get_process_group_ranks(group)
        own = ranks.index(dist.get_rank()) if len(ranks) > 1 else 0
        for name, given, actual in (
            ("cp_world_size", size, len(ranks)),
            ("cp_rank", rank, own),
        ):
            if given is not None and given != actual:
                raise UserError(
                    f"create_cp_dataloader: {name}={given}, but cp_group has {actual}; give the group"
                    " of the ranks that share each sequence"
                )
        return cls(ranks, len(ranks), dp_rank, dp_degree, [ranks[own]])


class _Prefetcher:
    """Calls a function in a background thread when asked to; the answer is fetched later.

    All ranks ask in the same order, as they train in step. So nobody has to be told when to stop: a
    transfer that some rank takes part in is one that all have asked for.
    """

    def __init__(self, call: Callable[[], Message | BaseException]) -> None:
        self._call = call
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Message | BaseException] = queue.SimpleQueue()
        self._waiting = 0
        # A daemon: a rank that fails must not wait for those it will never hear from again.
        self._thread = threading.Thread(target=self._work, name="cp_loader", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while self._asked.get():
            self._answers.put(self._call())

    def ask(self) -> None:
        self._waiting += 1
        self._asked.put(True)

    def fetch(self) -> Message | BaseException:
        answer = self._answers.get()
        self._waiting -= 1
        return answer

    def drain(self) -> None:
        """Fetch what an iteration that was given up has asked for."""
        while self._waiting:
            self.fetch()

    def close(self) -> None:
        self._asked.put(False)
        self._thread.join(_CLOSING_S)


class CPDataLoader(ResumableLoader):
    """Iterates over this rank's slices of each batch; made by `create_cp_dataloader`.

    Batches are dicts of CPU tensors: the entries of the collate function's batch, those of the shape of
    `tokens` cut along the sequence, [1, n], and what tells `context_parallel` that they are, and how. An
    iteration may be given up at any batch, on all ranks alike.
    """

    def __init__(
        self,
        make_reader: Callable[[], TokenDataLoader],
        make_sampler: Callable[[int], GlobalBatchSampler],
        group: LoaderGroup,
        is_causal: bool,
    ) -> None:
        """See `create_cp_dataloader`."""
        self._channel = SliceChannel(group.ranks)
        self._copies = len(group.ranks) // group.cp
        self._cp = group.cp
        self._mask = AttentionMask(is_causal)
        self._reader: TokenDataLoader | None = None
        self._source: Iterator[dict[str, torch.Tensor]] = iter(())
        self._own_error: BaseException | None = None
        # Not by the readers alone: torch names a group after the number of those that a rank has.
        self._peers = Readers(group.peers)
        self._readers = self._peers if self._channel.is_reader else None
        start = self._exchange(self._count_samples, make_reader)
        counted = _unless_failed(start, self._own_error)
        super().__init__(make_sampler(counted.number))
        self.order_settings = counted.text
        self._ahead: _Prefetcher | None = _Prefetcher(lambda: self._exchange(self._next_batch))

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        """This rank's slices of the current epoch's batches.

        Raises:
            UserError: On all ranks, for a sample that one of them could not read.
        """
        if self._ahead is None:
            raise RuntimeError("this data loader is closed")
        self._ahead.drain()
        start = self.begin()
        if self._reader is not None:
            self._reader.start_at(self.epoch, start)
            self._source = iter(self._reader)
        return self._slices(self._ahead)

    def _slices(self, ahead: _Prefetcher) -> Iterator[dict[str, torch.Tensor]]:
        ahead.ask()
        while True:
            message = _unless_failed(ahead.fetch(), self._own_error)
            if message.kind == END:
                return
            ahead.ask()
            assert message.entries is not None
            self._position = message.number
            yield dict(message.entries)

    def close(self) -> None:
        """End the background thread and give the process groups back; every rank has to call this."""
        if self._ahead is None:
            return
        self._ahead.close()
        self._ahead = None
        self._source = iter(())
        self._channel.close()
        self._peers.close()

    def stream_place(self, position: int) -> dict[str, int]:
        """See `ResumableLoader`."""
        return {} if self._reader is None else self._reader.stream_place(position)

    def start_stream_at(self, place: dict[str, int]) -> None:
        """See `ResumableLoader`."""
        if self._ahead is not None:
            self._ahead.drain()  # nothing may be read meanwhile
        if self._reader is not None:
            self._reader.start_stream_at(place)

    # --- in the background ----------------------------------------------------------------------

    def _exchange(self, read: Callable[..., list[Message]], *args: Any) -> Message | BaseException:
        """Read and send, or receive; errors come back as values."""
        try:
            if self._readers is None:
                return self._channel.receive()
            everybody = self._copies * self._cp
            try:
                messages = read(*args)
                bodies = _bodies(messages)
            except UserError as error:
                self._own_error = error
                messages = [Message(USER_ERROR, text=str(error))] * everybody
            except Exception as error:  # noqa: BLE001 - raised again by the main thread
                self._own_error = error
                messages = [Message(ERROR, text=f"{type(error).__name__}: {error}")] * everybody
            try:
                agreed = self._readers.agree(messages[0])
            except UserError as error:
                self._own_error = error
                agreed = Message(USER_ERROR, text=str(error))
            if agreed is not messages[0] or agreed.kind != BATCH:
                messages = [agreed] * everybody
                bodies = _bodies(messages)
            return self._channel.send(messages, bodies)
        except Exception as error:  # noqa: BLE001 - a lost connection: likewise
            return error

    def _count_samples(self, make_reader: Callable[[], TokenDataLoader]) -> list[Message]:
        self._reader = make_reader()
        samples = self._reader.global_sampler.num_samples
        start = Message(END, samples, text=self._reader.order_settings)
        return [start] * (self._copies * self._cp)

    def _next_batch(self) -> list[Message]:
        assert self._reader is not None
        batch = next(self._source, None)
        if batch is None:
            return [Message(END)] * (self._copies * self._cp)
        place = self._reader.samples_read
        slices = balanced_slices(batch, self._cp, self._mask)
        messages = [Message(BATCH, place, entries) for entries in slices]
        return [message for message in messages for _ in range(self._copies)]


def _bodies(messages: list[Message]) -> list[torch.Tensor]:
    """What is sent to all but the reader; equal messages are encoded once."""
    made: dict[int, torch.Tensor] = {}
    for message in messages[1:]:
        if id(message) not in made:
            made[id(message)] = encoded(message)
    return [made[id(message)] for message in messages[1:]]


def _unless_failed(answer: Message | BaseException, own: BaseException | None) -> Message:
    if isinstance(answer, BaseException):
        raise answer
    if answer.kind in (USER_ERROR, ERROR):
        if own is not None:
            raise own
        error = UserError(answer.text) if answer.kind == USER_ERROR else RuntimeError(answer.text)
        # Whoever reports the run's failure looks for the rank that it began on.
        error.from_another_rank = True  # type: ignore[union-attr]
        raise error
    return answer


def create_cp_dataloader(
    dataset: MapDataset | Callable[[], MapDataset],
    mesh: DeviceMesh | None = None,
    *,
    cp_group: dist.ProcessGroup | None = None,
    cp_world_size: int | None = None,
    cp_rank: int | None = None,
    dp_rank: int = 0,
    dp_degree: int = 1,
    collate_fn: CollateFn = collate,
    batch_size: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = True,
    num_workers: int = 0,
    is_causal: bool = False,
) -> tuple[CPDataLoader, GlobalBatchSampler]:
    """Make the data loader of this rank; all ranks of the mesh (or of `cp_group`) have to call this.

    The first rank of each data-parallel group reads: its context-parallel peers get their slices of each
    batch, tensor-parallel peers copies of them.

    Args:
        dataset: Map-style, or a function that makes it, which is called where samples are read only.
            `dataset[i]` gives "tokens" and "labels". One with a `set_epoch` is told the epoch.
        mesh: The process mesh with named dimensions: "cp" and "tp" share batches, every other dimension
            reads other samples.
        cp_group: In place of `mesh`: the ranks that share each sequence. None with neither: one rank.
        cp_world_size: Checked against `cp_group`.
        cp_rank: Checked against `cp_group`.
        dp_rank: With `cp_group`: this group's place among those that read different samples.
        dp_degree: With `cp_group`: their number.
        collate_fn: Makes a whole batch of a list of samples: CPU tensors `tokens` [b, s], and what else
            the model needs. Its documents (`cu_seqlens`, `seq_lens`; without them its rows) are given to the
            context-parallel ranks by the work that they are: short ones whole, long ones in parts.
        batch_size: Samples of a batch.
        shuffle: Whether each epoch has its own random order.
        seed: Of the orders.
        drop_last: True leaves an incomplete last global batch out; False fills it with empty samples.
        num_workers: Worker processes that read ahead on the reading rank.
        is_causal: Whether the model's attention is: what its work is counted for.

    Returns:
        The loader (`set_epoch`, `state_dict`, `load_state_dict`, `close`), and the sampler that knows the
        order of the samples.

    Raises:
        UserError: On all ranks: a dataset that cannot be made or has too few samples. A malformed mesh or
            group.
    """
    if mesh is not None and (cp_group is not None or dp_degree != 1):
        raise UserError(
            "create_cp_dataloader: give either a mesh, or cp_group, dp_rank and dp_degree"
        )
    group = (
        LoaderGroup.of_group(cp_group, cp_world_size, cp_rank, dp_rank, dp_degree)
        if mesh is None
        else LoaderGroup.of_mesh(mesh)
    )

    def sampler(num_samples: int) -> GlobalBatchSampler:
        return GlobalBatchSampler(
            num_samples,
            batch_size=batch_size,
            dp_rank=group.dp_rank,
            dp_degree=group.dp_degree,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
        )

    def reader() -> TokenDataLoader:
        # Asked of the type: a class can be given as the function that makes its objects.
        given: Any = dataset
        made = given if hasattr(type(given), "__getitem__") else given()
        return TokenDataLoader(made, sampler(len(made)), collate_fn, num_workers)

    loader = CPDataLoader(reader, sampler, group, is_causal)
    return loader, loader.global_sampler
