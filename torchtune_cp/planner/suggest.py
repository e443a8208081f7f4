"""Meshes and memory levers of a world size, those that fit ranked by estimated time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torchtune_cp.config import FullFinetuneConfig
from torchtune_cp.config.combinations import combination_problems
from torchtune_cp.errors import UserError
from torchtune_cp.planner.plan import Plan, World, plan_of, planned_ranks, tasks_of
from torchtune_cp.planner.processes import run_apart

#: Levers from the fastest to the one that saves most; each is a set of config keys.
LEVERS: tuple[dict[str, Any], ...] = (
    {"enable_activation_checkpointing": False, "ac_mode": None, "ac_option": None},
    {"enable_activation_checkpointing": False, "ac_mode": "selective", "ac_option": "op"},
    {"enable_activation_checkpointing": True, "ac_mode": None, "ac_option": None},
    {
        "enable_activation_checkpointing": True,
        "ac_mode": None,
        "ac_option": None,
        "enable_activation_offloading": True,
    },
    {
        "enable_activation_checkpointing": True,
        "ac_mode": None,
        "ac_option": None,
        "enable_activation_offloading": True,
        "fsdp_cpu_offload": True,
    },
)
#: Where the search begins on each mesh: what most long sequences need.
_FIRST = 2

_OFF = {"enable_activation_offloading": False, "fsdp_cpu_offload": False}


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

    Args:
        world: Tensor parallelism stays within a node.
        sizes: The model's; tensor parallelism must divide them.
    """
    for tp in range(1, world.per_node + 1):
        if world.size % tp or any(size % tp for size in sizes.values()):
            continue
        rest = world.size // tp
        for cp in range(1, rest + 1):
            if rest % cp == 0:
                yield {
                    "data_parallel_replicate_dim": 1,
                    "data_parallel_shard_dim": rest // cp,
                    "context_parallel_dim": cp,
                    "tensor_parallel_dim": tp,
                }


def _problems(cfg: FullFinetuneConfig, world_size: int) -> list[str]:
    values = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(cfg)}
    return combination_problems(values, world_size)


def suggest(
    cfg: FullFinetuneConfig,
    world: World,
    seq_len: int,
    sizes: dict[str, int],
    say: Callable[[str], None] = lambda _: None,
) -> list[Suggestion]:
    """Try the meshes of a world size, each with the levers around the first that fits.

    On each mesh the search begins with checkpointed layers. If they fit, faster levers are tried as long as
    they fit; if not, those that save more. One rank stands for all.

    Args:
        cfg: The run's config.
        world: Where it would run.
        seq_len: Tokens of a sequence.
        sizes: The model's sizes that tensor parallelism divides.
        say: Is told of each plan.

    Returns:
        What fits, the most tokens a second first.
    """
    from torchtune_cp.planner.simulate import rank_profile

    #: (mesh, lever, step along the levers) still to be looked at, mesh by mesh.
    open_points = [(mesh, _FIRST, 0) for mesh in meshes(world, sizes)]
    found: list[Suggestion] = []
    while open_points:
        wave = []
        for mesh, lever, step in open_points:
            overrides = mesh | _OFF | LEVERS[lever]
            candidate = dataclasses.replace(cfg, **overrides)
            if _problems(candidate, world.size):
                continue
            wave.append((mesh, lever, step, overrides, candidate))
        tasks = []
        for *_, candidate in wave:
            degrees_rank = planned_ranks(
                {"cp": candidate.context_parallel_dim, "tp": candidate.tensor_parallel_dim}
            )[-1]
            tasks += tasks_of(candidate, world, seq_len, ranks=[degrees_rank])
        profiles = run_apart(rank_profile, tasks, keep_refusals=True)
        open_points = []
        for (mesh, lever, step, overrides, candidate), task, profile in zip(
            wave, tasks, profiles, strict=True
        ):
            if isinstance(profile, UserError):
                say(f"{described(overrides)}: {profile}")
                continue
            plan = plan_of(candidate, world, seq_len, {task["rank"]: profile})
            say(f"{described(overrides)}: {'fits' if plan.fits else 'does not fit'}")
            if plan.fits:
                found.append(Suggestion(overrides, plan))
            if step == 0:
                step = -1 if plan.fits else 1
            following = lever + step
            if (step < 0) == plan.fits and 0 <= following < len(LEVERS):
                open_points.append((mesh, following, step))
    return sorted(found, key=lambda s: -s.plan.tokens_per_second)


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
