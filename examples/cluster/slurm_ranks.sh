#!/bin/bash
# Ranks on all nodes, one task per GPU, for rollouts and training.
#
#   sbatch examples/cluster/slurm_ranks.sh experiment=libero_ppo_openvla_oft model.model_path=/data/openvla-oft output_dir=/runs/oft
#
# A job that loses a rank, or approaches its time limit, is requeued and resumes, at most RESTARTS times (default: 3).
# Submitting the same arguments again also continues the run. All nodes must see the folder of output_dir.
#SBATCH --job-name=rlinf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --signal=TERM@900
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: sbatch $0 <overrides of rlinf train>" >&2; exit 2; }
# A status of 128 or more means that a signal ended a rank: it was lost, or the time limit is near. Errors of the run (1, 2) would recur.
# Not --kill-on-bad-exit: it would end ranks with status 143 before they can report a rejected argument (2).
status=0
srun --wait=60 rlinf train resume=auto "$@" || status=$?
if [ "$status" -ge 128 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${RESTARTS:-3}" ]; then
  echo "The ranks ended with status $status; job $SLURM_JOB_ID is requeued" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
