"""Rollout collection in a rank's threads, in its child processes, or in rollout workers placed by Ray."""
