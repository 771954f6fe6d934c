"""What every machine of a run on Ray must have in common, and what it must not share."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf.config.plugins import load_plugins
from rlinf.distributed.start import reject_differences, what_ranks_share
from rlinf.errors import ConfigError
from rlinf.files import sha256_of


@dataclass(frozen=True)
class CommandMachine:
    """The command's machine, with which the machines of ranks and rollout workers compare themselves."""

    plugins: Sequence[str]
    gpus: Sequence[str] = ()  # used by ranks without Ray, as in ``CUDA_VISIBLE_DEVICES``
    host: str = field(default_factory=socket.gethostname)
    software: dict[str, Any] = field(default_factory=dict)  # versions that must be the same on all machines

    @classmethod
    def here(cls, plugins: Sequence[str], gpus: Sequence[str] = ()) -> CommandMachine:
        """Describe this machine. Imports the plugins."""
        own = {f"plugin {path} (sha256)": sha256_of(path) for path in load_plugins(plugins) if path.endswith(".py")}
        return cls(plugins, gpus, software=what_ranks_share([]) | own)

    def check(self) -> None:
        """Reject a rollout worker in this process if its code or packages differ from the ranks', or a rank uses its GPU."""
        here = self._compare()
        if not self.gpus or here.host != self.host:
            return
        import ray

        shared = set(self.gpus) & set(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        if shared:
            raise ConfigError(
                f"Ray gives a rollout worker GPU {min(shared)} of {self.host}, which a rank uses; required: GPUs that no rank uses. Start "
                "Ray on that machine with `ray start --num-gpus=0`, or offer it only the GPUs that no rank uses: "
                "CUDA_VISIBLE_DEVICES=<their numbers> ray start"
            )

    def check_for_rank(self, folders: Sequence[str]) -> None:
        """Reject a rank on this machine if its code or packages differ from the command's, or a folder is missing."""
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
