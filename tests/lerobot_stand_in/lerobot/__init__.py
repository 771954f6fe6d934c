"""Stands in for lerobot 0.6 where it is not installed: the same interfaces, a linear policy, the same way to load a pipeline."""

__version__ = "0.6.stand-in"
