"""What stands around the code agrees with it: workflows, pinned versions, the version itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

CHECKOUT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((CHECKOUT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_runs_make_targets_that_exist_and_nothing_else(path: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE))
    jobs = yaml.safe_load(path.read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        make, *names = command.split()
        assert make == "make"
        assert names
        assert set(names) <= targets


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_each_package_is_pinned_once_for_every_python(python: str) -> None:
    pins = [
        requirement.name.lower().replace("_", "-")
        for line in (CHECKOUT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
        for requirement in [Requirement(line)]
        if requirement.marker is None or requirement.marker.evaluate({"python_version": python})
    ]
    assert len(pins) == len(set(pins))
    assert {"torch", "numpy", "transformers", "pytest"} <= set(pins)
