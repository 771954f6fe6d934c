#!/usr/bin/env bash
# Measures on one GPU what only a GPU can show (random weights, no downloads, 40 GB of disk, 30 minutes on an H200), compares each
# number with its threshold, and writes docs/gpu_results.md, which explains them. With --gpus, it measures several GPUs of one machine.
# The same code runs at tiny size without a GPU:
#   bash scripts/gpu_check.sh
#   bash scripts/gpu_check.sh --only G1 G5
#   bash scripts/gpu_check.sh --gpus 8
#   bash scripts/gpu_check.sh --device cpu --tiny --output /tmp/gpu_results.md
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${RLINF_VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"
[ -x "$PYTHON" ] || PYTHON=python3 # an environment of your own
export HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$ROOT/scripts:$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m gpu_check "$@"
