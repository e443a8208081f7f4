"""Starting the processes of a run on a node, and ending them well: what is here knows no config."""
