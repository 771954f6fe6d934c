#!/usr/bin/env bash
# Sets the machine up and runs the main job: a small VLA learns on the tabletop simulator. Overrides may follow:
#   bash scripts/quickstart.sh seed=1
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${RLINF_VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
bash "$ROOT/scripts/setup.sh"
exec "$VENV/bin/rlinf" train experiment=quickstart "$@"
