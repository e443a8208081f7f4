"""The wheel alone, in an empty environment outside the checkout, runs the tiny config."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
PACKAGE = "torchtune_cp"


def _run(*command: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    ended = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder]
    _run(*command, CHECKOUT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment that has the wheel, and its dependencies (torch is 200 MB) by path only."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
    _run(*install, "--no-index", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path line makes packages importable but does not run that folder's own .pth files, so the
    # checkout that is installed there as editable stays out.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_the_wheel_carries_recipes_and_configs_inside_the_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert f"{PACKAGE}/_recipes/full_finetune_distributed.py" in names
    assert f"{PACKAGE}/_configs/tiny/llama_cpu.yaml" in names
    tops = {name.partition("/")[0] for name in names}
    assert tops == {PACKAGE, next(top for top in tops if top.endswith(".dist-info"))}
    shipped = {
        f"{PACKAGE}/_configs/{path.relative_to(CHECKOUT / 'configs').as_posix()}"
        for path in (CHECKOUT / "configs").rglob("*.yaml")
    }
    assert shipped <= set(names)
    assert f"{PACKAGE}/_configs/esm2/650M_mlm.yaml" in shipped
    assert f"{PACKAGE}/datasets/examples/proteins.fasta" in names


RUNS = (("full_finetune_distributed", "tiny/llama_cpu"), ("esm2_mlm_distributed", "tiny/esm2_cpu"))


@pytest.mark.distributed
@pytest.mark.parametrize(("recipe", "config_name"), RUNS)
def test_the_installed_wheel_runs_the_tiny_config_from_another_folder(
    environment: Path, tmp_path: Path, recipe: str, config_name: str
) -> None:
    python, tune = environment / "bin" / "python", environment / "bin" / "tune"
    code = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    where = Path(_run(python, "-c", code, cwd=tmp_path).stdout.strip())
    assert environment in where.parents
    assert CHECKOUT not in where.parents
    assert config_name in _run(tune, "ls", cwd=tmp_path).stdout

    command = [tune, "run", "--nproc_per_node", "2", recipe]
    config = ["--config", config_name, "context_parallel_dim=2", "output_dir=out"]
    _run(*command, *config, "max_steps_per_epoch=2", cwd=tmp_path)
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert (tmp_path / "out" / "final" / "config.json").is_file()
