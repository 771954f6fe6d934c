"""Who plays the rollouts of a run: threads of a rank, its processes, or players that Ray has placed."""
