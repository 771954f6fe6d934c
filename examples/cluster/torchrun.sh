#!/usr/bin/env bash
# Starts the ranks of this machine. Run it on every machine with the same arguments:
#
#   FIRST=node-a NODES=2 bash examples/cluster/torchrun.sh train experiment=quickstart output_dir=/runs/first
#
#   FIRST   host of the first machine, which all machines can reach on PORT
#   NODES   machines (default 1)
#   RANKS   ranks per machine (default: its GPUs, or 1)
#   PORT    of the store (default 29500)
set -euo pipefail
if [ -z "${RANKS:-}" ]; then
  RANKS="$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)"
  [ "$RANKS" -gt 0 ] || RANKS=1
fi
exec torchrun --nnodes="${NODES:-1}" --nproc-per-node="$RANKS" --rdzv-backend=c10d \
  --rdzv-endpoint="${FIRST:-localhost}:${PORT:-29500}" --rdzv-id="${JOB:-1}" -m rlinf "$@"
