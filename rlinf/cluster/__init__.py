"""Where a run collects rollouts: in threads of a rank, in its processes, or in rollout workers that Ray places."""
