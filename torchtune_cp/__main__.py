"""`python -m torchtune_cp`: the `tune` command."""

import sys

from torchtune_cp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
