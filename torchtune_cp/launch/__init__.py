"""Starting and ending the processes of a run on a node; nothing here depends on the config package."""
