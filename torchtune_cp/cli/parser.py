"""An argument parser that reports errors in one line."""

import argparse
from typing import Any, NoReturn

from torchtune_cp.errors import ConfigError

#: What `add_subparsers` returns.
Subparsers = Any


class OneLineParser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `ConfigError` instead of printing its whole usage."""

    def __init__(self, **kwargs: Any) -> None:
        """Keep help texts as they are written."""
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs)

    def error(self, message: str) -> NoReturn:
        """Raise the error, with the command that shows what is allowed."""
        raise ConfigError(f"{self.prog}: {message} (see {self.prog} --help)")
