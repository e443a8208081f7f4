"""Each rule of context parallelism has one message, whoever checks it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from torchtune_cp.config.combinations import combination_problems
from torchtune_cp.distributed import ContextParallelOptions, context_parallel
from torchtune_cp.distributed.context_parallel.backends import choose_backend
from torchtune_cp.distributed.context_parallel.heads import HeadChunks
from torchtune_cp.errors import UserError

BATCH = {"tokens": torch.arange(12).view(1, 12)}


def _values(**changed):
    return {"context_parallel_dim": 4, "context_parallel_method": "ulysses", **changed}


def _refusal(call):
    with pytest.raises(UserError) as caught:
        call()
    return str(caught.value)


def _run(**changed):
    keys = {"tensor_parallel_dim": 1, "attention_head_chunks": None}
    cfg = SimpleNamespace(**keys, **_values(**changed))
    if not hasattr(cfg, "context_parallel_ulysses_dim"):
        cfg.context_parallel_ulysses_dim = None
    sizes = SimpleNamespace(num_heads=6, num_kv_heads=2, sliding_window=None)
    return ContextParallelOptions.of_run(cfg, sizes)


def test_a_degree_that_does_not_divide_is_refused_alike_in_a_config_in_a_run_and_in_a_loop():
    (config,) = combination_problems(_values(context_parallel_ulysses_dim=3))
    run = _refusal(lambda: _run(context_parallel_ulysses_dim=3))
    loop = _refusal(lambda: ContextParallelOptions(ulysses_dim=3).check(4, "ulysses", "allgather"))
    assert config == run == loop
    assert "context_parallel_ulysses_dim: 3 does not divide context_parallel_dim=4" in config


def test_a_degree_for_another_method_is_refused_alike():
    values = _values(context_parallel_ulysses_dim=2, context_parallel_method="ring")
    (config,) = combination_problems(values)
    loop = _refusal(lambda: ContextParallelOptions(ulysses_dim=2).check(4, "ring", "allgather"))
    assert config == loop
    assert "needs context_parallel_method=ulysses" in config


def test_heads_that_do_not_divide_are_refused_with_the_degree_and_the_way_out():
    said = _refusal(lambda: _run(context_parallel_ulysses_dim=4))
    assert "num_heads=6" in said
    assert "set context_parallel_ulysses_dim to a divisor of both" in said
    assert _run().ulysses_dim == 2  # what divides 4 ranks, 6 query heads and 2 KV heads


@pytest.mark.parametrize(
    ("method", "rotate", "options", "says"),
    [
        ("rings", "allgather", {}, "context_parallel_method: expected one of ring, allgather, uly"),
        (
            "ring",
            "round",
            {},
            "context_parallel_rotate_method: expected one of allgather, alltoall",
        ),
        ("allgather", "allgather", {"window": 8}, "mask_mod: must be None with a window"),
        ("ring", "allgather", {}, "context_parallel_method: must be allgather with a mask_mod"),
    ],
)
def test_choices_and_mask_functions(method, rotate, options, says):
    if "mask_mod" in says:
        options["mask_mod"] = lambda b, h, q, k: q >= k
    assert says in _refusal(lambda: ContextParallelOptions(**options).check(4, method, rotate))


def test_padding_that_would_be_seen_is_refused_on_one_rank_too():
    options = ContextParallelOptions(pad_to_multiple_of=8)
    said = _refusal(
        lambda: context_parallel(None, BATCH, is_causal=False, options=options).__enter__()
    )
    assert "a sequence of 12 tokens with is_causal=False" in said
    assert "divides by 8" in said
    with context_parallel(None, BATCH, options=options) as local:
        assert local["tokens"].shape == (1, 16)


@pytest.mark.parametrize(
    ("batch", "cp", "method", "options", "name", "why"),
    [
        ({}, 1, "ring", {}, "none", "whole rows on one rank"),
        ({}, 2, "ring", {}, "ring", "whole rows"),
        ({}, 2, "ring", {"window": 12}, "ring", "whole rows"),
        (
            {},
            2,
            "ring",
            {"window": 11},
            "documents",
            "a window or a chunk is shorter than the rows",
        ),
        ({}, 2, "allgather", {}, "documents", "the method is allgather"),
        ({}, 1, "allgather", {}, "none", "whole rows on one rank"),
        ({"seq_lens": [[12]]}, 1, "ring", {}, "documents", "the batch has documents (seq_lens)"),
        (
            {},
            1,
            "ring",
            {"head_chunks": HeadChunks(1, 2, 2)},
            "documents",
            "heads are done in chunks",
        ),
    ],
)
def test_one_place_decides_the_backend_and_says_why(batch, cp, method, options, name, why):
    marks = {key: torch.tensor(value) for key, value in batch.items()}
    given = ContextParallelOptions(**options)
    assert choose_backend(cp, {**BATCH, **marks}, True, method, given) == (name, why)
