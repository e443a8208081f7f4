"""What the settings of context parallelism must fulfil: each rule and its message stand here only.

Checked when a config is read, when the model is known, and by `context_parallel` for people's own loops.
"""

from __future__ import annotations

from collections.abc import Iterator

METHODS = ("ring", "allgather", "ulysses")
ROTATE_METHODS = ("allgather", "alltoall")


def method_problems(method: str | None, rotate_method: str | None) -> Iterator[str]:
    """Check the choices; None is not looked at."""
    for key, value, allowed in (
        ("context_parallel_method", method, METHODS),
        ("context_parallel_rotate_method", rotate_method, ROTATE_METHODS),
    ):
        if value is not None and value not in allowed:
            yield f"{key}: expected one of {', '.join(allowed)}, got {value!r}"


def ulysses_problems(ulysses_dim: int | None, cp: int | None, method: str | None) -> Iterator[str]:
    """Check how many ranks are to share the heads, as far as that needs no model.

    Args:
        ulysses_dim: ``context_parallel_ulysses_dim``.
        cp: ``context_parallel_dim``; None while it is not known.
        method: ``context_parallel_method``.
    """
    if ulysses_dim is None:
        return
    if method != "ulysses":
        yield (
            f"context_parallel_ulysses_dim: {ulysses_dim} needs context_parallel_method=ulysses;"
            " set it to null"
        )
    elif cp is not None and (ulysses_dim < 1 or cp % ulysses_dim):
        yield (
            f"context_parallel_ulysses_dim: {ulysses_dim} does not divide context_parallel_dim={cp}"
        )


def heads_problems(num_heads: int, ulysses_dim: int) -> Iterator[str]:
    """Check that the heads can be given out.

    Args:
        num_heads: Query heads (of one tensor-parallel rank).
        ulysses_dim: Ranks that share them.
    """
    if num_heads % ulysses_dim:
        yield (
            f"context_parallel_method: ulysses gives num_heads={num_heads} (of a tensor-parallel rank) to"
            f" {ulysses_dim} ranks, which do not divide them; set context_parallel_ulysses_dim to a divisor"
            " of both context_parallel_dim and num_heads, or context_parallel_method=ring"
        )


def mask_function_problems(cp: int, method: str, *, limited: bool = False) -> Iterator[str]:
    """Check what a mask function (``mask_mod``) is combined with.

    Args:
        cp: Ranks that share a sequence.
        method: ``context_parallel_method``.
        limited: Whether a window or a chunk is given beside it.
    """
    if limited:
        yield "mask_mod: must be None with a window or a chunk: let the function say what is seen"
    if cp > 1 and method != "allgather":
        yield (
            f"context_parallel_method: must be allgather with a mask_mod, not {method}: a mask of the"
            " model's own needs the keys side by side"
        )


def padding_problems(length: int, padded: int, divisor: int, is_causal: bool) -> Iterator[str]:
    """Check that padding a row that is one document changes nothing.

    Args:
        length: Tokens of a row.
        padded: Tokens with padding.
        divisor: What they must divide by.
        is_causal: Whether the padding, at the end, is seen by no token.
    """
    if padded != length and not is_causal:
        yield (
            f"a sequence of {length} tokens with is_causal=False: every token would attend to the padding,"
            f" for no mask hides it; give a length that divides by {divisor}, or seq_lens"
        )
