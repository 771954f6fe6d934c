"""Evaluate a policy: ``python evaluate.py checkpoint=outputs/quickstart/latest evaluation.num_episodes=500``."""

import sys

from rlinf.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
