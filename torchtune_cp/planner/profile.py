"""From traces of a model with few layers to the step of the whole model.

Layers are equal, so every operator's live bytes are an affine function of the number of layers, and so is
every sum. Two traces that differ by one layer (by one period, where only every N-th layer is checkpointed)
give that function. It is taken operator by operator, because the peak is a maximum: it may be at another
operator in the whole model. The first and last layers of the traces represent the first
and last layers of the model; the layers between grow evenly from one to the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from torchtune_cp.planner.trace import CATEGORIES, Location, Trace, Transfer

#: The fewest layers of which the first two and the last two are as in any deeper model.
FEWEST = 4


@dataclass
class Moment:
    """The most bytes during one visit of a layer, or of a module outside of the layers.

    Attributes:
        location: Where in the step.
        device: Bytes on the device by category.
        host: Bytes on the host then.
    """

    location: Location
    device: dict[str, int]
    host: int

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(self.device.values())


@dataclass
class Profile:
    """A step of the whole model as one rank sees it.

    Attributes:
        moments: In the order of the step.
        transfers: Bytes sent by this rank and calls, by kind.
        flops: By kind and whether computed a second time.
        moved: Bytes read and written by operators that are no products.
        host_moved: The same on the host.
        copied: Bytes copied from the device to the host or back.
        host_peak: The most bytes of tensors on the host.
        host_needed: What they take there: pinned memory as torch rounds it, and never gives it back.
        backlog: See `Trace`.
    """

    moments: list[Moment]
    transfers: dict[Transfer, tuple[float, float]] = field(default_factory=dict)
    flops: dict[tuple[str, bool], float] = field(default_factory=dict)
    moved: float = 0.0
    host_moved: float = 0.0
    copied: float = 0.0
    host_peak: int = 0
    host_needed: int = 0
    backlog: int = 0

    @property
    def peak(self) -> Moment:
        """The moment with the most bytes on the device."""
        return max(self.moments, key=lambda moment: moment.total)


def layers_to_trace(num_layers: int, period: int = 1) -> tuple[int, int] | None:
    """Choose the depths of the two traces.

    Args:
        num_layers: Of the model.
        period: After how many layers they repeat.

    Returns:
        Two depths, one period apart, that leave the model's remainder; None where the model itself is
        hardly deeper and is traced whole.
    """
    few = max(FEWEST, 2 * period + 2)
    few += (num_layers - few) % period
    return (few, few + period) if num_layers > few + period else None


def _rows(trace: Trace) -> dict[Location, np.ndarray]:
    order = np.argsort(trace.location, kind="stable")
    splits = np.flatnonzero(np.diff(trace.location[order])) + 1
    return {trace.locations[trace.location[rows[0]]]: rows for rows in np.split(order, splits)}


def _visits(trace: Trace) -> Iterator[tuple[str, int, np.ndarray]]:
    """Runs of operators of the same phase in the same layer."""
    keys = np.array([hash((p.phase, p.layer)) for p in trace.locations])[trace.location]
    starts = [0, *(np.flatnonzero(np.diff(keys)) + 1), len(keys)]
    for first, end in pairwise(starts):
        location = trace.locations[trace.location[first]]
        yield location.phase, location.layer, np.arange(first, end)


def _visit_numbers(trace: Trace) -> np.ndarray:
    """Of each operator, how often its phase and layer had been visited before."""
    numbers = np.empty(len(trace.location), dtype=np.int64)
    seen: Counter[tuple[str, int]] = Counter()
    for phase, layer, rows in _visits(trace):
        numbers[rows] = seen[phase, layer]
        seen[phase, layer] += 1
    return numbers


def _most(locations: list[Location], device: np.ndarray, host: np.ndarray) -> Moment:
    at = int(device.sum(axis=1).argmax())
    values = {name: round(float(v)) for name, v in zip(CATEGORIES, device[at], strict=True)}
    return Moment(locations[at], values, round(float(host[at])))


def whole(trace: Trace) -> Profile:
    """The profile of a trace that has all layers."""
    moments = [
        _most(
            [trace.locations[i] for i in trace.location[rows]], trace.device[rows], trace.host[rows]
        )
        for _, _, rows in _visits(trace)
    ]
    return Profile(
        moments,
        transfers=dict(trace.transfers),
        flops=dict(trace.flops),
        moved=trace.moved,
        host_moved=trace.host_moved,
        copied=trace.copied,
        host_peak=int(trace.host.max()),
        host_needed=_host_needed(trace.pageable, trace.pinned),
        backlog=trace.backlog,
    )


def _host_needed(pageable: float, pinned: dict[int, float]) -> int:
    return round(pageable + sum(size * count for size, count in pinned.items()))


def _grown(few: dict[Any, Any], more: dict[Any, Any], times: float) -> dict[Any, Any]:
    grown = {}
    for key in {**few, **more}:
        a, b = np.asarray(few.get(key, 0.0)), np.asarray(more.get(key, 0.0))
        value = b + times * (b - a)
        grown[key] = tuple(value.tolist()) if value.ndim else float(value)
    return grown


def deeper(few: Trace, more: Trace, depths: tuple[int, int], num_layers: int) -> Profile:
    """Extrapolate two traces to the whole model.

    Args:
        few: Of `depths[0]` layers.
        more: Of `depths[1]` layers.
        depths: From `layers_to_trace`.
        num_layers: Of the model.

    Returns:
        The profile of `num_layers` layers.
    """
    fewer, period = depths[0], depths[1] - depths[0]
    times = (num_layers - depths[1]) // period
    front = -(-fewer // 2)  # layers counted from the first one; the others from the last one
    rows_few, rows_more = _rows(few), _rows(more)
    visit_few, visit_more = _visit_numbers(few), _visit_numbers(more)
    all_few = np.column_stack([few.device, few.host]).astype(float)
    all_more = np.column_stack([more.device, more.host]).astype(float)

    grown = np.empty_like(all_more)
    row_slope = np.zeros_like(all_more)  # of the middle layers: from one period to the next
    for location, rows in rows_more.items():
        is_middle = front <= location.layer < front + period
        if is_middle:
            before = rows_more.get(location._replace(layer=location.layer - period))
            if before is not None and len(before) == len(rows):
                row_slope[rows] = all_more[rows] - all_more[before]
            # A layer in the middle of the deeper model, counted from the first one, as `before` is.
            twin = location._replace(layer=location.layer - period)
        else:
            back = location.layer >= front + period
            twin = location._replace(layer=location.layer - period) if back else location
        other = rows_few.get(twin)
        if other is not None and len(other) == len(rows):
            slope = all_more[rows] - all_few[other]
            if is_middle:
                base = rows_more[twin]
                slope = all_more[base] - all_few[other]
            grown[rows] = all_more[rows] + times * slope
        else:
            for those, twins in _by_visit(rows, visit_more, other, visit_few):
                grown[those] = _by_maximum(all_more[those], all_few, twins, times)

    moments: list[Moment] = []
    pending: list[tuple[str, int, np.ndarray]] = []

    def moment(rows: np.ndarray, values: np.ndarray, layer_shift: int = 0) -> Moment:
        locations = []
        for i in more.location[rows]:
            location = more.locations[i]
            if location.layer >= 0:
                location = location._replace(layer=location.layer + layer_shift)
            locations.append(location)
        return _most(locations, values[:, :-1], values[:, -1])

    def flush() -> None:
        """Repeat what the middle layers did, once for each further period."""
        if not pending:
            return
        repeats = range(times + 1)
        if pending[0][0] == "backward":
            repeats = repeats[::-1]
        for k in repeats:
            for _, layer, rows in pending:
                values = grown[rows]
                if front <= layer < front + period:
                    values = values + k * row_slope[rows]
                moments.append(moment(rows, values, k * period))
        pending.clear()

    for phase, layer, rows in _visits(more):
        if front <= layer < front + period:
            if pending and pending[0][0] != phase:
                flush()
            pending.append((phase, layer, rows))
        else:
            flush()
            shift = times * period if layer >= front + period else 0
            moments.append(moment(rows, grown[rows], shift))
    flush()
    # Where the optimizer steps through parameters, operators do not pair up, but their maxima do.
    peak_host = max(
        _linear(few.host.max(), more.host.max(), times), *(moment.host for moment in moments)
    )
    return Profile(
        moments,
        transfers=_grown(few.transfers, more.transfers, times),
        flops=_grown(few.flops, more.flops, times),
        moved=_linear(few.moved, more.moved, times),
        host_moved=_linear(few.host_moved, more.host_moved, times),
        copied=_linear(few.copied, more.copied, times),
        host_peak=round(peak_host),
        host_needed=_host_needed(
            _linear(few.pageable, more.pageable, times), _grown(few.pinned, more.pinned, times)
        ),
        backlog=round(_linear(few.backlog, more.backlog, times)),
    )


def _linear(few: float, more: float, times: float) -> float:
    return float(more + times * (more - few))


def _by_visit(
    rows: np.ndarray, visits: np.ndarray, other: np.ndarray | None, other_visits: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Pair the operators of a location visit by visit, if the numbers of visits are equal.

    The first micro-batch leaves other gradients (whole ones, with replicas) than the last.
    """
    numbers = np.unique(visits[rows])
    if other is None or not np.array_equal(numbers, np.unique(other_visits[other])):
        yield rows, other
        return
    for number in numbers:
        yield rows[visits[rows] == number], other[other_visits[other] == number]


def _by_maximum(
    values: np.ndarray, all_few: np.ndarray, other: np.ndarray | None, times: int
) -> np.ndarray:
    """Where operators do not pair up (one for each parameter), extrapolate the largest of them."""
    if other is None:
        return values
    most = values[values[:, :-1].sum(axis=1).argmax()]
    few = all_few[other]
    most_few = few[few[:, :-1].sum(axis=1).argmax()]
    return values + times * (most - most_few)
