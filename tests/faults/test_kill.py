"""kill -9 of a rank or of the launcher at any moment costs the steps since the last save, nothing else."""

from __future__ import annotations

import random

import pytest

from tests.faults.runs import STEPS, curve, kill_and_resume, run_uninterrupted, write_config

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The config, and the folder of the run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("reference")
    config = write_config(folder / "config.yaml")
    run_uninterrupted(config, folder / "out")
    return config, folder / "out"


def _check(reference, out) -> int:
    """The curve is that of the uninterrupted run to the bit, and so is the model; losses compared."""
    expected, found = curve(reference), curve(out)
    assert found == expected
    model = "final/model.safetensors"
    assert (out / model).read_bytes() == (reference / model).read_bytes()
    losses = [line["loss"] for line in found if "loss" in line]
    assert len(losses) == STEPS
    return len(losses)


@pytest.mark.timeout(1800)  # it waits for processes: long where many others run
def test_three_kills_leave_the_curve_of_the_uninterrupted_run(reference, tmp_path, capsys):
    config, expected = reference
    out = tmp_path / "out"
    rng = random.Random(1)
    campaign = kill_and_resume(config, out, rng, 3, moments=("save", "step", "start"))
    assert len(campaign.kills) == 3
    compared = _check(expected, out)
    with capsys.disabled():
        print(
            f"\n{len(campaign.kills)} kills {campaign.kills}, {campaign.starts - 1} resumes,"
            f" {campaign.verified} checkpoints verified, {compared} losses compared"
        )


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_fifty_kills_at_random_moments(reference, tmp_path, capsys):
    config, expected = reference
    kills = resumes = verified = compared = seed = 0
    while kills < 50:
        out = tmp_path / f"out{seed}"
        campaign = kill_and_resume(config, out, random.Random(seed), kills=8)
        compared += _check(expected, out)
        kills += len(campaign.kills)
        resumes += campaign.starts - 1
        verified += campaign.verified
        with capsys.disabled():
            print(f"\nseed {seed}: {campaign.starts - 1} resumes, kills {campaign.kills}")
        seed += 1
    with capsys.disabled():
        print(
            f"\n{kills} kills, {resumes} resumes, {verified} checkpoints verified,"
            f" {compared} losses compared"
        )
