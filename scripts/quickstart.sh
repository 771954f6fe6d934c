#!/usr/bin/env bash
# Sets the machine up and runs the main job: a small VLA learns on the tabletop simulator. Overrides may follow:
#   bash scripts/quickstart.sh seed=1
set -euo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
bash "$ROOT/scripts/setup.sh"
exec "${RLINF_VENV:-$ROOT/.venv}/bin/rlinf" train experiment=quickstart "$@"
