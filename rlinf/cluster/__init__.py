"""Who plays the rollouts of a run: threads of a rank, its processes, or rollout workers that Ray has placed."""
