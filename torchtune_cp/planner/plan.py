"""A plan: what each rank of a mesh would need for one optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from torchtune_cp.config import FullFinetuneConfig
from torchtune_cp.planner.cluster import Cluster
from torchtune_cp.planner.devices import GIB, Device
from torchtune_cp.planner.estimate import Conditions, StepTime, step_time
from torchtune_cp.planner.methods import packs_documents
from torchtune_cp.planner.processes import run_apart
from torchtune_cp.planner.profile import Moment, Profile

#: Note on every plan for a GPU.
UNCALIBRATED = (
    "tensors are simulated to the byte; context, NCCL buffers, fragmentation, attention's kernel"
    " workspaces and times are estimates that have not been compared with a GPU yet"
)

#: Note on the plan of a config that packs documents.
PACKED = (
    "dataset.packed=true: planned as one document as long as the row; several in a row take fewer operations"
    " of attention and about the same memory"
)


@dataclass
class Plan:
    """One optimizer step of a config, as its most loaded rank sees it.

    Attributes:
        cfg: The config.
        cluster: Where it would run.
        degrees: Ranks along each mesh dimension: dp_replicate, dp_shard, cp, tp.
        seq_len: Tokens of a sequence.
        ranks: The planned ranks' profiles.
        rank: The rank with the highest peak.
        estimates: Estimated bytes on the device besides the tensors of the step, by category.
        host_estimates: The same on the host, of one rank.
        time: The estimated step.
        notes: What is not as in the run.
    """

    cfg: FullFinetuneConfig
    cluster: Cluster
    degrees: dict[str, int]
    seq_len: int
    ranks: dict[int, Profile]
    rank: int
    estimates: dict[str, int]
    host_estimates: dict[str, int]
    time: StepTime
    notes: list[str] = field(default_factory=list)

    @property
    def profile(self) -> Profile:
        """Of the rank with the highest peak."""
        return self.ranks[self.rank]

    @property
    def peak(self) -> Moment:
        """The moment of the peak of tensor bytes on the device."""
        return self.profile.peak

    @property
    def needed(self) -> int:
        """Bytes that the device must have."""
        return self.peak.total + sum(self.estimates.values())

    @property
    def host_tensors(self) -> int:
        """Bytes that the tensors on the host take there, of the rank that has most."""
        return max(profile.host_needed for profile in self.ranks.values())

    @property
    def host_node(self) -> int:
        """Bytes of host memory that a node must have."""
        return self.cluster.on_a_node * (self.host_tensors + sum(self.host_estimates.values()))

    @property
    def load(self) -> float:
        """Share of the device's or of the node's memory that is needed, whichever is larger."""
        return max(
            self.needed / self.cluster.device.memory, self.host_node / self.cluster.host_memory
        )

    @property
    def fits(self) -> bool:
        """Whether the device and its node have what is needed."""
        return self.load <= 1

    @property
    def tokens(self) -> int:
        """Tokens of an optimizer step of all ranks."""
        dp = self.degrees["dp_replicate"] * self.degrees["dp_shard"]
        return dp * self.cfg.batch_size * self.cfg.gradient_accumulation_steps * self.seq_len

    @property
    def tokens_per_second(self) -> float:
        """Of one rank."""
        return self.tokens / self.cluster.size / self.time.total if self.time.total else 0.0


def mesh_degrees(cfg: FullFinetuneConfig, world_size: int) -> dict[str, int]:
    """Ranks along each mesh dimension, with the remaining one inferred."""
    rest = cfg.data_parallel_replicate_dim * cfg.context_parallel_dim * cfg.tensor_parallel_dim
    shard = cfg.data_parallel_shard_dim
    return {
        "dp_replicate": cfg.data_parallel_replicate_dim,
        "dp_shard": world_size // rest if shard == -1 else shard,
        "cp": cfg.context_parallel_dim,
        "tp": cfg.tensor_parallel_dim,
    }


def planned_ranks(degrees: dict[str, int]) -> list[int]:
    """The ranks that differ: the first and the last of a context-parallel group.

    Data-parallel ranks do the same on other samples, tensor-parallel ones on other columns. Within a ring
    the ranks compute other blocks, and the first and the last are the extremes.
    """
    return sorted({0, (degrees["cp"] - 1) * degrees["tp"]})


def crossing_nodes(degrees: dict[str, int], per_node: int) -> dict[str, bool]:
    """For each mesh dimension whether its groups have ranks on several nodes.

    Args:
        degrees: Ranks along each dimension; the innermost, tp, are neighbours.
        per_node: Ranks of a node.
    """
    replicate, shard, cp, tp = (degrees[n] for n in ("dp_replicate", "dp_shard", "cp", "tp"))
    reach = {
        "tp": tp,
        "cp": cp * tp,
        "fsdp": shard * cp * tp,
        "dp": replicate * shard * cp * tp,
        "loss": replicate * shard * cp * tp,
        "dp_replicate": replicate * shard * cp * tp,
        "world": replicate * shard * cp * tp,
    }
    return {name: ranks > per_node for name, ranks in reach.items()}


def tasks_of(
    cfg: FullFinetuneConfig,
    cluster: Cluster,
    seq_len: int,
    *,
    exact: bool = False,
    ranks: list[int] | None = None,
) -> list[dict[str, Any]]:
    """The simulations that a plan is made of: arguments of `rank_profile`."""
    degrees = mesh_degrees(cfg, cluster.size)
    return [
        {
            "cfg": cfg,
            "rank": rank,
            "world_size": cluster.size,
            "seq_len": seq_len,
            "gpu": cluster.device.is_gpu,
            "exact": exact,
        }
        for rank in (planned_ranks(degrees) if ranks is None else ranks)
    ]


def plan_of(
    cfg: FullFinetuneConfig, cluster: Cluster, seq_len: int, ranks: dict[int, Profile]
) -> Plan:
    """Put the simulated ranks together.

    Args:
        cfg: The run's config.
        cluster: Where it would run.
        seq_len: Tokens of a sequence.
        ranks: Profiles by rank.
    """
    degrees = mesh_degrees(cfg, cluster.size)
    device = cluster.device
    rank = max(ranks, key=lambda r: ranks[r].peak.total)
    profile = ranks[rank]
    estimates: dict[str, int] = {}
    if device.is_gpu:
        groups = len({transfer.mesh for transfer in profile.transfers})
        estimates = {
            "CUDA context and libraries": int(device.context),
            "NCCL buffers": int(device.communicator * groups),
            "fragmentation": int(device.fragmentation * profile.peak.total),
        }
    host_estimates = {"process": int(device.host_process)} if device.is_gpu else {}
    backlog = max(p.backlog for p in ranks.values())
    if backlog:
        host_estimates["waiting for the optimizer"] = backlog
    conditions = Conditions(
        spans=crossing_nodes(degrees, cluster.per_node),
        low_precision=cfg.dtype == "bf16",
        on_a_node=cluster.on_a_node,
        optimizer_overlaps=cfg.optimizer_on_host,
        waits_for_cp=cfg.context_parallel_method == "ulysses",
    )
    times = [step_time(p, device, conditions) for p in ranks.values()]
    slowest = max(times, key=lambda t: t.total)
    return Plan(
        cfg=cfg,
        cluster=cluster,
        degrees=degrees,
        seq_len=seq_len,
        ranks=ranks,
        rank=rank,
        estimates=estimates,
        host_estimates=host_estimates,
        time=slowest,
        notes=_notes(cfg, device),
    )


def _notes(cfg: FullFinetuneConfig, device: Device) -> list[str]:
    notes = [UNCALIBRATED] if device.is_gpu else []
    if cfg.compile:
        notes.append(
            "compile: planned as if it were false; a compiled layer keeps no more than that"
        )
    if packs_documents(cfg):
        notes.append(PACKED)
    if cfg.enable_fp8_training:
        notes.append("enable_fp8_training: planned as emulated float8; its products count as bf16")
    if device.is_gpu and cfg.dtype == "fp32":
        notes.append(
            "dtype=fp32: attention is planned as the memory-efficient kernel, or without one"
        )
    return notes


def make_plan(
    cfg: FullFinetuneConfig, cluster: Cluster, seq_len: int, *, exact: bool = False
) -> Plan:
    """Simulate the ranks that differ and put them together.

    Args:
        cfg: The run's config.
        cluster: Where it would run.
        seq_len: Tokens of a sequence.
        exact: Run all layers rather than extrapolate from a few.
    """
    from torchtune_cp.planner.simulate import rank_profile

    tasks = tasks_of(cfg, cluster, seq_len, exact=exact)
    profiles = run_apart(rank_profile, tasks)
    ranks = {task["rank"]: profile for task, profile in zip(tasks, profiles, strict=True)}
    return plan_of(cfg, cluster, seq_len, ranks)


def divisor(degrees: dict[str, int]) -> int:
    """What a sequence is padded to a multiple of; see `ParallelDims.min_seq_len_divisor`."""
    return (2 * degrees["cp"] if degrees["cp"] > 1 else 1) * degrees["tp"]


def in_words(count: float) -> str:
    """Bytes for people."""
    if not math.isfinite(count):
        return "no limit"
    for unit, size in (("GiB", GIB), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
