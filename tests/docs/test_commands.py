"""Every command that README, the documentation and the configs show does what the page says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from tests.docs.pages import (
    CHECKOUT,
    CONFIGS,
    PAGES,
    Command,
    config_of,
    is_real_run,
    name_of,
    shell_commands,
    shown_files,
    tune_commands,
)
from tests.forked import forked_python, forked_tune
from torchtune_cp.cli import plan, run
from torchtune_cp.cli.main import _parser, main
from torchtune_cp.cli.recipe import Recipe
from torchtune_cp.config import component_problems, load, to_typed
from torchtune_cp.config.load import split_argv
from torchtune_cp.config.locate import find_recipe
from torchtune_cp.launch.launcher import world_size_of
from torchtune_cp.metrics import read_metrics

#: Each takes about ten seconds. A page that shows another one replaces one of these.
MOST_REAL_RUNS = 4
SHORT = ("output_dir=out", "max_steps_per_epoch=2")


def _real_runs() -> dict[tuple, Command]:
    """The runs that are made, by variables and words: a command shown twice runs once."""
    return {
        (command.variables, command.words): command
        for page in [*PAGES, *CONFIGS]
        for command in tune_commands(page)
        if is_real_run(command)
    }


def write_shown_files(page: Path, folder: Path) -> None:
    for name, text in shown_files(page).items():
        (folder / name).write_text(text)


def _check_run(words: tuple[str, ...]) -> None:
    """Check a `tune run` as the command line does before it starts, without its device."""
    args = run._torchrun_parser().parse_args(words[2:])
    source, overrides = split_argv(args.training_script_args)
    assert source is not None
    schema = Recipe(find_recipe(args.training_script)).config_class()
    assert schema is not None
    cfg = to_typed(load(source, overrides), schema, world_size=world_size_of(args))
    assert component_problems(cfg) == []


@pytest.fixture
def _own_modules(monkeypatch: pytest.MonkeyPatch):
    """Undo what a command adds to the module search path, and forget modules found there."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if Path(file).parent.name.startswith("test_"):
            del sys.modules[name]


@pytest.mark.usefixtures("_own_modules")
@pytest.mark.parametrize("page", [*PAGES, *CONFIGS], ids=name_of)
def test_every_tune_command_of_the_page_is_accepted(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_shown_files(page, tmp_path)
    for command in tune_commands(page):
        with monkeypatch.context() as environment:
            for name, value in command.variables:
                environment.setenv(name, value)
            if command.words[1] == "run":
                sys.path.append(str(tmp_path))
                _check_run(command.words)
            elif command.words[1] == "download":
                _parser().parse_args(command.words[1:])
            elif command.words[1] == "plan" and config_of(command) != "tiny/llama_cpu":
                args, rest = _parser().parse_known_args(command.words[1:])
                args.overrides += rest
                assert plan.request(args).seq_len > 0
            else:
                code = main(command.words[1:])
                assert code == 0, f"{command}: {capsys.readouterr().err}"


def test_there_are_few_real_runs_and_the_other_runs_need_what_a_test_has_not() -> None:
    assert 1 <= len(_real_runs()) <= MOST_REAL_RUNS
    shown = [c for page in [*PAGES, *CONFIGS] for c in tune_commands(page) if c.words[1] == "run"]
    assert len(shown) > 10
    assert {"tiny/llama_cpu", "llama3/8B_full"} <= {config_of(command) for command in shown}


def real_run(command: Command, folder: Path) -> Path:
    """Make a run that a page shows, two steps of it, in `folder`; returns its output folder."""
    page = CHECKOUT / command.source
    if page.suffix == ".md":
        write_shown_files(page, folder)
    ended = forked_tune(
        [*command.words[1:], *SHORT],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **dict(command.variables)},
    )
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return folder / "out"


@pytest.mark.distributed
@pytest.mark.parametrize("command", _real_runs().values(), ids=str)
def test_a_shown_run_of_the_tiny_config_trains_and_saves(command: Command, tmp_path: Path) -> None:
    output = real_run(command, tmp_path)
    steps = [line["step"] for line in read_metrics(output / "metrics.jsonl") if "loss" in line]
    assert steps == [1, 2]
    for name in ("config.yaml", "final/config.json", "final/model.safetensors"):
        assert (output / name).is_file(), name
    # The program that reads a run's output stands on the page that explains the output.
    program = shown_files(CHECKOUT / "docs/getting_started.md")["look_at_run.py"]
    where = "/tmp/torchtune_cp/tiny_llama"
    assert program.count(where) == 1
    if config_of(command) == "tiny/llama_cpu" and "~dataset" not in command.words:
        done = forked_python(program.replace(where, str(output)))
        assert done.returncode == 0, done.stderr
        assert re.fullmatch(r"2 steps, last loss [\d.]+, a llama of \d+ parameters\n", done.stdout)


def test_the_other_shown_commands_exist() -> None:
    targets = {
        line.partition(":")[0]
        for line in (CHECKOUT / "Makefile").read_text().splitlines()
        if ":" in line and not line.startswith(("#", "\t", " ", ".", "$"))
    }
    modules = set()
    for page in PAGES:
        for command in shell_commands(page):
            if command.words[0] == "make":
                assert command.words[1] in targets, command
            elif command.words[0].endswith("python") and command.words[1] == "-m":
                modules.add(command.words[2])
    assert {"pytest", "benchmarks.tables"} <= modules
    for module in modules - {"pytest"}:
        assert (CHECKOUT / f"{module.replace('.', '/')}.py").is_file(), module
