"""The longest sequence that fits, in few simulations."""

from __future__ import annotations

from collections.abc import Callable

from torchtune_cp.errors import UserError
from torchtune_cp.planner.plan import Plan, in_words

#: The search ends when what is left would hold less than this share of the sequence.
CLOSE_ENOUGH = 0.002
#: Lengths are multiples of this, and of what the mesh asks for.
GRAIN = 256


def longest(
    plan_at: Callable[[int], Plan],
    multiple: int,
    start: int,
    say: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Find the longest sequence whose plan fits.

    Needed memory grows piecewise along straight lines with the length (attention needs none that grows
    with its square), so a line through the last two lengths tells the next one to try. What is returned has
    been simulated at its own length.

    Args:
        plan_at: Makes the plan of a length.
        multiple: What a length must divide by.
        start: The first length to try.
        say: Is told of each plan.

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
            say(
                f"{length:,} tokens need {in_words(plan.needed)}: {'fits' if plan.fits else 'too much'}"
            )
        return plans[length]

    memory = look(rounded(start)).world.device.memory
    if memory == float("inf"):
        raise UserError(
            "--max-seq-len: this device's memory has no limit; name a GPU with --device"
        )
    if not look(rounded(start)).fits and not look(grain).fits:
        need = plans[grain].needed
        raise UserError(
            f"not even {grain} tokens fit: they need {in_words(need)} of {in_words(memory)}"
        )
    if len(plans) == 1:
        look(rounded(2 * start))
    for _ in range(12):
        fitting = max(n for n, plan in plans.items() if plan.fits)
        too_long = min((n for n, plan in plans.items() if not plan.fits), default=None)
        if too_long is not None and too_long - fitting <= grain:
            break
        # The two lengths whose line passes closest to the limit.
        near = sorted(plans, key=lambda n: abs(plans[n].needed - memory))[:2]
        (a, b) = sorted(near)
        slope = (plans[b].needed - plans[a].needed) / (b - a)
        if slope <= 0:
            guess = rounded(2 * fitting)
        else:
            room = (memory - plans[fitting].needed) / slope
            if room < max(grain, CLOSE_ENOUGH * fitting):
                break
            guess = rounded(fitting + room)
        if too_long is not None:
            guess = min(guess, too_long - grain)
        guess = max(guess, fitting + grain)
        look(guess)
    return plans[max(n for n, plan in plans.items() if plan.fits)]
