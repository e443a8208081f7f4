"""What a plan says against what really run steps take, byte by byte."""

from __future__ import annotations

import json

import pytest

from benchmarks.planner import FILE, PAGE, SAVINGS, compare, rendered
from benchmarks.planner_cases import FOUR, MORE_OF_FOUR, MORE_OF_TWO, TWO
from tests.distributed.harness import run_ranks

# The aim is 0.05. What is missing are index tensors of document layouts, 24 bytes a token at most. Where a
# ring's attention is the peak, the last rank's is predicted up to 0.7 % too high; and how long a buffer of an
# all-to-all lives depends on when it has arrived, 1.4 % with head chunks under Ulysses.
TOLERANCE = 0.02


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        pytest.param(2, TWO, id="two"),
        pytest.param(4, FOUR, id="four"),
        pytest.param(2, MORE_OF_TWO, id="more_of_two", marks=pytest.mark.slow),
        pytest.param(4, MORE_OF_FOUR, id="more_of_four", marks=pytest.mark.slow),
    ],
)
def test_peak_and_bytes_sent_are_those_of_a_real_step(world, cases):
    for one in compare(world, cases, run_ranks):
        where, measured = (one.case, one.rank), one.measured
        predicted = one.profile.peak.total
        assert abs(predicted - measured["peak"]) <= TOLERANCE * measured["peak"], where
        assert one.profile.host_peak == measured["host"], where
        assert one.sent == measured["sent"], where


def test_the_page_shows_the_figures_of_the_result_file_for_every_case():
    page = PAGE.read_text(encoding="utf-8")
    assert page == rendered(page), "python -m benchmarks.planner --render"
    shown = {row["case"] for row in json.loads(FILE.read_text(encoding="utf-8"))["results"]}
    assert shown == {*TWO, *MORE_OF_TWO, *FOUR, *MORE_OF_FOUR}


def test_a_lever_saves_about_what_is_predicted():
    """Of the results on the page: the difference of two peaks, not only the peaks, is right."""
    rows = json.loads(FILE.read_text(encoding="utf-8"))["results"]
    peaks = {row["case"]: row for row in rows if row["rank"] == 0}
    for lever, (without, with_it) in SAVINGS.items():
        measured, predicted = (
            peaks[without][kind] - peaks[with_it][kind]
            for kind in ("peak_measured", "peak_predicted")
        )
        assert measured > 0, lever
        # As exact as the peaks that it is the difference of.
        assert abs(predicted - measured) <= TOLERANCE * peaks[without]["peak_measured"], lever
