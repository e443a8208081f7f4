"""Ranks the meshes, attention methods and memory options of a world size that fit by estimated time."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

from omegaconf import OmegaConf

from torchtune_cp.config import FullFinetuneConfig, component_callable
from torchtune_cp.config.combinations import combination_problems
from torchtune_cp.distributed.context_parallel.heads import HeadChunks, ulysses_degree
from torchtune_cp.errors import UserError
from torchtune_cp.planner.cluster import Cluster
from torchtune_cp.planner.plan import Plan, plan_of, planned_ranks, tasks_of
from torchtune_cp.planner.processes import run_apart

#: What nothing is saved with.
NO_LEVER: dict[str, Any] = {
    "enable_activation_checkpointing": False,
    "ac_mode": None,
    "ac_option": None,
    "mlp_tile_tokens": None,
    "loss.reuse_hidden": False,
    "attention_head_chunks": None,
    "enable_activation_offloading": False,
    "optimizer_in_bwd": False,
    "optimizer_on_host": False,
    "fsdp_cpu_offload": False,
}

#: Levers from those that cost least to those that cost most, each on top of those before it. A `.` leads
#: to an argument of a component.
LEVERS: tuple[dict[str, Any], ...] = (
    {"ac_mode": "selective", "ac_option": "op"},
    {"enable_activation_checkpointing": True, "ac_mode": None, "ac_option": None},
    {"mlp_tile_tokens": 4096, "loss.reuse_hidden": True},
    {"optimizer_in_bwd": True},
    {"enable_activation_offloading": True},
    {"attention_head_chunks": 8},  # or as many as the heads can be done in
    {"optimizer_in_bwd": False, "optimizer_on_host": True},
    {"fsdp_cpu_offload": True},
)

#: Ways of attention over the ranks that share a sequence.
METHODS: tuple[dict[str, Any], ...] = (
    {"context_parallel_method": "ring", "context_parallel_rotate_method": "allgather"},
    {"context_parallel_method": "ring", "context_parallel_rotate_method": "alltoall"},
    {"context_parallel_method": "allgather", "context_parallel_rotate_method": "allgather"},
    {"context_parallel_method": "ulysses", "context_parallel_rotate_method": "allgather"},
)
#: On how many meshes the other methods are tried.
MESHES_FOR_METHODS = 2

#: Estimated speeds closer than this are no difference: the model is not that good.
SAME_SPEED = 0.02


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A mesh and levers with their plan.

    Attributes:
        overrides: The config keys to set.
        plan: Of the rank with the last slice of a sequence.
    """

    overrides: dict[str, Any]
    plan: Plan


def meshes(cluster: Cluster, sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    """All factorisations of a world size into data, context and tensor parallelism.

    Where a sequence fits into a node, the model is also sharded over the node only, the nodes being
    replicas: more memory, and what FSDP gathers stays within the node.

    Args:
        cluster: Tensor parallelism stays within a node.
        sizes: The model's; tensor parallelism must divide them.
    """
    for tp in range(1, cluster.per_node + 1):
        if cluster.size % tp or any(size % tp for size in sizes.values()):
            continue
        rest = cluster.size // tp
        for cp in range(1, rest + 1):
            if rest % cp:
                continue
            replicas = {1}
            if cluster.size > cluster.per_node and cluster.per_node % (cp * tp) == 0:
                replicas.add(cluster.size // cluster.per_node)
            for replicate in sorted(replicas):
                yield {
                    "data_parallel_replicate_dim": replicate,
                    "data_parallel_shard_dim": rest // cp // replicate,
                    "context_parallel_dim": cp,
                    "tensor_parallel_dim": tp,
                }


def overridden(cfg: FullFinetuneConfig, overrides: dict[str, Any]) -> FullFinetuneConfig:
    """A config with keys replaced.

    Args:
        cfg: The config; it stays as it is.
        overrides: Values by key; `loss.reuse_hidden` is an argument of the component `loss`.
    """
    flat = {key: value for key, value in overrides.items() if "." not in key}
    for key, value in overrides.items():
        node, _, argument = key.partition(".")
        if argument:
            flat[node] = OmegaConf.merge(flat.get(node, getattr(cfg, node)), {argument: value})
    return dataclasses.replace(cfg, **flat)


def _taken(cfg: FullFinetuneConfig, lever: dict[str, Any]) -> dict[str, Any]:
    """A lever without the arguments that the config's own components do not take."""
    return {
        key: value
        for key, value in lever.items()
        if "." not in key or _takes(getattr(cfg, key.partition(".")[0]), key.partition(".")[2])
    }


def _takes(component: Any, argument: str) -> bool:
    return argument in inspect.signature(component_callable(component)).parameters


def _problems(cfg: FullFinetuneConfig, world_size: int) -> list[str]:
    values = {
        f.name: OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for f in dataclasses.fields(cfg)
        for value in [getattr(cfg, f.name)]
    }
    return combination_problems(values, world_size)


def _divided(
    lever: dict[str, Any], cfg: FullFinetuneConfig, sizes: dict[str, int]
) -> dict[str, Any]:
    """An option with at most its number of head chunks, among those that the model's heads allow."""
    if "attention_head_chunks" not in lever:
        return lever
    heads, kv_heads = sizes["num_heads"], sizes.get("num_kv_heads", sizes["num_heads"])
    ranks = 1
    if cfg.context_parallel_method == "ulysses" and cfg.context_parallel_dim > 1:
        try:
            ranks = ulysses_degree(
                cfg.context_parallel_dim, heads, kv_heads, cfg.context_parallel_ulysses_dim
            )
        except UserError:
            return {}  # the method itself is refused, when it is planned
    most = max(
        chunks
        for chunks in HeadChunks.possible(heads, kv_heads, ranks)
        if chunks <= lever["attention_head_chunks"]
    )
    return {"attention_head_chunks": most} if most > 1 else {}


def ladder(
    cfg: FullFinetuneConfig, mesh: dict[str, Any], world_size: int, sizes: dict[str, int]
) -> list[tuple[dict[str, Any], FullFinetuneConfig]]:
    """The memory options of a mesh, each added to the previous ones.

    Options that are incompatible with the rest of the config are left out.

    Args:
        cfg: The run's config.
        mesh: Overrides that all have.
        world_size: Ranks of the run.
        sizes: The model's.

    Returns:
        Overrides and the config with them; nothing if the mesh itself is incompatible with the config.
    """
    rungs: list[tuple[dict[str, Any], FullFinetuneConfig]] = []
    overrides = mesh | _taken(cfg, NO_LEVER)
    for lever in ({}, *LEVERS):
        tried = overrides | _taken(cfg, _divided(lever, overridden(cfg, overrides), sizes))
        candidate = overridden(cfg, tried)
        if not _problems(candidate, world_size):
            overrides = tried
            if not rungs or rungs[-1][0] != tried:
                rungs.append((tried, candidate))
    return rungs


class _Climb:
    """The search for the lowest rung of a ladder that fits, a plan at a time.

    Each rung needs less memory than the one below, so the wanted one is found by halving; near a rung
    that fitted a similar case, by trying its neighbours.

    Attributes:
        mesh: What all rungs have in common.
        found: The lowest rung that is known to fit.
        rung: Its number.
    """

    def __init__(
        self,
        cfg: FullFinetuneConfig,
        mesh: dict[str, Any],
        world_size: int,
        sizes: dict[str, int],
        near: int | None = None,
    ) -> None:
        self.mesh = mesh
        self.found: Suggestion | None = None
        self.rung: int | None = None
        self._rungs = ladder(cfg, mesh, world_size, sizes)
        # The wanted one is from low on and below high; high where none fits.
        self._low, self._high = 0, len(self._rungs)
        self._steps_by_one = near is not None
        self._next = len(self._rungs) // 2 if near is None else min(near, len(self._rungs) - 1)

    def candidate(self) -> tuple[dict[str, Any], FullFinetuneConfig] | None:
        """Overrides and config to be planned next; None when nothing is left to try."""
        return self._rungs[self._next] if self._low < self._high else None

    def take(self, plan: Plan | None) -> None:
        """Continue from the plan of the candidate; None where it cannot be planned."""
        fits = plan is not None and plan.fits
        if fits:
            assert plan is not None
            self.found, self.rung = Suggestion(self._rungs[self._next][0], plan), self._next
            self._high = self._next
        else:
            self._low = self._next + 1
        self._next = (self._low + self._high) // 2
        if self._steps_by_one:
            self._next = self._high - 1 if fits else self._low


def suggest(
    cfg: FullFinetuneConfig,
    cluster: Cluster,
    seq_len: int,
    sizes: dict[str, int],
    notify: Callable[[str], None] = lambda _: None,
) -> list[Suggestion]:
    """Find the cheapest levers that make each mesh fit, then try other ways of attention on the best.

    One rank represents all. On the meshes that come out best (where none fits: on those that cut sequences
    finest) the other methods of context parallelism are tried as well.

    Args:
        cfg: The run's config.
        cluster: Where it would run.
        seq_len: Tokens of a sequence.
        sizes: The model's sizes that tensor parallelism divides.
        notify: Gets a line about each plan.

    Returns:
        What fits, the most tokens a second first; of equally fast ones, the one that needs less memory.
    """
    own = {key: getattr(cfg, key) for key in METHODS[0]}
    climbs = [_Climb(cfg, mesh | own, cluster.size, sizes) for mesh in meshes(cluster, sizes)]
    _climb_all(climbs, cluster, seq_len, notify)
    best = sorted(
        (c for c in climbs if c.mesh["context_parallel_dim"] > 1),
        key=lambda c: (0, *_rank(c.found)) if c.found else (1, -c.mesh["context_parallel_dim"], 0),
    )
    others = [
        _Climb(cfg, climb.mesh | method, cluster.size, sizes, near=climb.rung)
        for climb in best[:MESHES_FOR_METHODS]
        for method in METHODS
        if method != own
    ]
    _climb_all(others, cluster, seq_len, notify)
    found = [climb.found for climb in (*climbs, *others) if climb.found is not None]
    return sorted(found, key=_rank)


def _climb_all(
    climbs: list[_Climb], cluster: Cluster, seq_len: int, notify: Callable[[str], None]
) -> None:
    """Let all climbs come to their ends, the plans of a round side by side."""
    from torchtune_cp.planner.simulate import rank_profile

    while wave := [
        (climb, *candidate) for climb in climbs if (candidate := climb.candidate()) is not None
    ]:
        tasks = []
        for _, _, config in wave:
            degrees = {"cp": config.context_parallel_dim, "tp": config.tensor_parallel_dim}
            tasks += tasks_of(config, cluster, seq_len, ranks=[planned_ranks(degrees)[-1]])
        profiles = run_apart(rank_profile, tasks, keep_refusals=True)
        for (climb, overrides, config), task, profile in zip(wave, tasks, profiles, strict=True):
            if isinstance(profile, UserError):
                notify(f"{described(overrides)}: {profile}")
                climb.take(None)
                continue
            plan = plan_of(config, cluster, seq_len, {task["rank"]: profile})
            notify(f"{described(overrides)}: {'fits' if plan.fits else 'does not fit'}")
            climb.take(plan)


def _rank(suggestion: Suggestion) -> tuple[int, int]:
    """Faster first; of equally fast ones, that which needs less memory."""
    speed = math.log(suggestion.plan.tokens_per_second) / math.log1p(SAME_SPEED)
    return -round(speed), suggestion.plan.needed


def described(overrides: dict[str, Any]) -> str:
    """The overrides as they are written on a command line, without those that switch nothing on."""
    alone = overrides.get("context_parallel_dim", 1) == 1
    shown = []
    for key, value in overrides.items():
        if value in (False, None) or (key.endswith("_dim") and value == 1):
            continue
        if alone and key in METHODS[0]:
            continue
        shown.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(shown) or "one rank"


def as_table(suggestions: list[Suggestion], most: int = 10) -> str:
    """The best suggestions for people."""
    lines = ["tokens/s a device     MFU      needed   host a node  overrides"]
    for suggestion in suggestions[:most]:
        plan = suggestion.plan
        lines.append(
            f"{plan.tokens_per_second:17,.0f}  {plan.time.mfu:6.1%}"
            f"  {plan.needed / 2**30:7.1f} GiB  {plan.host_node / 2**30:8.1f} GiB"
            f"  {described(suggestion.overrides)}"
        )
    return "\n".join(lines)
