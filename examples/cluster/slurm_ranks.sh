#!/bin/bash
# Ranks on all nodes, one task for each GPU; they train and play.
#
#   sbatch examples/cluster/slurm_ranks.sh experiment=libero_ppo_openvla_oft model.model_path=/data/openvla-oft output_dir=/runs/oft
#
# A job that loses a rank, or comes near its time limit, goes back into the queue and resumes, at most RESTARTS times
# (default: 3). Sent again, the same words continue the run, too. The nodes share the folder of output_dir.
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
# From 128 on, a signal has ended a rank: it was lost, or its time ends. A fault of the run (1, 2) would come again.
# Not --kill-on-bad-exit: it would end ranks with status 143 before they can say that a word was rejected (2).
status=0
srun --wait=60 rlinf train resume=auto "$@" || status=$?
if [ "$status" -ge 128 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt "${RESTARTS:-3}" ]; then
  echo "The ranks ended with status $status; job $SLURM_JOB_ID goes back into the queue" >&2
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
