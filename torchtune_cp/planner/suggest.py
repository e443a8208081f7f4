"""Meshes and memory levers of a world size, those that fit ranked by estimated time."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from torchtune_cp.config import FullFinetuneConfig
from torchtune_cp.config.combinations import combination_problems
from torchtune_cp.errors import UserError
from torchtune_cp.planner.plan import Plan, plan_of, planned_ranks, tasks_of
from torchtune_cp.planner.processes import run_apart
from torchtune_cp.planner.world import World

_CHECKPOINTED = {"enable_activation_checkpointing": True, "ac_mode": None, "ac_option": None}

#: Levers from the fastest to the one that saves most; each is a set of config keys.
LEVERS: tuple[dict[str, Any], ...] = (
    {"enable_activation_checkpointing": False, "ac_mode": None, "ac_option": None},
    {"enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": "op"},
    _CHECKPOINTED,
    _CHECKPOINTED | {"optimizer_in_bwd": True},
    _CHECKPOINTED | {"enable_activation_offloading": True},
    _CHECKPOINTED | {"enable_activation_offloading": True, "optimizer_in_bwd": True},
    _CHECKPOINTED | {"enable_activation_offloading": True, "fsdp_cpu_offload": True},
)
#: Where the search begins on each mesh: what most long sequences need.
_FIRST = 2

_OFF = {
    "enable_activation_offloading": False,
    "fsdp_cpu_offload": False,
    "optimizer_in_bwd": False,
}

#: Estimated speeds closer than this are no difference: the model is not that good.
SAME_SPEED = 0.02


@dataclasses.dataclass(frozen=True)
class Suggestion:
    """A mesh and a lever with their plan.

    Attributes:
        overrides: The config keys to set.
        plan: Of the rank with the last slice of a sequence.
    """

    overrides: dict[str, Any]
    plan: Plan


def meshes(world: World, sizes: dict[str, int]) -> Iterator[dict[str, int]]:
    """Every way to share a world size between samples, sequences and matrices.

    Where a sequence fits into a node, the model is also sharded over the node only, the nodes being
    replicas: more memory, and what FSDP gathers stays within the node.

    Args:
        world: Tensor parallelism stays within a node.
        sizes: The model's; tensor parallelism must divide them.
    """
    for tp in range(1, world.per_node + 1):
        if world.size % tp or any(size % tp for size in sizes.values()):
            continue
        rest = world.size // tp
        for cp in range(1, rest + 1):
            if rest % cp:
                continue
            replicas = {1}
            if world.size > world.per_node and world.per_node % (cp * tp) == 0:
                replicas.add(world.size // world.per_node)
            for replicate in sorted(replicas):
                yield {
                    "data_parallel_replicate_dim": replicate,
                    "data_parallel_shard_dim": rest // cp // replicate,
                    "context_parallel_dim": cp,
                    "tensor_parallel_dim": tp,
                }


def _problems(cfg: FullFinetuneConfig, world_size: int) -> list[str]:
    values = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    return combination_problems(values, world_size)


def _next_usable(
    cfg: FullFinetuneConfig, mesh: dict[str, int], lever: int, direction: int, world_size: int
) -> tuple[int, dict[str, Any], FullFinetuneConfig] | None:
    """The first lever from here on that goes with the rest of the config: index, overrides, config."""
    while 0 <= lever < len(LEVERS):
        overrides = mesh | _OFF | LEVERS[lever]
        candidate = dataclasses.replace(cfg, **overrides)
        if not _problems(candidate, world_size):
            return lever, overrides, candidate
        if direction == 0:
            return None
        lever += direction
    return None


def suggest(
    cfg: FullFinetuneConfig,
    world: World,
    seq_len: int,
    sizes: dict[str, int],
    say: Callable[[str], None] = lambda _: None,
) -> list[Suggestion]:
    """Try the meshes of a world size, each with the levers around the first that fits.

    On each mesh the search begins with checkpointed layers. If they fit, faster levers are tried as long as
    they fit; if not, those that save more, until one fits. A lever that the rest of the config does not
    go with is passed over. One rank stands for all.

    Args:
        cfg: The run's config.
        world: Where it would run.
        seq_len: Tokens of a sequence.
        sizes: The model's sizes that tensor parallelism divides.
        say: Is told of each plan.

    Returns:
        What fits, the most tokens a second first; of equally fast ones, the one that needs less memory.
    """
    from torchtune_cp.planner.simulate import rank_profile

    #: (mesh, lever, direction along the levers) still to be looked at; direction 0: the first look.
    open_points = [(mesh, _FIRST, 0) for mesh in meshes(world, sizes)]
    found: list[Suggestion] = []
    while open_points:
        wave, tasks = [], []
        for mesh, lever, direction in open_points:
            usable = _next_usable(cfg, mesh, lever, direction, world.size)
            if usable is None:
                continue
            lever, overrides, candidate = usable
            wave.append((mesh, lever, direction, overrides, candidate))
            degrees = {"cp": candidate.context_parallel_dim, "tp": candidate.tensor_parallel_dim}
            tasks += tasks_of(candidate, world, seq_len, ranks=[planned_ranks(degrees)[-1]])
        profiles = run_apart(rank_profile, tasks, keep_refusals=True)
        open_points = []
        for (mesh, lever, direction, overrides, candidate), task, profile in zip(
            wave, tasks, profiles, strict=True
        ):
            if isinstance(profile, UserError):
                say(f"{described(overrides)}: {profile}")
                continue
            plan = plan_of(candidate, world, seq_len, {task["rank"]: profile})
            say(f"{described(overrides)}: {'fits' if plan.fits else 'does not fit'}")
            if plan.fits:
                found.append(Suggestion(overrides, plan))
            if direction == 0:
                direction = -1 if plan.fits else 1
            following = lever + direction
            if (direction < 0) == plan.fits and 0 <= following < len(LEVERS):
                open_points.append((mesh, following, direction))
    return sorted(found, key=_rank)


def _rank(suggestion: Suggestion) -> tuple[int, int]:
    """Faster first; of equally fast ones, that which needs less memory."""
    speed = math.log(suggestion.plan.tokens_per_second) / math.log1p(SAME_SPEED)
    return -round(speed), suggestion.plan.needed


def described(overrides: dict[str, Any]) -> str:
    """The overrides as they are written on a command line, without those that switch nothing on."""
    shown = []
    for key, value in overrides.items():
        if value in (False, None) or (key.endswith("_dim") and value == 1):
            continue
        shown.append(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(shown) or "one rank"


def as_table(suggestions: list[Suggestion], most: int = 10) -> str:
    """The best suggestions for people."""
    lines = ["tokens/s a device     MFU      needed  overrides"]
    for suggestion in suggestions[:most]:
        plan = suggestion.plan
        lines.append(
            f"{plan.tokens_per_second:17,.0f}  {plan.time.mfu:6.1%}"
            f"  {plan.needed / 2**30:7.1f} GiB  {described(suggestion.overrides)}"
        )
    return "\n".join(lines)
