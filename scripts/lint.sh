#!/usr/bin/env bash
# Lint: style and format, spelling, shell scripts, types, and a site without warnings. Prints the output of what fails.
set -uo pipefail
ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="${RLINF_VENV:-$ROOT/.venv}"
case "$VENV" in /*) ;; *) VENV="$PWD/$VENV" ;; esac
cd "$ROOT" || exit
FOLDER="$(mktemp -d)"
trap 'rm -rf "$FOLDER"' EXIT
export NO_MKDOCS_2_WARNING=1
declare -A JOBS

start() { # start NAME COMMAND ARGUMENTS: runs the command beside the others
  local name="$1" command="$2"
  shift 2
  "$VENV/bin/$command" "$@" >"$FOLDER/$name.log" 2>&1 &
  JOBS[$name]=$!
}

start types mypy --no-color-output
start style ruff check --output-format concise .
start format ruff format --check .
start spelling codespell . .ci .github
start shell shellcheck --exclude SC1091,SC2016 scripts/*.sh examples/cluster/*.sh .ci/run
start site mkdocs build --strict --site-dir "$FOLDER/site"

status=0
for name in "${!JOBS[@]}"; do
  wait "${JOBS[$name]}" && continue
  status=1
  echo "lint: $name failed (bash scripts/setup.sh --dev installs the tools)"
  cat "$FOLDER/$name.log"
done
[ "$status" = 1 ] || echo "lint: clean"
exit "$status"
