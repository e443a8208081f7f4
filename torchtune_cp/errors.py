"""The exceptions for user errors and for runs ended by a signal, each reported in one line."""

import os
import signal

#: Exit code of a run that a signal stopped after a complete checkpoint (`EX_TEMPFAIL`: try again).
EXIT_STOPPED = 75


class UserError(ValueError):
    """A user error: the message names the given value, the allowed values and the key to change."""


class NotFoundHereError(UserError):
    """Something that is named rightly, for all that can be known, but is not on this machine."""


class ConfigError(UserError):
    """A config (or command line) that cannot be run; the command line exits with code 2.

    Attributes:
        problems: Every problem found, one line each.
    """

    def __init__(self, problems: str | list[str]) -> None:
        """Keep all problems; the message joins them, one a line."""
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class RunStopped(Exception):
    """A run that a signal ended early and in order: no failure, and not finished either.

    Attributes:
        exit_code: What the process exits with.
    """

    def __init__(self, signal_name: str, checkpoint: str | os.PathLike[str] | None) -> None:
        """Say what ended the run and what is left of it.

        Args:
            signal_name: For example `"SIGTERM"`.
            checkpoint: The complete checkpoint that the run left, None when it left none.
        """
        if checkpoint is None:
            super().__init__(f"stopped by {signal_name}; there is no checkpoint of this run")
            self.exit_code = 128 + signal.Signals[signal_name]
        else:
            super().__init__(
                f"stopped by {signal_name}: {os.fspath(checkpoint)} is complete;"
                " resume_from_checkpoint=true continues from it"
            )
            self.exit_code = EXIT_STOPPED
