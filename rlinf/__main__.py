"""Entry point of ``python -m rlinf``, which runs the command ``rlinf``."""

import sys

from rlinf.cli import main

if __name__ == "__main__":
    sys.exit(main())
