#!/usr/bin/env bash
# Sets the machine up, and runs lint and all tests, slow ones too. Arguments go to pytest, and then lint is left out:
#   bash scripts/test.sh tests/unit -k config
#   RLINF_SETUP          options of scripts/setup.sh (default: --dev). Tests of what is not installed are skipped
#   RLINF_TEST_WORKERS   parallel test processes (default: 3, for two cores: some tests wait)
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${RLINF_VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
read -ra SETUP <<<"${RLINF_SETUP:---dev}"
bash "$ROOT/scripts/setup.sh" "${SETUP[@]}"
cd "$ROOT"
# One thread per process: several test processes share the cores. Each takes a whole file, so that no fixture of a file is made twice,
# and the files that take longest come first (tests/slow_tests.py), so that no process is left with one at the end.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 WANDB_MODE=offline
lint=0
[ "$#" -gt 0 ] || RLINF_VENV="$VENV" bash "$ROOT/scripts/lint.sh" || lint=1
"$VENV/bin/python" -m pytest -n "${RLINF_TEST_WORKERS:-3}" --dist loadfile --no-loadscope-reorder -m "slow or not slow" --durations=40 --durations-min=5 "$@"
[ "$lint" = 0 ] || { echo "lint failed: its output stands before that of the tests" >&2; exit 1; }
