"""Logs to Weights & Biases, online or into an offline run directory."""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from torchtune_cp.errors import UserError
from torchtune_cp.metrics.interface import Scalar, loggable_config, refuse_unknown_keys, to_number

_CONFIG_NAME = "torchtune_config.yaml"


class WandBLogger:
    """Logs a run to Weights & Biases.

    Without network or key set ``WANDB_MODE=offline`` (or ``metric_logger.mode=offline``): the run
    is written to ``<log_dir>/wandb/offline-run-*`` and can be sent later with ``wandb sync``.
    A run that is already going (``wandb.init`` called by the user's own code) is used as it is.
    """

    def __init__(
        self,
        project: str = "torchtune",
        entity: str | None = None,
        group: str | None = None,
        log_dir: str | Path | None = None,
        **init_args: Any,
    ) -> None:
        """Start the run.

        Args:
            project: Name of the project.
            entity: User or team that owns it; default is the account's own.
            group: Groups runs in the web page.
            log_dir: Folder for the run's files (``dir`` means the same); made if needed.
            **init_args: Any other argument of ``wandb.init``: ``name``, ``tags``, ``mode`` ...

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
        folder = init_args.pop("dir", None) or log_dir
        self._owned = wandb.run is None
        if wandb.run is not None:
            self._run = wandb.run
        else:
            if folder is not None:
                folder = Path(folder).expanduser()
                folder.mkdir(parents=True, exist_ok=True)
            try:
                self._run = wandb.init(
                    project=project,
                    entity=entity,
                    group=group,
                    dir=None if folder is None else str(folder),
                    **init_args,
                )
            except wandb.Error as error:
                reason = " ".join(str(error).split())
                raise UserError(
                    f"metric_logger: Weights & Biases did not start ({reason}); run `wandb login` "
                    "or set WANDB_API_KEY, or set WANDB_MODE=offline to keep the run on disk"
                ) from error
        # Charts over the training step, whatever else the run logs.
        self._run.define_metric("global_step")
        self._run.define_metric("*", step_metric="global_step", step_sync=True)

    def log(self, name: str, data: Scalar, step: int) -> None:
        """Log one value."""
        self.log_dict({name: data}, step)

    def log_dict(self, payload: Mapping[str, Scalar], step: int) -> None:
        """Log the values of one step, with ``global_step`` as the x-axis."""
        numbers = {name: to_number(data) for name, data in payload.items()}
        self._run.log({**numbers, "global_step": step})

    def log_config(self, config: Any) -> None:
        """Save the resolved config, secrets masked: as the run's config and as a file in it."""
        masked = loggable_config(config)
        self._run.config.update(masked, allow_val_change=True)
        # A file inside the run's folder is uploaded from there; one elsewhere would become a link.
        path = Path(self._run.dir) / _CONFIG_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(masked, sort_keys=False), encoding="utf-8")
        self._run.save(str(path), base_path=str(path.parent), policy="now")

    def close(self) -> None:
        """Finish the run, unless the user's own code started it."""
        if self._owned:
            self._run.finish()
