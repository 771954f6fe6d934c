"""Names that come with rlinf, by listing its YAML files: the quick answer for help and completion, without Hydra."""

from __future__ import annotations

from pathlib import Path

import rlinf

GROUP = "experiment"


def packaged_experiments() -> Path:
    """Return the folder of the experiments that come with rlinf.

    In the source tree this is ``examples/embodiment/config``; a wheel carries the same files as ``rlinf/experiments``.
    """
    package = Path(rlinf.__file__).parent
    installed = package / "experiments"
    return installed if installed.is_dir() else package.parent / "examples" / "embodiment" / "config"


def group_folders() -> dict[str, Path]:
    """Return the folder of each group whose options a user chooses from; the files in it are its options."""
    folders = [path for path in sorted(Path(__file__).parent.iterdir()) if len(list(path.glob("*.yaml"))) > 1]
    return {GROUP: packaged_experiments()} | {path.name: path for path in folders}


def options_of(folder: Path) -> list[str]:
    """Return the names of the YAML files of a folder."""
    return sorted(path.stem for path in folder.glob("*.yaml"))
