"""Programs that are forked from a process that has imported torch, in place of new interpreters.

A small run spends most of its time on imports. What is forked here does everything else as it does elsewhere:
``tune run`` has its launcher, torch's agent and a process for each rank. Tests of signals, of ranks that fail
and of the installed package start new interpreters: of several forked ranks, torch's agent reports one only.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from tests.distributed.harness import PRELOADED


def forked_tune(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command line of ``tune``.

    Args:
        argv: Its arguments.
        options: ``cwd``, ``env`` and ``timeout``, as of ``subprocess.run``.

    Raises:
        AssertionError: It hangs.
    """
    return _forked(_tune, argv, **options)


def forked_torchrun(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command line of ``torchrun``; see :func:`forked_tune`."""
    return _forked(_torchrun, argv, **options)


def forked_python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -c code``; see :func:`forked_tune`."""
    return _forked(_python, [code], **options)


def _forked(
    program: Callable[[list[str]], int],
    argv: list[str],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    environment = dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as folder:
        files = (f"{folder}/stdout", f"{folder}/stderr")
        process = context.Process(
            target=_run, args=(program, argv, files, environment, str(cwd or Path.cwd()))
        )
        process.start()
        process.join(timeout)
        hangs = process.is_alive()
        if hangs:
            process.terminate()  # a launcher ends its ranks
            process.join(10)
            process.kill()
            process.join()
        stdout, stderr = (Path(file).read_text(errors="replace") for file in files)
    assert not hangs, f"{argv} hung for {timeout} s: {stdout}{stderr}"
    assert process.exitcode is not None
    return subprocess.CompletedProcess(argv, process.exitcode, stdout, stderr)


def _run(
    program: Callable[[list[str]], int],
    argv: list[str],
    files: tuple[str, str],
    environment: dict[str, str],
    folder: str,
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, path in zip((1, 2), files, strict=True):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    try:
        code = program(argv)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _tune(argv: list[str]) -> int:
    from torchtune_cp.cli.main import main

    _fork_ranks()
    return main(argv)


def _torchrun(argv: list[str]) -> int:
    from torch.distributed.run import main

    _fork_ranks()
    main(argv)
    return 0


def _python(argv: list[str]) -> int:
    exec(compile(argv[0], "<string>", "exec"), {"__name__": "__main__"})  # a page's own example
    return 0


def _fork_ranks() -> None:
    """Have torch's agent fork the ranks from this process."""
    from torch.distributed import run as torchrun

    launch = torchrun.elastic_launch

    def launch_forked(config: Any, entrypoint: str) -> Any:
        assert entrypoint == sys.executable
        config.start_method = "fork"
        return launch(config, _rank)

    torchrun.elastic_launch = launch_forked


def _rank(*command: str) -> None:
    """What ``python -u SCRIPT ARGUMENTS`` does."""
    assert command[0] == "-u"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)  # a handler of the launcher's is forked, too
    sys.argv = list(command[1:])
    sys.path[0] = str(Path(command[1]).parent)
    runpy.run_path(command[1], run_name="__main__")
