"""Migrate a folder from an old lerobot, which stored statistics among the weights, to the current layout.

lerobot's own ``migrate_policy_normalization`` needs the hub and renames ``observation.images.cam_high`` to
``observation.images.cam.high``, which its normaliser then skips.
"""

import os
import subprocess
import sys
from pathlib import Path

from safetensors.torch import load_file, save_file

from rlinf.errors import CheckpointError, ConfigError
from rlinf.models.embodiment.lerobot.contents import content_findings
from rlinf.models.embodiment.lerobot.folder import OLD_PARTS, WEIGHTS
from rlinf.models.embodiment.lerobot.worker import ROOT, interpreter_for


def migrate(folder: str | Path, target: str | Path, interpreter: str | None = None) -> None:
    """Write the folder ``target`` with a Python that has lerobot; raise CheckpointError if lerobot cannot read ``folder``."""
    if Path(target).expanduser().exists():
        raise ConfigError(f"migrate={target} exists; expected a new folder. Set migrate=<a different folder>")
    for finding in content_findings(Path(folder).expanduser()):
        raise CheckpointError(f"{folder} cannot be migrated: {finding}")
    command = [interpreter_for(interpreter) or sys.executable, "-m", __name__, str(folder), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise CheckpointError(f"lerobot cannot migrate {folder} ({last[:600]}). Use a folder that lerobot wrote")


def main(folder: Path, target: Path) -> None:
    """Move the statistics from the weights into both processors, in the form that lerobot creates."""
    from lerobot.configs import PreTrainedConfig
    from lerobot.policies import make_pre_post_processors

    config = PreTrainedConfig.from_pretrained(folder, cli_overrides=["--device=cpu"])
    names = {name.replace(".", "_"): name for name in {**config.input_features, **config.output_features}}
    statistics: dict[str, dict] = {}
    weights = {}
    for key, tensor in load_file(folder / WEIGHTS).items():
        if key.startswith(OLD_PARTS):
            name, _, part = key.partition(".buffer_")[2].rpartition(".")
            statistics.setdefault(names[name], {})[part] = tensor
        else:
            weights[key] = tensor
    if not statistics:
        raise ValueError(f"{WEIGHTS} contains no statistics")
    target.mkdir(parents=True)
    for pipeline in make_pre_post_processors(config, dataset_stats=statistics):
        pipeline.save_pretrained(target)
    config.save_pretrained(target)
    save_file(weights, target / WEIGHTS, {"format": "pt"})


if __name__ == "__main__":
    main(*(Path(argument).expanduser() for argument in sys.argv[1:3]))
