"""What every machine of a run on Ray must have in common, and what it must not share."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlinf.config.plugins import load_plugins
from rlinf.distributed.start import refuse_differences, what_ranks_share
from rlinf.errors import ConfigError
from rlinf.files import sha256_of


@dataclass(frozen=True)
class Machine:
    """The machine of the command, as those of ranks and players have to know it.

    Attributes:
        plugins: Of the run.
        gpus: Names of the GPUs that ranks on it use without Ray, as in ``CUDA_VISIBLE_DEVICES``.
        host: Name of the machine.
        software: What all machines must have in common.
    """

    plugins: Sequence[str]
    gpus: Sequence[str] = ()
    host: str = field(default_factory=socket.gethostname)
    software: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def here(cls, plugins: Sequence[str], gpus: Sequence[str] = ()) -> Machine:
        """Describe this machine. Imports the plugins."""
        own = {f"plugin {path} (sha256)": sha256_of(path) for path in load_plugins(plugins) if path.endswith(".py")}
        return cls(plugins, gpus, software=what_ranks_share([]) | own)

    def check(self) -> None:
        """Check that a player may play in this process, which Ray has started.

        Raise ConfigError if its code or packages differ from those of the ranks, or one of them uses its GPU.
        """
        here = self._compare()
        if not self.gpus or here.host != self.host:
            return
        import ray

        shared = set(self.gpus) & set(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        if shared:
            raise ConfigError(
                f"Ray gives a player GPU {min(shared)} of {self.host}, which a rank uses; required: GPUs that no rank uses. Start "
                "Ray on that machine with `ray start --num-gpus=0`, or offer it the GPUs after those of the ranks only: "
                "CUDA_VISIBLE_DEVICES=<their numbers> ray start"
            )

    def check_for_rank(self, folders: Sequence[str]) -> None:
        """Check that a rank may train on this machine.

        Raise ConfigError if its code or packages differ from those of the command, or it does not see one of the folders.
        """
        here = self._compare()
        for folder in folders:
            if not os.path.isdir(folder):
                raise ConfigError(
                    f"The machine {here.host}, on which Ray starts a rank, has no folder {folder}; required: the folder of the command and "
                    "that of the run under the same path on all machines with ranks. Run the command in a shared folder, and set "
                    "output_dir=<a shared folder>"
                )

    def _compare(self) -> Machine:
        """Return this machine, or raise ConfigError if it differs."""
        here = Machine.here(self.plugins)
        refuse_differences([(self.host, self.software), (here.host, here.software)], "machine")
        return here
