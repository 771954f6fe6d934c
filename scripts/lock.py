"""Writes the lock file of tested versions, scripts/constraints.txt, from the environment in which this script runs.

    python scripts/lock.py

Run it after all tests have passed in an environment of ``scripts/setup.sh --dev --sims --vllm --ray --megatron``. It includes the
direct and transitive requirements of the dependencies and extras in pyproject.toml, and excludes other installed packages.
"""

from __future__ import annotations

import platform
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
LOCK = ROOT / "scripts" / "constraints.txt"
UNLOCKED = {"rlinf", "pip", "setuptools", "triton"}
"""The project itself, its installers, and packages pinned differently by each torch build (CPU, CUDA)."""
HEADER = """# Versions with which all tests passed: {python} on {system}, CPU builds of torch and vLLM.
# Written by scripts/lock.py; used by scripts/setup.sh --locked.
"""


def declared(pyproject: dict) -> list[str]:
    """Return all of the project's requirements: dependencies, extras, and the groups installed by set-up."""
    project = pyproject["project"]
    lists = [
        project["dependencies"],
        *project["optional-dependencies"].values(),
        *pyproject["dependency-groups"].values(),
    ]
    return [line for lines in lists for line in lines]


def installed_versions(requirements: list[str]) -> dict[str, str]:
    """Return the names and public versions of installed requirements, including transitive ones."""
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(line, "") for line in requirements]
    while queue:
        line, asked_by = queue.pop()
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": asked_by}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            continue  # the other build of vLLM
        if name not in UNLOCKED:
            versions[name] = Version(found.version).public
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen and name != "rlinf":
                seen.add((name, extra))
                queue += [(needed, extra) for needed in found.requires or ()]
    return versions


def main() -> None:
    """Write the lock file."""
    versions = installed_versions(declared(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))))
    header = HEADER.format(
        python=f"Python {platform.python_version()}", system=f"{platform.system()} {platform.machine()}"
    )
    LOCK.write_text(header + "".join(f"{name}=={versions[name]}\n" for name in sorted(versions)), encoding="utf-8")
    print(f"{LOCK.relative_to(ROOT)}: {len(versions)} versions")


if __name__ == "__main__":
    main()
