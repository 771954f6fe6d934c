#!/usr/bin/env bash
# Measures on one GPU what only a GPU can show (random weights, no downloads, 32 GB of disk), and compares each number with its
# threshold. Numbers are added to docs/gpu_results.json one by one, and docs/gpu_results.md is generated from it. Each call runs what
# this GPU lacks, the most valuable checks first (27 minutes on an H200 in all, in one call or several):
#   bash scripts/gpu_check.sh --minutes 10
#   bash scripts/gpu_check.sh --list --minutes 10       # the order, and what fits
#   bash scripts/gpu_check.sh --since HEAD~20           # also what was measured before that commit
#   bash scripts/gpu_check.sh --wheels                  # packages needed besides torch >= 2.11, transformers >= 5.17, safetensors
#   bash scripts/gpu_check.sh --only G5 "G4 7B"
#   bash scripts/gpu_check.sh --gpus 8                  # several GPUs of this machine
#   bash scripts/gpu_check.sh --device cpu --tiny --output /tmp/gpu_results.json
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${RLINF_VENV:-$ROOT/.venv}"
PYTHON="$VENV/bin/python"
[ -x "$PYTHON" ] || PYTHON=python3 # an environment of your own
export HF_HUB_OFFLINE=1 WANDB_MODE=offline TOKENIZERS_PARALLELISM=false
export PYTHONPATH="$ROOT/scripts:$ROOT${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" -m gpu_check "$@"
