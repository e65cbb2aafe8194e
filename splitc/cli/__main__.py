"""`python -m splitc.cli`, where the command `splitc` is not installed."""

import sys

from splitc.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
