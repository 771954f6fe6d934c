#!/usr/bin/env bash
# Adds this machine to a Ray cluster manually.
#
#   bash examples/cluster/ray.sh head                  the machine of the command `rlinf`
#   bash examples/cluster/ray.sh join node-a:6379      an additional machine; Ray places ranks and rollout workers on the GPUs of both
#   bash examples/cluster/ray.sh envs node-a:6379      a machine for simulators only (cluster.num_env_workers)
#   bash examples/cluster/ray.sh stop                  ends Ray on this machine
#
# Then, on the first machine: RAY_ADDRESS=node-a:6379 rlinf train ... cluster.start=ray cluster.num_processes=16
set -euo pipefail
usage() { sed -n '2,9p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }
[ $# -ge 1 ] || usage
case "$1" in
  head) exec ray start --head --port="${PORT:-6379}" --disable-usage-stats ;;
  join) [ $# -eq 2 ] || usage; exec ray start --address="$2" --disable-usage-stats ;;
  envs) [ $# -eq 2 ] || usage; exec ray start --address="$2" --num-gpus=0 --resources='{"rlinf_env": 1}' --disable-usage-stats ;;
  stop) exec ray stop ;;
  *) usage ;;
esac
