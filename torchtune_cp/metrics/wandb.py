"""Logs to Weights & Biases, online or into an offline run directory."""

import contextlib
import inspect
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from torchtune_cp.config.argument_checks import checked_by
from torchtune_cp.config.path_checks import expand_home
from torchtune_cp.config.secrets import is_private, mask_secrets, mask_text, write_private
from torchtune_cp.errors import UserError
from torchtune_cp.metrics.interface import (
    LABELS,
    Scalar,
    loggable_config,
    needs_package,
    refuse_unknown_keys,
    to_number,
    unknown_keys,
)
from torchtune_cp.metrics.run_notes import RunNotes

_CONFIG_NAME = "torchtune_config.yaml"
_NOTE = "wandb_run_id"
#: Arguments and variables with which users choose the run themselves.
_USERS_CHOICE = ("id", "resume", "resume_from", "fork_from")
#: What `settings` of a config may hold: nothing that sends, reads or runs something else.
_SETTINGS = (
    "console",
    "disable_code",
    "disable_git",
    "init_timeout",
    "quiet",
    "show_errors",
    "show_info",
    "show_warnings",
    "silent",
    "summary_timeout",
    "x_disable_meta",
    "x_disable_stats",
    "x_label",
    "x_stats_sampling_interval",
)
_USERS_VARIABLES = ("WANDB_RUN_ID", "WANDB_RESUME")


@contextlib.contextmanager
def _masked_command_line() -> Iterator[None]:
    """Hide secrets among the overrides: W&B keeps the command line in the run's metadata."""
    arguments = sys.argv[1:]
    sys.argv[1:] = [mask_text(argument) for argument in arguments]
    try:
        yield
    finally:
        sys.argv[1:] = arguments


def _settings_errors(settings: Any) -> Iterator[UserError]:
    """Say which settings a config may not choose: others name servers, files, programs and keys."""
    if settings is None:
        return
    if not isinstance(settings, Mapping):
        yield UserError(f"settings: expected a mapping, got {type(settings).__name__}")
        return
    for name in settings:
        if name not in _SETTINGS:
            yield UserError(
                f"settings.{name}: it cannot be set in a config; allowed are {', '.join(_SETTINGS)}"
                " (W&B reads WANDB_BASE_URL, WANDB_API_KEY and others from the environment)"
            )


def _check_arguments(arguments: Mapping[str, Any], named: frozenset[str]) -> Iterator[UserError]:
    lacking = list(needs_package("wandb"))
    if lacking:
        yield from lacking
        return
    import wandb

    yield from unknown_keys(arguments, named, inspect.signature(wandb.init).parameters)
    yield from _settings_errors(arguments.get("settings"))


@checked_by(_check_arguments)
class WandBLogger:
    """Logs a run to Weights & Biases.

    Without network or key set `WANDB_MODE=offline` (or `metric_logger.mode=offline`): the run
    is written to `<log_dir>/wandb/offline-run-*` and can be sent later with `wandb sync`.
    A run that is already active (`wandb.init` called by the user's code) is used unchanged.

    A resumed training run continues its W&B run, unless `id`, `resume`, `resume_from` or
    `fork_from` (or their environment variables) are set. Steps that were logged before a crash
    and are repeated after it are not logged twice.
    """

    def __init__(
        self,
        project: str = "torchtune",
        entity: str | None = None,
        group: str | None = None,
        log_dir: str | Path | None = None,
        run_notes: RunNotes | None = None,
        **init_args: Any,
    ) -> None:
        """Start the run.

        Args:
            project: Name of the project.
            entity: User or team that owns it; default is that of the account.
            group: Groups runs in the web page.
            log_dir: Folder for the run's files (`dir` means the same); created if needed.
            run_notes: Stores the run's id; passed by the recipe.
            **init_args: Any other argument of `wandb.init`: `name`, `tags`, `mode` ...

        Raises:
            UserError: wandb is not installed, there is no key, no connection, or a key is unknown.
        """
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "metric_logger: WandBLogger needs the package wandb: pip install wandb (or "
                "choose metric_logger=torchtune_cp.metrics.StdoutLogger)"
            ) from error
        self._wandb = wandb
        known = set(inspect.signature(wandb.init).parameters)
        unknown = {key: value for key, value in init_args.items() if key not in known}
        refuse_unknown_keys("WandBLogger", unknown, {"log_dir", *known})
        init_args = {key: value for key, value in init_args.items() if key in known}
        init_args["group"] = group
        init_args |= {name: mask_secrets(init_args[name]) for name in LABELS if name in init_args}
        if not isinstance(init_args.get("settings"), wandb.Settings):  # code of the user has that
            for problem in _settings_errors(init_args.get("settings")):
                raise UserError(f"metric_logger.{problem}")
        folder = init_args.pop("dir", None) or log_dir
        self._owned = wandb.run is None
        self._logged_step: int | None = None
        own_choice = any(init_args.get(name) is not None for name in _USERS_CHOICE) or any(
            os.environ.get(name) for name in _USERS_VARIABLES
        )
        earlier = None if run_notes is None or own_choice else run_notes.get(_NOTE)
        if earlier is not None:
            init_args |= {"id": earlier, "resume": "allow"}
        if wandb.run is not None:
            self._run = wandb.run
        else:
            if folder is not None:
                folder = expand_home(folder)
                folder.mkdir(parents=True, exist_ok=True)
            try:
                with _masked_command_line():
                    self._run = wandb.init(
                        project=project,
                        entity=entity,
                        dir=None if folder is None else str(folder),
                        **init_args,
                    )
            except wandb.Error as error:
                reason = " ".join(str(error).split())
                raise UserError(
                    f"metric_logger: Weights & Biases did not start ({reason}); run `wandb login` "
                    "or set WANDB_API_KEY, or set WANDB_MODE=offline to keep the run on disk"
                ) from error
            if run_notes is not None and not self._run.disabled:
                run_notes.set(_NOTE, self._run.id)
            if run_notes is not None and self._run.id == earlier:
                # What the server has counts; a run on the disk cannot be asked.
                on_server = self._run.summary.get("global_step") if self._run.resumed else None
                self._logged_step = run_notes.logged_step if on_server is None else on_server
        # Charts over the training step, with anything else that the run logs.
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step", step_sync=True)

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Log one value."""
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log the values of one step, with `global_step` as the x-axis."""
        if self._logged_step is not None and step <= self._logged_step:
            return
        numbers = {name: to_number(data) for name, data in payload.items()}
        self._run.log({**numbers, "global_step": step})

    def log_config(self, config: Any) -> None:
        """Save the resolved config, secrets masked: as the run's config and as a file in it."""
        masked = loggable_config(config)
        self._run.config.update(masked, allow_val_change=True)
        # A file inside the run's folder is uploaded from there; one elsewhere would become a link.
        path = Path(self._run.dir) / _CONFIG_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(masked, sort_keys=False)
        write_private(path, text)
        if is_private(text) and self._owned:
            Path(self._run.dir).parent.chmod(0o700)  # W&B's own files next to it contain the same
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self) -> None:
        """Finish the run, unless the user's own code started it."""
        if self._owned:
            self._run.finish()
