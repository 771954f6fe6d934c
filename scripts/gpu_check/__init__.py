"""Measures what only a GPU can show, each number with its threshold. ``scripts/gpu_check.sh`` starts it."""

import time

STARTED = time.monotonic()
"""The start of the call, before torch is imported."""
