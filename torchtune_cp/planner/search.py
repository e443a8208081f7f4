"""The longest sequence that fits, in few simulations."""

from __future__ import annotations

import math
from collections.abc import Callable

from torchtune_cp.errors import UserError
from torchtune_cp.planner.plan import Plan, in_words

#: The search ends when what is left would hold less than this share of the sequence.
CLOSE_ENOUGH = 0.002
#: Lengths are multiples of this, and of what the mesh asks for.
GRAIN = 256
#: A length is at most this many times the longest one known to fit.
GROWTH = 4
#: Simulations at most; what has been found by then is returned.
MOST_PLANS = 24


def longest(
    plan_at: Callable[[int], Plan],
    multiple: int,
    start: int,
    notify: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Find the longest sequence whose plan fits.

    Needed memory, of the device and of its node, grows with the length along straight lines (attention
    needs none that grows with its square), of which the steepest ones come last: a convex curve. Its chords
    and their extensions bound the length that is looked for from below and from above, and the next length
    to try is on one of these bounds. What is returned has been simulated at its own length.

    Args:
        plan_at: Makes the plan of a length.
        multiple: What a length must divide by.
        start: The first length to try.
        notify: Gets a line about each plan.

    Returns:
        The plan of the longest sequence found.

    Raises:
        UserError: Not even the shortest sequence fits, or memory has no limit.
    """
    grain = -(-GRAIN // multiple) * multiple

    def rounded(length: float) -> int:
        return max(int(length) // grain * grain, grain)

    plans: dict[int, Plan] = {}

    def look(length: int) -> Plan:
        if length not in plans:
            plan = plans[length] = plan_at(length)
            notify(f"{length:,} tokens need {needs(plan)}: {'fits' if plan.fits else 'too much'}")
        return plans[length]

    cluster = look(rounded(start)).cluster
    if cluster.device.memory == math.inf:
        raise UserError(
            "--max-seq-len: this device's memory has no limit; name a GPU with --device"
        )
    if not look(rounded(start)).fits and not look(grain).fits:
        raise UserError(f"not even {grain} tokens fit: they need {needs(plans[grain])}")
    if len(plans) == 1:
        look(rounded(2 * start))
    last = rounded(start)
    while len(plans) < MOST_PLANS:
        fitting = sorted(n for n, plan in plans.items() if plan.fits)
        too_long = sorted(n for n, plan in plans.items() if not plan.fits)
        near = max(grain, CLOSE_ENOUGH * fitting[-1])
        above = _where(plans, fitting[-2:])
        if above - fitting[-1] < near or (too_long and too_long[0] - fitting[-1] <= near):
            break
        if not too_long:
            guess = min(above, GROWTH * fitting[-1])
        else:
            below = _where(plans, [fitting[-1], too_long[0]])
            above = min(above, _where(plans, too_long[:2]))
            if not plans[last].fits:
                guess = below
            elif above < too_long[0]:
                guess = above
            else:
                guess = (below + too_long[0]) / 2
            guess = min(guess, too_long[0] - grain)
        last = max(rounded(guess), fitting[-1] + grain)
        look(last)
    return plans[max(n for n, plan in plans.items() if plan.fits)]


def needs(plan: Plan) -> str:
    """What a plan needs of what there is, in words."""
    device = f"{in_words(plan.needed)} of {in_words(plan.cluster.device.memory)}"
    if plan.cluster.host_memory == math.inf:
        return device
    return f"{device}, host {in_words(plan.host_node)} of {in_words(plan.cluster.host_memory)}"


def _where(plans: dict[int, Plan], lengths: list[int]) -> float:
    """The length at which the line through two lengths reaches the memory limit; infinite if it does not."""
    if len(lengths) < 2:
        return math.inf
    a, b = lengths
    slope = (plans[b].load - plans[a].load) / (b - a)
    return a + (1 - plans[a].load) / slope if slope > 0 else math.inf
