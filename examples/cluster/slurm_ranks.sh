#!/bin/bash
# Ranks on all nodes, one task for each GPU; they train and play.
#
#   sbatch examples/cluster/slurm_ranks.sh experiment=libero_ppo_openvla_oft model.model_path=/data/openvla-oft output_dir=/runs/oft
#
# Sent again, the same words continue the run. The nodes share the folder of output_dir.
#SBATCH --job-name=rlinf
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --signal=TERM@900
set -euo pipefail
[ $# -ge 1 ] || { echo "usage: sbatch $0 <overrides of rlinf train>" >&2; exit 2; }
exec srun --kill-on-bad-exit=1 rlinf train resume=auto "$@"
