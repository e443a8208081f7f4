"""A checkpoint's name and its step agree: whatever was renamed is refused, or read as what it is."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from torchtune_cp.checkpointing.resume_point import ResumePoint
from torchtune_cp.checkpointing.training_checkpoints import TrainingCheckpoints
from torchtune_cp.checkpointing.training_state import TrainingState
from torchtune_cp.cli.run import _restart_point
from torchtune_cp.errors import UserError


def save(
    output_dir: Path, *steps: int, keep_last_n: int | None = None, resume: bool = True
) -> None:
    """A run that saves after these steps."""
    model = torch.nn.Linear(2, 2)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    checkpoints = TrainingCheckpoints(output_dir, keep_last_n=keep_last_n)
    checkpoints.find(resume)
    for step in steps:
        record = {"config": {"output_dir": str(output_dir)}}
        checkpoints.save(state, step=step, record=record)
    checkpoints.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name[0] != ".")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 2, 4 and 6, the second renamed to 40."""
    save(tmp_path / "out", 2, 4, 6)
    folder = tmp_path / "out" / "checkpoints"
    (folder / "step_4").rename(folder / "step_40")
    return tmp_path / "out"


def find(output_dir: Path, resume: bool | str | Path, caplog: pytest.LogCaptureFixture) -> tuple:
    """What a run continues from, and the lines that say more than that."""
    caplog.clear()
    checkpoints = TrainingCheckpoints(output_dir)
    with caplog.at_level(logging.WARNING, "torchtune_cp"):
        given = resume if isinstance(resume, bool) else str(resume)
        found = checkpoints.find(given)
    checkpoints.close()
    return found, list(caplog.messages)


def step(found: ResumePoint | None) -> int:
    assert found is not None
    assert found.manifest is not None
    return found.manifest.step


WRONG = "it is of step 4, not of step 40 as in the folder's name: rename the folder to step_4"


def test_a_renamed_checkpoint_is_refused_by_path_and_passed_over_as_the_newest(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, said = find(run, True, caplog)
    assert step(found) == 6
    (line,) = said
    assert line.startswith("skipped step_40: ")
    assert line.endswith(WRONG)
    assert _restart_point(run, True).endswith("step_6")
    with pytest.raises(UserError, match="resume_from_checkpoint") as caught:
        find(run, run / "checkpoints" / "step_40", caplog)
    assert WRONG in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Step_40", "step_40 (copy)", "step_040", "step_40.bak", "a link"])
def test_other_names_that_give_a_wrong_step_are_refused_by_path(
    run: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = run / "checkpoints"
    if name == "a link":
        shutil.rmtree(folder / "step_40")
        (folder / "step_40").symlink_to(folder / "step_2")
        name, real = "step_40", 2
    else:
        (folder / "step_40").rename(folder / name)
        real = 4
    with pytest.raises(UserError, match=f"it is of step {real}, not of step 40"):
        find(run, folder / name, caplog)
    found, said = find(run, True, caplog)
    assert step(found) == 6
    assert len(said) == 1
    assert name in said[0]


@pytest.mark.parametrize("name", ["STEP_4", "step_4 (copy)", "step_04", "best", "step_best"])
def test_other_names_of_the_right_step_or_none_are_read_by_path_and_never_guessed(
    run: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    folder = run / "checkpoints"
    (folder / "step_40").rename(folder / name)
    found, said = find(run, folder / name, caplog)
    assert (step(found), said) == (4, [])
    found, said = find(run, True, caplog)
    assert step(found) == 6
    assert [f"skipped {name} in {folder}" in line for line in said] == [True]
    for other in ("step_2", "step_6"):
        shutil.rmtree(folder / other)
    # A run that would begin again beside its only checkpoint is refused.
    with pytest.raises(UserError, match="holds no step_N, only"):
        find(run, True, caplog)


def test_a_checkpoint_copied_from_another_run_is_read_and_its_run_named(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(run / "checkpoints" / "step_6", tmp_path / "b" / "checkpoints" / "step_6")
    found, said = find(tmp_path / "b", True, caplog)
    assert step(found) == 6
    assert [f"was saved by a run with output_dir={run}" in line for line in said] == [True]


def test_pruning_goes_by_the_real_step_and_deletes_nothing_renamed(run: Path) -> None:
    folder = run / "checkpoints"
    (folder / "step_6").rename(folder / "step_90")
    linked = run.parent / "elsewhere" / "step_2"
    linked.parent.mkdir()
    (folder / "step_2").rename(linked)
    (folder / "step_2").symlink_to(linked)
    save(run, 7, 8, keep_last_n=1)
    assert names(folder) == ["step_8"]
    # What was renamed was set aside by the first save; what a link led to is somebody else's.
    assert names(run / "checkpoints.earlier_1") == ["step_40", "step_90"]
    assert names(linked.parent) == ["step_2"]


def test_a_save_does_not_replace_what_was_renamed_to_its_name_meanwhile(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1), None)
    checkpoints = TrainingCheckpoints(tmp_path, keep_last_n=1)
    checkpoints.save(state, step=1, record={})
    folder = tmp_path / "checkpoints"
    (folder / "step_1").rename(folder / "step_2")
    checkpoints.save(state, step=2, record={})
    checkpoints.close()
    assert names(folder) == ["step_2"]
    assert names(tmp_path / "checkpoints.earlier_1") == ["step_2"]


def test_a_linked_folder_of_checkpoints_is_kept_on_its_own_disk(tmp_path: Path) -> None:
    (tmp_path / "big").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "checkpoints").symlink_to(tmp_path / "big")
    save(tmp_path / "out", 5)
    save(tmp_path / "out", 1, resume=False)
    assert names(tmp_path / "big") == ["step_1"]
    assert names(tmp_path / "checkpoints.earlier_1") == ["step_5"]
