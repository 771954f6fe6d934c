"""The conditions under which a checkpoint was made, and their comparison with the present ones.

A policy still runs with a different image size, action statistics or simulator version, only worse. Every checkpoint therefore
holds a ``manifest.json``. An evaluation rejects differences that change results, unless the user names the field.
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
from rlinf.files import sha256_of, write_text
from rlinf.run_folder import MANIFEST_FILE

FORMAT = 2

LIBRARIES = ("torch", "transformers", "numpy", "gymnasium", "peft")

POLICY_FIELDS = ("model", "normalization", "preprocessing", "actions", "lora", "precision")
"""Sections that change a policy's actions."""

BASE_FIELD = "lora.base_sha256"
"""Hash of the adapters' base weights."""

WORLD_FIELDS = ("env", "simulators", "renderer", "questions")
"""Sections that change observations, dynamics or success. A field that only one manifest has is reported, not rejected: a setting
of a later version, a task without episodes, an unused renderer."""

MUST_MATCH_MINOR = ("transformers",)
"""Libraries whose major and minor version and origin must match, because earlier releases have changed numbers."""

ACTION_FIELDS = ("action_decoding", "action_bin_rule", "n_action_bins", "action_dim")
"""Fields that are recorded for every model that has them; a model class may add more (``manifest_fields``)."""


def other_project() -> str | None:
    """Return a message with the fix if the installed package ``rlinf`` is a different project of that name, else None."""
    try:
        installed = distribution("rlinf")
    except PackageNotFoundError:
        return None
    if installed.metadata["Summary"] == rlinf.__doc__.splitlines()[0].rstrip("."):
        return None
    return (
        f"The installed package rlinf {installed.version} is a different project of that name; this one is {__version__}. "
        "Run pip uninstall -y rlinf, and then pip install -e . in the clone of this project"
    )


@dataclass
class Manifest:
    """The conditions under which a policy was made.

    Attributes:
        versions: Versions of Python and the installed libraries; of a library from a git repository, also URL and commit.
        model: ``model_type`` and class.
        normalization: ``unnorm_key`` and the action ``statistics`` of that key.
        preprocessing: Image size, cameras, prompt and image processor settings.
        actions: Action dimension, actions per chunk, bins.
        lora: ``state`` (``none``, ``adapter``: separate from the base weights, ``merged``: added to them, which must not
            happen twice), the adapter's rank, alpha and targets, and ``base_sha256``.
        env: The env section of the configuration without settings that change no episode (``VectorEnv.free_settings``);
            ``max_episode_steps`` holds the horizon of each task.
        renderer: ``MUJOCO_GL``, set when a graphics backend is chosen.
        simulators: Version of each package in the env class's ``packages``; must match exactly.
        probe: The simulator's fingerprint (see ``rlinf/evaluation/fingerprint.py``), or None. Differences are a warning.
        fps: Frames per second of the dataset for behaviour cloning, or None. The policy should act at that rate.
        policy_version: Number of weight updates before this policy.
        git_revision: Commit of the code, if it is in a git repository.
        questions: For an evaluation on questions: digest of the file, sampling and extraction of the completions' answers.
        files: Path relative to the manifest's folder, to the SHA-256 of the file.
    """

    versions: dict[str, str]
    model: dict[str, Any]
    normalization: dict[str, Any]
    preprocessing: dict[str, Any]
    actions: dict[str, Any]
    lora: dict[str, Any]
    precision: str
    env: dict[str, Any]
    renderer: str | None
    policy_version: int
    seed: int
    simulators: dict[str, str] = field(default_factory=dict)
    probe: dict[str, Any] | None = None
    fps: float | None = None
    git_revision: str | None = None
    questions: dict[str, Any] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def save(self, folder: str | Path) -> Path:
        """Write ``manifest.json`` into ``folder``, atomically."""
        return write_text(Path(folder) / MANIFEST_FILE, self.text())

    def text(self) -> str:
        """Return the content of ``manifest.json``."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, which contains the hashes of the weights."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read ``manifest.json`` of ``folder``; raise CheckpointError if it is missing, damaged or of a different format."""
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
        """Parse a manifest; raise CheckpointError, with the name ``source``, if it is damaged or of a different format."""
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
            if (
                not isinstance(value, dict)
                and declared.startswith("dict")
                and not (value is None and "None" in declared)
            ):
                raise TypeError(f"'{field_.name}' is a {type(value).__name__}, not a mapping")
        for name, digest in self.files.items():
            if not isinstance(digest, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"'files' names '{name}', which is not a file of the folder with its SHA-256")

    def flatten(self) -> dict[str, Any]:
        """Return dotted field names to values, without ``files``, ``probe`` and ``fps``."""
        return _flatten(
            {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("files", "probe", "fps")}
        )


@dataclass(frozen=True)
class Mismatch:
    """A field that differs; the difference is rejected if ``must_match``."""

    field: str
    saved: Any
    present: Any
    must_match: bool

    def __str__(self) -> str:
        return f"{self.field}: saved {_short(self.saved)}, present {_short(self.present)}"


def compare(saved: Manifest, present: Manifest) -> list[Mismatch]:
    """Return the fields that differ, with those that must match first.

    ``files`` are compared by ``verify_files``, the fingerprint ``probe`` by ``rlinf.evaluation.fingerprint``.
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
    """Return the differences of the present conditions from the checkpoint's, if all of them are allowed.

    The fields in ``allow_mismatch`` may differ; ``env`` stands for all fields that start with ``env.``.

    Raises:
        ManifestMismatchError: Fields that must match differ.
        ConfigError: ``allow_mismatch`` names a field that does not exist.
    """
    check_allowed(allow_mismatch, saved, present)
    headline = "The checkpoint was made under conditions that differ from the present ones"
    return reject_mismatches(compare(saved, present), allow_mismatch, headline)


def check_allowed(allow_mismatch: Sequence[str], *manifests: Manifest, also: Sequence[str] = ()) -> None:
    """Raise ConfigError if a name in ``evaluation.allow_mismatch`` is neither a field of a manifest nor in ``also``."""
    known = {*also, *(name for manifest in manifests for name in manifest.flatten())}
    known |= {name.rsplit(".", depth)[0] for name in known for depth in range(1, name.count(".") + 1)}
    for name in allow_mismatch:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ConfigError(f"evaluation.allow_mismatch names '{name}', which no manifest has.{hint}")


def reject_mismatches(mismatches: list[Mismatch], allow_mismatch: Sequence[str], headline: str) -> list[Mismatch]:
    """Return ``mismatches``; raise ManifestMismatchError if a field must match and is not in ``allow_mismatch``."""
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
    """Return relative path to SHA-256 for every file under ``folder`` except the manifest."""
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(folder).as_posix(): sha256_of(path) for path in paths}


def changed_files(folder: str | Path, manifest: Manifest) -> list[str]:
    """Return the files of the manifest that are missing or changed; other files are ignored."""
    paths = {name: Path(folder) / name for name in manifest.files}
    return [name for name, path in paths.items() if not path.is_file() or sha256_of(path) != manifest.files[name]]


def verify_files(folder: str | Path, manifest: Manifest) -> None:
    """Raise CheckpointError if a file of the manifest is missing or changed, or if the manifest lists none."""
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
    """Return the versions of installed distributions, with URL and commit for a distribution from a git repository."""
    versions = {}
    for name in names:
        try:
            package = distribution(name)
        except PackageNotFoundError:
            continue
        # PEP 610: a fork has the version of its origin, so only the commit distinguishes them.
        origin = json.loads(package.read_text("direct_url.json") or "{}")
        commit = origin.get("vcs_info", {}).get("commit_id")
        versions[name] = f"{package.version} ({origin['url']}@{commit})" if commit else package.version
    return versions


def git_revision() -> str | None:
    """Return the commit of this file's repository (with ``-dirty`` if files differ), or None."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _must_match(name: str, saved: Any, present: Any, on_both_sides: bool) -> bool:
    section, _, rest = name.partition(".")
    if name == BASE_FIELD:
        # A manifest without the hash is accepted: there is nothing to compare.
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


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or (path and not value):
        return {path: value}
    flat = {}
    for name, item in value.items():
        flat |= _flatten(item, f"{path}.{name}" if path else str(name))
    return flat


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(value: Any, limit: int = 100) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else f"{text[:limit]}..."
