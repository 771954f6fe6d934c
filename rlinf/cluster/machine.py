"""Checks of the machines of a run on Ray: equal software, separate GPUs."""

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
    """The command's machine, for comparison with the machines of ranks and rollout workers."""

    plugins: Sequence[str]
    gpus: Sequence[str] = ()  # used by ranks without Ray, as in ``CUDA_VISIBLE_DEVICES``
    host: str = field(default_factory=socket.gethostname)
    software: dict[str, Any] = field(default_factory=dict)  # versions that must be the same on all machines

    @classmethod
    def here(cls, plugins: Sequence[str], gpus: Sequence[str] = ()) -> CommandMachine:
        """Describe this machine. Imports the plugins."""
        digests = {f"plugin {path} (sha256)": sha256_of(path) for path in load_plugins(plugins) if path.endswith(".py")}
        return cls(plugins, gpus, software=rank_fingerprint([]) | digests)

    def check(self) -> None:
        """Raise ConfigError if this rollout worker's code or packages differ from the ranks', or a rank uses its GPU."""
        here = self._compare()
        if not self.gpus or here.host != self.host:
            return
        import ray

        # Ray does not know which GPUs the ranks use: it did not start them.
        overlap = set(self.gpus) & set(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        if overlap:
            raise ConfigError(
                f"Ray gives a rollout worker GPU {min(overlap)} of {self.host}, which a rank uses; required: a free GPU. Start Ray on that "
                "machine with `ray start --num-gpus=0`, or with the free GPUs only: CUDA_VISIBLE_DEVICES=<their numbers> ray start"
            )

    def check_for_rank(self, folders: Sequence[str]) -> None:
        """Raise ConfigError if this rank's code or packages differ from the command's, or a folder is missing."""
        here = self._compare()
        for folder in folders:
            if not os.path.isdir(folder):
                raise ConfigError(
                    f"The machine {here.host}, on which Ray starts a rank, has no folder {folder}; required: the folders of the command and "
                    "of the run under the same path on all machines with ranks. Run the command in a shared folder, and set "
                    "output_dir=<a shared folder>"
                )

    def _compare(self) -> CommandMachine:
        """Return this machine, or raise ConfigError if it differs."""
        here = CommandMachine.here(self.plugins)
        reject_differences([(self.host, self.software), (here.host, here.software)], "machine")
        return here
