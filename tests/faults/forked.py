"""``tune`` in a process of its own, forked from a server that has imported torch already.

A run's only rank is then that process, instead of one that a launcher starts: a hundred runs take as long as
ten through the real command line, which other tests use.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

from tests.distributed.harness import PRELOADED


def forked_tune(argv: list[str], said: Path, limit_s: float) -> int:
    """Run a command line of ``tune``.

    Args:
        argv: Its arguments.
        said: Gets everything that it writes to stdout and stderr.
        limit_s: Seconds after which it is ended.

    Returns:
        The exit code.

    Raises:
        AssertionError: It hangs.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process = context.Process(target=_tune, args=(argv, str(said), dict(os.environ)))
    process.start()
    process.join(limit_s)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"hung for {limit_s} s: {said.read_text(errors='replace')}")
    assert process.exitcode is not None
    return process.exitcode


def _tune(argv: list[str], said: str, environment: dict[str, str]) -> None:
    from torchtune_cp.cli import run
    from torchtune_cp.cli.main import main

    os.environ.clear()
    os.environ.update(environment)
    file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    run.launch = _only_rank
    code = main(argv)
    sys.stdout.flush()
    os._exit(code)


def _only_rank(args: Any, settings: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    sys.argv = [args.training_script, *args.training_script_args]
    runpy.run_path(args.training_script, run_name="__main__")
