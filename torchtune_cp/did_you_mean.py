"""Suggests the nearest valid name for a misspelt one."""

import difflib
from collections.abc import Iterable


def nearest(name: str, candidates: Iterable[str]) -> str | None:
    """Return the candidate that looks most like `name` in any case, or None if none comes near."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[matches[0]] if matches else None


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return `"; did you mean X?"`, or an empty string when nothing comes near."""
    match = nearest(name, candidates)
    return f"; did you mean {match}?" if match else ""
