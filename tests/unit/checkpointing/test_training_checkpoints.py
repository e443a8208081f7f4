"""Saving beside the training: what is written is the moment of the save, and no failure is lost."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

from torchtune_cp.checkpointing import training_checkpoints as module
from torchtune_cp.checkpointing.rank_sync import RankSync
from torchtune_cp.checkpointing.training_checkpoints import TrainingCheckpoints
from torchtune_cp.checkpointing.training_state import TrainingState
from torchtune_cp.checkpointing.training_state_store import load_tensors, read_manifest
from torchtune_cp.errors import UserError


def _state() -> TrainingState:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return TrainingState(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2))


def _train(state: TrainingState) -> None:
    state.model(torch.ones(4, 5)).square().sum().backward()
    state.optimizer.step()
    state.optimizer.zero_grad()
    state.scheduler.step()


def _copies(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.tensors().items()}


def _read(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    load_tensors(folder, tensors, RankSync())
    return tensors


def _assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    # NaN stands for "no number kept back" in the state of Python's generator.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def _save(checkpoints: TrainingCheckpoints, state: TrainingState, step: int, **more) -> None:
    checkpoints.save(state, step=step, record={}, **more)


def test_a_save_in_the_background_holds_the_moment_it_was_asked_for(tmp_path, monkeypatch):
    go, writing, write = threading.Event(), [], module.write_checkpoint

    def slow(folder, step, tensors, *rest):
        writing.append(tensors["model.0.weight"].data_ptr())
        assert go.wait(60)
        return write(folder, step, tensors, *rest)

    monkeypatch.setattr(module, "write_checkpoint", slow)
    state, checkpoints = _state(), TrainingCheckpoints(tmp_path, asynchronous=True)
    _train(state)
    then = _copies(state)
    _save(checkpoints, state, 1)
    _train(state)
    torch.rand(3)
    checkpoints.check()
    assert not (tmp_path / "checkpoints").exists(), "the training has not waited"
    go.set()
    _save(checkpoints, state, 2)
    now = _copies(state)
    checkpoints.close()
    torch.testing.assert_close(
        _read(tmp_path / "checkpoints" / "step_1", then), then, equal_nan=True, rtol=0, atol=0
    )
    torch.testing.assert_close(
        _read(tmp_path / "checkpoints" / "step_2", now), now, equal_nan=True, rtol=0, atol=0
    )
    assert not torch.equal(then["model.0.weight"], now["model.0.weight"])
    assert writing[0] == writing[1] != state.model[0].weight.data_ptr(), (
        "the buffers are used again"
    )


def _save_and_close(checkpoints: TrainingCheckpoints, state: TrainingState) -> None:
    _save(checkpoints, state, 2)
    checkpoints.close()


def _full_disk(*_args):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_failed_save_ends_the_run_or_is_logged(tmp_path, monkeypatch, asynchronous, caplog):
    state, write = _state(), module.write_checkpoint
    for on_save_error in ("raise", "continue"):
        checkpoints = TrainingCheckpoints(
            tmp_path / on_save_error, asynchronous=asynchronous, on_save_error=on_save_error
        )
        _save(checkpoints, state, 1)
        checkpoints.wait()
        assert checkpoints.last_saved == 1
        monkeypatch.setattr(module, "write_checkpoint", _full_disk)
        if on_save_error == "raise":
            with pytest.raises(
                UserError, match=r"could not save checkpoint step_2 .*No space left"
            ):
                _save_and_close(checkpoints, state)
        else:
            with caplog.at_level(logging.ERROR, "torchtune_cp"):
                _save(checkpoints, state, 2)
                checkpoints.wait()
            assert "could not save checkpoint step_2" in caplog.text
            assert checkpoints.last_saved == 1
        monkeypatch.setattr(module, "write_checkpoint", write)
        if on_save_error == "continue":
            _save(checkpoints, state, 3)
            checkpoints.close()
            assert checkpoints.last_saved == 3


def test_restoring_gives_the_same_next_steps_whatever_the_fresh_objects_hold(tmp_path):
    straight, checkpoints = _state(), TrainingCheckpoints(tmp_path)
    for _ in range(3):
        _train(straight)
    _save(checkpoints, straight, 3)
    record = read_manifest(tmp_path / "checkpoints" / "step_3").state
    drawn = torch.rand(2)
    for _ in range(3):
        _train(straight)

    resumed = _state()
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.fill_(float("nan"))  # as memory that nothing has been read into
    found = checkpoints.find(True)
    assert found is not None
    resumed.restore(
        record,
        lambda tensors: checkpoints.load(found, tensors),
        step=3,
        saved_world_size=1,
        same_mesh=True,
        same_hyperparameters=True,
    )
    torch.testing.assert_close(torch.rand(2), drawn, rtol=0, atol=0)
    for _ in range(3):
        _train(resumed)
    torch.testing.assert_close(
        resumed.model.state_dict(), straight.model.state_dict(), rtol=0, atol=0
    )
    assert resumed.scheduler.get_last_lr() == straight.scheduler.get_last_lr()


def test_a_restart_before_the_first_save_does_not_take_up_an_earlier_run(tmp_path, monkeypatch):
    state, earlier = _state(), TrainingCheckpoints(tmp_path)
    _save(earlier, state, 8)
    fresh = TrainingCheckpoints(tmp_path)
    assert fresh.find(False) is None
    assert (tmp_path / "checkpoints" / "step_8").is_dir(), "a run that saves nothing moves nothing"

    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    restarted = TrainingCheckpoints(tmp_path)
    assert restarted.find(False) is None
    _save(restarted, state, 2)
    assert (tmp_path / "checkpoints.earlier_1" / "step_8").is_dir()
    again = TrainingCheckpoints(tmp_path).find(False)
    assert again is not None
    assert again.path.name == "step_2"

    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert TrainingCheckpoints(tmp_path).find(False) is None
    mistaken = TrainingCheckpoints(tmp_path).find(True)
    assert mistaken is not None
    assert mistaken.path.name == "step_2", "a new run that was ended at once has cost nothing"
