"""Checkpointing keeps what it says, runs again only what it says, and changes no bit of a gradient."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.live_storage import LiveStorage
from tests.unit.training.small_llama import DIM, LAYERS, gradients, loss_of, small_llama, tokens
from torchtune_cp.errors import UserError
from torchtune_cp.training.memory import (
    apply_activation_checkpointing,
    apply_selective_checkpointing,
)


class Calls(TorchDispatchMode):
    """Counts calls of operators by name."""

    def __init__(self):
        super().__init__()
        self.count = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        self.count[name] = self.count.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def _plain(model):
    return None


MODES = {
    "none": _plain,
    "full": apply_activation_checkpointing,
    "second": partial(apply_activation_checkpointing, every_nth_layer=2),
    "op": apply_selective_checkpointing,
    "op_kv": partial(apply_selective_checkpointing, keep_kv=True),
}
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def _run(mode):
    model = small_llama()
    MODES[mode](model)
    with LiveStorage() as storage:
        loss = loss_of(model)
        alive = storage.live
    with Calls() as calls:
        loss.backward()
    return gradients(model), alive, calls.count


@pytest.fixture(scope="module")
def runs():
    return {mode: _run(mode) for mode in MODES}


@pytest.mark.parametrize("mode", [m for m in MODES if m != "none"])
def test_gradients_are_bit_equal(runs, mode):
    for name, grad in runs[mode][0].items():
        assert torch.equal(grad, runs["none"][0][name]), name


def test_backward_runs_attention_forward_again_only_where_its_output_was_not_kept(runs):
    again = {mode: count.get(ATTENTION, 0) for mode, (_, _, count) in runs.items()}
    assert again == {"none": 0, "full": LAYERS, "second": 2, "op": 0, "op_kv": 0}


def test_matrix_products_are_run_again_in_every_checkpointed_layer(runs):
    extra = {mode: count["mm"] - runs["none"][2]["mm"] for mode, (_, _, count) in runs.items()}
    # The last product of a layer, w2, is not needed again.
    assert extra == {"none": 0, "full": 6 * LAYERS, "second": 12, "op": 6 * LAYERS, "op_kv": 18}


def test_by_operator_keeps_the_attention_output_and_logsumexp_beyond_the_layer_input(runs):
    alive = {mode: live for mode, (_, live, _) in runs.items()}
    output = tokens().numel() * DIM * 4
    logsumexp = tokens().numel() * 4 * 4  # 4 heads
    assert alive["op"] - alive["full"] == LAYERS * (output + logsumexp)
    assert alive["op"] < alive["none"] / 2


def test_every_nth_layer_below_one_is_refused():
    with pytest.raises(UserError, match="at least 1"):
        apply_activation_checkpointing(small_llama(), 0)
