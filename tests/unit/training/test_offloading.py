"""Offloading moves the right bytes, frees them on the device, and changes no bit of a gradient."""

from __future__ import annotations

import gc
from typing import ClassVar

import pytest
import torch

from benchmarks.live_storage import LiveStorage
from tests.unit.training.small_llama import (
    DIM,
    LAYERS,
    gradients,
    loss_of,
    small_llama,
    tokens,
)
from torchtune_cp.training.memory import (
    apply_activation_checkpointing,
    apply_activation_offloading,
    apply_selective_checkpointing,
)
from torchtune_cp.training.memory.offloading import ActivationOffload

CPU = torch.device("cpu")
INPUT_BYTES = tokens().numel() * DIM * 4


def _plain(model):
    return None


@pytest.fixture(scope="module")
def expected():
    model = small_llama()
    loss_of(model).backward()
    return gradients(model)


@pytest.mark.parametrize(
    "checkpoint", [_plain, apply_activation_checkpointing, apply_selective_checkpointing]
)
def test_gradients_are_bit_equal_and_everything_comes_back(expected, checkpoint):
    model = small_llama()
    checkpoint(model)
    offload = apply_activation_offloading(model, CPU)
    for step in (1, 2):
        loss_of(model).backward()
        assert offload.moved_bytes == offload.fetched_bytes > 0
        assert offload.host_bytes == 0, "backward is over, but its copies are still there"
        for name, grad in gradients(model).items():
            assert torch.equal(grad, expected[name] * step), name


def test_with_checkpointing_the_inputs_of_all_layers_but_the_last_move_and_nothing_else():
    model = small_llama()
    apply_activation_checkpointing(model)
    offload = apply_activation_offloading(model, CPU)
    loss = loss_of(model)
    assert offload.moved_bytes == offload.host_bytes == (LAYERS - 1) * INPUT_BYTES
    loss.backward()
    assert offload.moved_bytes == offload.fetched_bytes == (LAYERS - 1) * INPUT_BYTES


def _alive_after_forward(checkpoint, offloaded):
    model = small_llama()
    checkpoint(model)
    offload = apply_activation_offloading(model, CPU) if offloaded else None
    gc.collect()
    with LiveStorage() as storage:
        loss = loss_of(model)
        alive = storage.live
        loss.backward()
    return alive, 0 if offload is None else offload.moved_bytes


@pytest.mark.parametrize("checkpoint", [_plain, apply_activation_checkpointing])
def test_each_byte_that_moved_is_freed_on_the_device(checkpoint):
    without, _ = _alive_after_forward(checkpoint, offloaded=False)
    with_copies, moved = _alive_after_forward(checkpoint, offloaded=True)
    # The copies are storages too, on a CPU in the same memory.
    assert without - (with_copies - moved) == moved
    assert moved > (0.5 if checkpoint is _plain else 0.1) * without


def test_parameters_stay_even_when_all_activations_move():
    wide = small_llama()
    offload = apply_activation_offloading(wide, CPU)
    seen = []
    to_host = ActivationOffload._to_host
    offload._to_host = lambda layer, storage: (
        seen.append(storage.data_ptr()) or to_host(offload, layer, storage)
    )
    loss = loss_of(wide)
    weights = {p.untyped_storage().data_ptr() for p in wide.parameters()}
    assert seen
    assert weights.isdisjoint(seen)
    loss.backward()


class _Identity(torch.autograd.Function):
    """Saves its input several times and shows in backward what came back."""

    came_back: ClassVar[list[torch.Tensor]] = []

    @staticmethod
    def forward(ctx, *views):
        ctx.save_for_backward(*views)
        return views[0].clone()

    @staticmethod
    def backward(ctx, grad):
        _Identity.came_back = list(ctx.saved_tensors)
        return (grad, *[None] * (len(ctx.saved_tensors) - 1))


def test_views_come_back_with_their_strides_on_one_storage_that_moved_once():
    base = torch.arange(512, dtype=torch.float32).view(16, 32)
    views = [base, base.t(), base[2:5, 1::2], base[0].expand(4, 32)]
    offload = ActivationOffload(CPU)
    leaf = base.clone().requires_grad_()
    with offload.layer([], (), first=True, last=False):
        out = _Identity.apply(leaf * 1, *views)
    with offload.layer([], (), first=False, last=True):
        pass
    assert offload.moved_bytes == 2 * 512 * 4  # leaf * 1, and the base of all views
    out.sum().backward()
    _, *came_back = _Identity.came_back
    assert len({v.untyped_storage().data_ptr() for v in came_back}) == 1
    for view, original in zip(came_back, views, strict=True):
        assert view.stride() == original.stride()
        assert torch.equal(view, original)
        assert view.untyped_storage().data_ptr() != original.untyped_storage().data_ptr()


def test_a_storage_written_to_between_two_saves_moves_as_two_contents():
    offload = ActivationOffload(CPU)
    leaf = torch.ones(512, requires_grad=True)
    buffer = torch.full((512,), 2.0)
    with offload.layer([], (), first=True, last=False):
        first = leaf * buffer
        buffer.add_(1)
        second = first * buffer
    assert torch.equal(torch.autograd.grad(second.sum(), leaf)[0], torch.full((512,), 6.0))


def test_small_tensors_stay_and_nothing_moves_without_gradients():
    model = small_llama()
    offload = apply_activation_offloading(model, CPU, min_bytes=2**30)
    loss_of(model).backward()
    assert offload.moved_bytes == 0
    model = small_llama()
    offload = apply_activation_offloading(model, CPU)
    with torch.no_grad():
        loss_of(model)
    assert offload.moved_bytes == 0


def test_a_graph_can_be_walked_twice(expected):
    model = small_llama()
    offload = apply_activation_offloading(model, CPU)
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    del loss
    gc.collect()
    assert offload.host_bytes == 0
    for name, grad in gradients(model).items():
        assert torch.equal(grad, expected[name])


def test_a_layer_is_fetched_while_the_one_behind_it_is_in_backward(monkeypatch):
    model = small_llama()
    apply_activation_checkpointing(model)
    events = []
    for index, layer in enumerate(model.layers):
        layer.register_full_backward_pre_hook(lambda *_, i=index: events.append(f"backward {i}"))
    fetch = ActivationOffload._fetch

    def logged(self, layer, copies):
        events.append(f"fetch {len(copies)}")
        fetch(self, layer, copies)

    monkeypatch.setattr(ActivationOffload, "_fetch", logged)
    apply_activation_offloading(model, CPU)
    loss_of(model).backward()
    # The last layer has nothing to fetch; its backward starts the fetch of the one before.
    assert events == [
        *("backward 2", "fetch 0", "fetch 1"),
        *("backward 1", "fetch 1"),
        "backward 0",
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("checkpoint", [_plain, apply_activation_checkpointing])
def test_on_a_gpu_gradients_are_bit_equal_and_memory_falls(checkpoint):
    peaks, grads = [], []
    for offloaded in (False, True):
        model = small_llama()
        checkpoint(model)
        model.cuda()
        if offloaded:
            offload = apply_activation_offloading(model, torch.device("cuda", 0))
        batch = tokens(2048).cuda()
        for _ in range(3):  # memory is reused from step to step: a race would show
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            model.zero_grad()
            loss = loss_of(model, batch)
            after_forward = torch.cuda.memory_allocated() - before
            loss.backward()
        peaks.append(after_forward)
        grads.append(gradients(model))
    assert offload.moved_bytes == offload.fetched_bytes > 0
    assert peaks[1] < peaks[0]
    for name, grad in grads[0].items():
        assert torch.equal(grad, grads[1][name]), name
