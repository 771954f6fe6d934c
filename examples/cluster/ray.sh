#!/usr/bin/env bash
# Adds this machine to a Ray cluster by hand.
#
#   bash examples/cluster/ray.sh head                  the machine on which `rlinf` runs: ranks train here, so Ray has none of its GPUs
#   bash examples/cluster/ray.sh players node-a:6379   a machine whose GPUs play
#   bash examples/cluster/ray.sh envs node-a:6379      a machine that only simulates (cluster.env_nodes)
#   bash examples/cluster/ray.sh stop                  ends Ray on this machine
#
# Then, on the first machine: RAY_ADDRESS=node-a:6379 rlinf train ... cluster.start=ray cluster.placement=split cluster.num_players=8
set -euo pipefail
usage() { sed -n '2,9p' "$0" | sed 's/^# \{0,1\}//' >&2; exit 2; }
[ $# -ge 1 ] || usage
case "$1" in
  head) exec ray start --head --port="${PORT:-6379}" --num-gpus=0 --disable-usage-stats ;;
  players) [ $# -eq 2 ] || usage; exec ray start --address="$2" --disable-usage-stats ;;
  envs) [ $# -eq 2 ] || usage; exec ray start --address="$2" --num-gpus=0 --resources='{"rlinf_env": 1}' --disable-usage-stats ;;
  stop) exec ray stop ;;
  *) usage ;;
esac
