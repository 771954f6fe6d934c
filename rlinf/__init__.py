"""Reinforcement learning of vision-language-action models in robot simulators."""

__version__ = "0.1.0"
