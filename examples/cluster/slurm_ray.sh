#!/bin/bash
# A Ray cluster for the duration of a job: Ray places the ranks on the first nodes, and rollout workers on the remaining nodes.
#
#   sbatch examples/cluster/slurm_ray.sh experiment=libero_ppo_openvla_oft cluster.num_processes=8 cluster.num_rollout_workers=8 output_dir=/runs/oft
#
# Submitting the same arguments again continues the run. All nodes must see the folder of output_dir.
#SBATCH --job-name=rlinf-split
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --signal=TERM@900
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: sbatch $0 <overrides of rlinf train>" >&2; exit 2; }
# sbatch runs a copy of this script, so $0 does not name the folder.
here="${RLINF_CLUSTER_FOLDER:-$SLURM_SUBMIT_DIR/examples/cluster}"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port="${PORT:-6379}"
# Ray resolves names itself, not as the system does, so it gets the IP address if there is one that other nodes can reach.
number="$(getent ahostsv4 "${nodes[0]}" | awk '$1 !~ /^127[.]/ { print $1; exit }')" || true
address="${number:-${nodes[0]}}:$port"
# Ray's daemons require a token as soon as the user has one. A new token keeps other users of the nodes out; srun forwards it.
export RAY_AUTH_MODE=token
RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(python -c 'import secrets; print(secrets.token_hex(32))')}"
export RAY_AUTH_TOKEN
on() { srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" "${@:2}"; }

# The daemons end with the job.
on "${nodes[0]}" ray start --head --port="$port" --disable-usage-stats --block &
python "$here/wait_for_ray.py" "$address" 1
for node in "${nodes[@]:1}"; do
  on "$node" ray start --address="$address" --disable-usage-stats --block &
done
python "$here/wait_for_ray.py" "$address" "${#nodes[@]}"
RAY_ADDRESS="$address" on "${nodes[0]}" rlinf train resume=auto cluster.start=ray cluster.placement=disaggregated "$@"
