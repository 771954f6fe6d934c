"""Records the conditions under which a checkpoint was made, and compares them with current conditions.

A policy still runs with a different image size, action statistics or simulator version, but performs worse. Every checkpoint
therefore contains a ``manifest.json``. An evaluation rejects differences that change results, unless the user allows them.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import rlinf
from rlinf import __version__
from rlinf.errors import CheckpointError, ConfigError, ManifestMismatchError, did_you_mean
from rlinf.files import Json, sha256_of, write_text
from rlinf.run_folder import MANIFEST_FILE

FORMAT = 2

LIBRARIES = ("torch", "transformers", "numpy", "gymnasium", "peft")

POLICY_FIELDS = ("model", "normalization", "preprocessing", "actions", "lora", "precision")
"""Sections that affect a policy's actions."""

BASE_FIELD = "lora.base_sha256"
"""Hash of the adapters' base weights."""

WORLD_FIELDS = ("env", "simulators", "renderer", "questions")
"""Sections that affect observations, dynamics or success. A field that is only in one manifest, such as a setting from a later
version, a task without episodes, or an unused renderer, is reported but not rejected."""

MUST_MATCH_MINOR = ("transformers",)
"""Libraries whose major and minor versions and origins must match, because past releases have changed numerical results."""

ACTION_FIELDS = ("action_decoding", "action_bin_rule", "n_action_bins", "action_dim")
"""Fields recorded for every model that has them. A model class may add more with ``manifest_fields``."""


def other_project() -> str | None:
    """If the installed package ``rlinf`` is a different project with this name, return a message with the fix; otherwise None."""
    try:
        installed = distribution("rlinf")
    except PackageNotFoundError:
        return None
    if installed.metadata["Summary"] == rlinf.__doc__.splitlines()[0].rstrip("."):
        return None
    return (
        f"The installed package rlinf {installed.version} is a different project with the same name; this one is {__version__}. "
        "Run pip uninstall -y rlinf, and then pip install -e . in the clone of this project"
    )


@dataclass
class Manifest:
    """The conditions under which a policy was trained.

    Attributes:
        versions: Versions of Python and installed libraries, with URL and commit for libraries from git repositories.
        model: ``model_type`` and class.
        normalization: ``unnorm_key`` and its action ``statistics``.
        preprocessing: Image size, cameras, prompt and image processor settings.
        actions: Action dimension, actions per chunk, bins.
        lora: ``state`` (``none``, ``adapter``: separate from the base weights, ``merged``: added to them, which must not
            happen twice), the adapter's rank, alpha and targets, and ``base_sha256``.
        env: The configuration's env section, without settings that do not affect episodes (``VectorEnv.free_settings``).
            ``max_episode_steps`` contains the horizon of each task.
        renderer: ``MUJOCO_GL``, which is set when a graphics backend is chosen.
        simulators: Versions of the packages in the env class's ``packages``, which must match exactly.
        probe: The simulator's fingerprint (see ``rlinf/evaluation/fingerprint.py``), or None. Differences only cause a warning.
        fps: Frames per second of the behaviour-cloning dataset, or None. The policy should act at this rate.
        policy_version: Number of weight updates that produced this policy.
        git_revision: Commit of the code, if it is in a git repository.
        questions: For evaluations on questions, the file's digest and settings for sampling and for extracting answers.
        files: Maps paths relative to the manifest's folder to SHA-256 hashes.
    """

    versions: dict[str, str]
    model: Json
    normalization: Json
    preprocessing: Json
    actions: Json
    lora: Json
    precision: str
    env: Json
    renderer: str | None
    policy_version: int
    seed: int
    simulators: dict[str, str] = field(default_factory=dict)
    probe: Json | None = None
    fps: float | None = None
    git_revision: str | None = None
    questions: Json = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def save(self, folder: str | Path) -> Path:
        """Atomically write ``manifest.json`` to ``folder``."""
        return write_text(Path(folder) / MANIFEST_FILE, self.text())

    def text(self) -> str:
        """Return the content of ``manifest.json``."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, including the hashes of the weights."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read ``manifest.json`` from ``folder``; raise CheckpointError if it is missing, damaged or in an unsupported format."""
        path = Path(folder) / MANIFEST_FILE
        try:
            return cls.from_text(path.read_text(encoding="utf-8"), path)
        except FileNotFoundError as error:
            missing = f"{folder} has no {MANIFEST_FILE}"
            raise CheckpointError(f"{missing}, so it is not a complete rlinf checkpoint or export.") from error
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path} cannot be read as a manifest ({type(error).__name__}: {error}).") from error

    @classmethod
    def from_text(cls, text: str, source: object) -> Manifest:
        """Parse a manifest. If it is damaged or in an unsupported format, raise a CheckpointError that names ``source``."""
        try:
            data = json.loads(text)
            number = data.pop("format")
            if number != FORMAT:
                formats = f"{source} has format {number}; this version of rlinf reads {FORMAT}"
                raise CheckpointError(f"{formats}. Install the version of rlinf that wrote it.")
            manifest = cls(**data)
            manifest._check_types()
            return manifest
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{source} cannot be read as a manifest ({reason}).") from error

    def _check_types(self) -> None:
        for field_ in fields(self):
            value, declared = getattr(self, field_.name), str(field_.type)
            is_optional = value is None and "None" in declared
            if declared.startswith(("dict", "Json")) and not isinstance(value, dict) and not is_optional:
                raise TypeError(f"'{field_.name}' is a {type(value).__name__}, not a mapping")
        for name, digest in self.files.items():
            if not isinstance(digest, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"'files' lists '{name}', which is not a file in the folder with its SHA-256")

    def flatten(self) -> Json:
        """Map dotted field names to values, excluding ``files``, ``probe`` and ``fps``."""
        return _flatten(
            {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("files", "probe", "fps")}
        )


@dataclass(frozen=True)
class Mismatch:
    """A field with different values. If ``must_match``, the difference is rejected."""

    field: str
    saved: Any
    present: Any
    must_match: bool

    def __str__(self) -> str:
        return f"{self.field}: saved {_short(self.saved)}, present {_short(self.present)}"


def compare(saved: Manifest, present: Manifest) -> list[Mismatch]:
    """Return the differing fields, starting with fields that must match.

    ``files`` are compared by ``verify_files``, and the fingerprint ``probe`` by ``rlinf.evaluation.fingerprint``.
    """
    before, now = saved.flatten(), present.flatten()
    mismatches = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if _canonical(old) != _canonical(new):
            on_both_sides = name in before and name in now
            mismatches.append(Mismatch(name, old, new, _must_match(name, old, new, on_both_sides)))
    return sorted(mismatches, key=lambda mismatch: not mismatch.must_match)


def check(saved: Manifest, present: Manifest, allow_mismatch: Sequence[str] = ()) -> list[Mismatch]:
    """Return the differences between current conditions and the checkpoint's, if all are allowed.

    Fields in ``allow_mismatch`` may differ; ``env`` matches all fields that start with ``env.``.

    Raises:
        ManifestMismatchError: If fields that must match differ.
        ConfigError: If ``allow_mismatch`` contains a field that does not exist.
    """
    check_allowed(allow_mismatch, saved, present)
    headline = "The checkpoint was made under conditions that differ from the present ones"
    return reject_mismatches(compare(saved, present), allow_mismatch, headline)


def check_allowed(allow_mismatch: Sequence[str], *manifests: Manifest, also: Sequence[str] = ()) -> None:
    """Raise ConfigError if a name in ``evaluation.allow_mismatch`` is neither a manifest field nor in ``also``."""
    known = {*also, *(name for manifest in manifests for name in manifest.flatten())}
    known |= {name.rsplit(".", depth)[0] for name in known for depth in range(1, name.count(".") + 1)}
    for name in allow_mismatch:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"evaluation.allow_mismatch contains '{name}', which is not a manifest field.{hint}")


def reject_mismatches(mismatches: list[Mismatch], allow_mismatch: Sequence[str], headline: str) -> list[Mismatch]:
    """Return ``mismatches``, or raise ManifestMismatchError if a field that must match is not in ``allow_mismatch``."""
    prefixes = tuple(f"{name}." for name in allow_mismatch)
    rejected = [m for m in mismatches if m.must_match and not f"{m.field}.".startswith(prefixes)]
    if rejected:
        lines = "\n".join(f"  {mismatch}" for mismatch in rejected)
        names = ",".join([*allow_mismatch, *(mismatch.field for mismatch in rejected)])
        raise ManifestMismatchError(
            f"{headline}:\n{lines}\nRestore them, or accept the differences with 'evaluation.allow_mismatch=[{names}]'."
        )
    return mismatches


def hash_files(folder: str | Path) -> dict[str, str]:
    """Map the relative path of every file in ``folder``, except the manifest, to its SHA-256."""
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}


def changed_files(folder: str | Path, manifest: Manifest) -> list[str]:
    """Return files listed in the manifest that are missing or changed. Unlisted files are ignored."""
    paths = {name: Path(folder) / name for name in manifest.files}
    return [name for name, path in paths.items() if not path.is_file() or sha256_of(path) != manifest.files[name]]


def verify_files(folder: str | Path, manifest: Manifest) -> None:
    """Raise CheckpointError if a file listed in the manifest is missing or changed, or if it lists no files."""
    fix = "Use a different checkpoint, or copy it again."
    if not manifest.files:
        raise CheckpointError(f"The {MANIFEST_FILE} in {folder} lists no files, so they cannot be verified. {fix}")
    if changed := changed_files(folder, manifest):
        raise CheckpointError(
            f"{folder} is damaged or was edited: {len(changed)} of {len(manifest.files)} files differ from its "
            f"{MANIFEST_FILE} or are missing ({', '.join(changed[:5])}). {fix}"
        )


def library_versions() -> dict[str, str]:
    """Return the versions of Python, rlinf and the installed ``LIBRARIES``."""
    return {"python": platform.python_version(), "rlinf": __version__, **package_versions(LIBRARIES)}


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Return the versions of installed distributions, with URL and commit if installed from a git repository."""
    versions = {}
    for name in names:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        # A fork has the same version as the original, so include the commit (PEP 610) to distinguish them.
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        commit = origin.get("vcs_info", {}).get("commit_id")
        versions[name] = f"{package.version} ({origin['url']}@{commit})" if commit else package.version
    return versions


def git_revision() -> str | None:
    """Return the commit of the repository that contains this file (with ``-dirty`` if there are changes), or None."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _must_match(name: str, saved: object, present: object, on_both_sides: bool) -> bool:
    section, _, rest = name.partition(".")
    if name == BASE_FIELD:
        # Accept a manifest without the hash, which cannot be compared.
        return saved is not None
    if section in POLICY_FIELDS:
        return True
    if section == "versions":
        return rest in MUST_MATCH_MINOR and on_both_sides and _minor(saved) != _minor(present)
    if section == "renderer":
        return None not in (saved, present)
    return section in WORLD_FIELDS and on_both_sides


def _minor(text: str) -> tuple[list[str], str]:
    number, _, origin = text.partition(" ")
    return number.split(".")[:2], origin


def _flatten(value: object, path: str = "") -> Json:
    if not isinstance(value, dict) or (path and not value):
        return {path: value}
    flat = {}
    for name, item in value.items():
        flat |= _flatten(item, f"{path}.{name}" if path else str(name))
    return flat


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(value: object, limit: int = 100) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else f"{text[:limit]}..."
