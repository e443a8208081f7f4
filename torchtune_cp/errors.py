"""The exceptions that mean "the user can mend this", so that the command line prints one line."""


class UserError(ValueError):
    """A mistake by the user: the message says what was given, what is allowed and which key to change."""


class ConfigError(UserError):
    """A config (or command line) that cannot be run; the command line exits with code 2.

    Attributes:
        problems: Every problem found, one line each.
    """

    def __init__(self, problems: str | list[str]) -> None:
        """Keep all problems; the message joins them, one a line."""
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))
