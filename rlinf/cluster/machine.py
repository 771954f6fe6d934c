"""Checks that the machines of a Ray run have identical software and that no GPU is used twice."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf.config.plugins import load_plugins
from rlinf.distributed.start import rank_fingerprint, reject_differences
from rlinf.errors import ConfigError
from rlinf.files import sha256_of


@dataclass(frozen=True)
class CommandMachine:
    """Describes the command's machine, for comparison with the machines of ranks and rollout workers."""

    plugins: Sequence[str]
    gpus: Sequence[str] = ()  # GPUs of ranks that Ray did not start, as in ``CUDA_VISIBLE_DEVICES``
    host: str = field(default_factory=socket.gethostname)
    software: dict[str, Any] = field(default_factory=dict)  # versions that must be the same on all machines

    @classmethod
    def here(cls, plugins: Sequence[str], gpus: Sequence[str] = ()) -> CommandMachine:
        """Describe this machine, importing the plugins."""
        digests = {f"plugin {path} (sha256)": sha256_of(path) for path in load_plugins(plugins) if path.endswith(".py")}
        return cls(plugins, gpus, software=rank_fingerprint([]) | digests)

    def check(self) -> None:
        """Raise ConfigError if this rollout worker's code or packages differ from the ranks', or if a rank uses its GPU."""
        here = self._compare()
        if not self.gpus or here.host != self.host:
            return
        import ray

        # Ray does not know which GPUs the ranks use because it did not start them.
        overlap = set(self.gpus) & set(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        if overlap:
            raise ConfigError(
                f"Ray assigned GPU {min(overlap)} of {self.host} to a rollout worker, but a rank uses it; expected a free GPU. Start Ray "
                "on that machine with `ray start --num-gpus=0`, or expose only free GPUs: CUDA_VISIBLE_DEVICES=<their numbers> ray start"
            )

    def check_for_rank(self, folders: Sequence[str]) -> None:
        """Raise ConfigError if this rank's code or packages differ from the command's, or if a folder is missing."""
        here = self._compare()
        for folder in folders:
            if not os.path.isdir(folder):
                raise ConfigError(
                    f"Ray starts a rank on {here.host}, which has no folder {folder}; expected all machines with ranks can access the "
                    "command's working directory and the run folder under the same paths. Run the command in a shared folder, and set "
                    "output_dir=<a shared folder>"
                )

    def _compare(self) -> CommandMachine:
        """Return this machine's description, or raise ConfigError if it differs."""
        here = CommandMachine.here(self.plugins)
        reject_differences([(self.host, self.software), (here.host, here.software)], "machine")
        return here
