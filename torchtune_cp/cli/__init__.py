"""The `tune` command: one file per subcommand."""
