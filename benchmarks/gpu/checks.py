"""Run one part of the GPU checks: `python -m benchmarks.gpu.checks attention --device cuda`.

`run.sh` beside this file runs all of them, each with a time limit. Only torch has to be there for
this file to start; what else a part needs and does not find is that part's failure, on record.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu.report import CHECKOUT, Setting, record_crash, short

PARTS = ("attention", "documents", "recipe", "loss", "throughput", "memory")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a part; the exit code is 1 when it failed.

    Args:
        argv: The arguments, `sys.argv[1:]` when None.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.checks", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args(argv)
    # Figures of a dry run are not kept: they are written to a path that git ignores.
    default = "benchmarks/results/gpu" if args.device == "cuda" else "build/gpu_rehearsal"
    setting = Setting(args.device, Path(os.environ.get("OUT") or CHECKOUT / default))
    setting.result_file(args.part).unlink(missing_ok=True)
    try:
        status = importlib.import_module(f"benchmarks.gpu.{args.part}").run(setting)
    except Exception as error:  # noqa: BLE001 - the last place where it can be put on record
        traceback.print_exc()
        record_crash(setting, args.part, short(error))
        return 1
    return int(status == "failed")


if __name__ == "__main__":
    sys.exit(main())
