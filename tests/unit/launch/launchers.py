"""Run several ``tune run`` at once, each in a process of its own, after one import of torch.

``python -m tests.unit.launch.launchers JSON``: a list of ``{"argv", "after", "signal", "signal_after"}``,
times in seconds. Prints a list of ``{"code", "said"}``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).parents[3]


def launch_all(launches: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Start them in ``folder``, wait for all, and return how each one ended."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.unit.launch.launchers", json.dumps(launches)],
        cwd=folder,
        env={
            **{k: v for k, v in os.environ.items() if k != "TUNE_TRACEBACK"},
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(folder),
            "PYTHONPATH": str(CHECKOUT),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(ended.stdout)


def _main(launches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from torchtune_cp.cli import run
    from torchtune_cp.cli.main import main

    run._import_torch_quietly()
    run._torchrun_parser()
    started = []
    for launch in launches:
        said = tempfile.TemporaryFile()  # noqa: SIM115  (read when the process has ended)
        pid = os.fork()
        if pid == 0:
            for stream in (1, 2):
                os.dup2(said.fileno(), stream)
            time.sleep(launch.get("after", 0))
            code = main(["run", *launch["argv"]])
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        if "signal" in launch:
            number = signal.Signals[launch["signal"]]
            threading.Timer(launch["signal_after"], os.kill, (pid, number)).start()
        started.append((pid, said))
    results = []
    for pid, said in started:
        _, status = os.waitpid(pid, 0)
        said.seek(0)
        results.append(
            {
                "code": os.waitstatus_to_exitcode(status),
                "said": said.read().decode().splitlines(),
            }
        )
    return results


if __name__ == "__main__":
    print(json.dumps(_main(json.loads(sys.argv[1]))))
