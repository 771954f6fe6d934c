"""Train a policy: ``python train.py model=openvla_tiny env=tabletop algorithm=ppo``, or ``experiment=quickstart``."""

import sys

from rlinf.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
