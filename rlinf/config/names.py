"""Fast lookup of the names of rlinf's YAML files, for help and completion, without Hydra."""

from pathlib import Path

import rlinf
from rlinf.wings import hidden_options

GROUP = "experiment"


def packaged_experiments() -> Path:
    """Return the folder with rlinf's experiments."""
    # In a wheel, the files of ``examples/embodiment/config`` are in ``rlinf/experiments``.
    package = Path(rlinf.__file__).parent
    installed = package / "experiments"
    return installed if installed.is_dir() else package.parent / "examples" / "embodiment" / "config"


def group_folders() -> dict[str, Path]:
    """Return the folder of each config group; the files in it are its options."""
    folders = [path for path in sorted(Path(__file__).parent.iterdir()) if len(list(path.glob("*.yaml"))) > 1]
    return {GROUP: packaged_experiments()} | {path.name: path for path in folders}


def options_of(group: str) -> list[str]:
    """Return the names of a group's YAML files, without those that need a missing wing."""
    return sorted({path.stem for path in group_folders()[group].glob("*.yaml")} - hidden_options(group))
