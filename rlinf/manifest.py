"""What a checkpoint was made under, so that it is not used under other conditions without anyone noticing.

A policy that is fed images of another size, actions scaled by other statistics or a simulator of another version
still runs, only worse. Every checkpoint therefore holds a ``manifest.json``; whoever loads one for evaluation compares
it with the present conditions and refuses a difference that changes results, unless the user names the field.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.errors import CheckpointError, ConfigError, ManifestMismatchError, did_you_mean
from rlinf.files import write_text

if TYPE_CHECKING:
    from torch import nn

    from rlinf.config.schema import RunConfig

MANIFEST_FILE = "manifest.json"
FORMAT = 1

LIBRARIES = ("rlinf", "torch", "transformers", "numpy", "gymnasium", "peft")
SIMULATORS = ("mujoco", "metaworld", "libero", "robosuite", "mani_skill", "sapien")

MUST_MATCH = (
    "model", "normalization", "preprocessing", "actions", "lora", "precision",
    "env.name", "env.cameras", "env.image_size", "env.max_episode_steps", "env.terminate_on_success",
)  # fmt: skip
"""Fields (and all that lies under them) that change what a policy does or how success is counted."""

MUST_MATCH_MINOR = ("transformers", *SIMULATORS)
"""Packages whose major and minor version must match: other ones have changed numbers before."""

ACTION_FIELDS = ("action_decoding", "action_bin_rule", "n_action_bins", "action_dim")
"""Fields of a model's configuration that are recorded where it has them; its class may name more (``manifest_fields``)."""


@dataclass
class Manifest:
    """The conditions under which a policy was made.

    Attributes:
        versions: Package to version; only what is installed.
        model: ``model_type`` and class.
        normalization: ``unnorm_key`` and the action ``statistics`` behind it.
        preprocessing: Image size, cameras, prompt and image processor settings.
        actions: Numbers per action, actions per chunk, bins.
        lora: ``state`` (``none``, ``adapter``: kept apart from the base weights, ``merged``: added into them, which
            must not happen twice), and the adapter's rank, alpha and targets.
        precision: As in ``model.precision``.
        env: The env section of the configuration.
        renderer: ``MUJOCO_GL``, which the renderer sets when it chooses a graphics backend.
        policy_version: Weight updates behind the policy.
        seed: Of the run.
        git_revision: Of the code, where it lies in a git repository.
        files: Path relative to the folder of the manifest, to the SHA-256 of the file.
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
    git_revision: str | None = None
    files: dict[str, str] = field(default_factory=dict)

    def save(self, folder: str | Path) -> Path:
        """Write ``manifest.json`` into ``folder``, atomically."""
        return write_text(Path(folder) / MANIFEST_FILE, json.dumps({"format": FORMAT, **asdict(self)}, indent=1))

    @classmethod
    def load(cls, folder: str | Path) -> Manifest:
        """Read ``manifest.json`` of ``folder``.

        Raises:
            CheckpointError: There is none, or it cannot be read.
        """
        path = Path(folder) / MANIFEST_FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("format") != FORMAT:
                raise CheckpointError(f"{path} has another format; this version of rlinf reads format {FORMAT}.")
            return cls(**data)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder} has no {MANIFEST_FILE}, so it is no complete rlinf checkpoint or export."
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read as a manifest ({type(error).__name__}: {error}).") from error

    def facts(self) -> dict[str, Any]:
        """Return dotted field to value, lists as values, without ``files``."""
        return _flatten({f.name: getattr(self, f.name) for f in fields(self) if f.name != "files"})


@dataclass(frozen=True)
class Mismatch:
    """A field that differs; ``must_match`` says whether that is refused."""

    field: str
    saved: Any
    present: Any
    must_match: bool

    def __str__(self) -> str:
        return f"{self.field}: saved {_short(self.saved)}, present {_short(self.present)}"


def build_manifest(config: RunConfig, model: nn.Module, *, policy_version: int) -> Manifest:
    """Record the present conditions.

    Args:
        config: The run's configuration.
        model: The policy; its ``config`` holds ``norm_stats`` and preprocessing, and it may have a ``processor``.
        policy_version: Weight updates behind its weights.
    """
    settings = model.config.to_dict()
    lora: dict[str, Any] = {"state": "merged" if settings.get("merged_adapters") else "none"}
    if config.model.is_lora:
        lora = {"state": "adapter", **asdict(config.model.lora)}
    names = (*ACTION_FIELDS, *getattr(type(model.config), "manifest_fields", ()))
    actions = {name: settings[name] for name in names if name in settings}
    return Manifest(
        versions=package_versions(_simulator_packages(config.env.name)),
        model={"model_type": config.model.model_type, "class": type(model).__name__.removeprefix("FSDP")},
        normalization=_normalization(config.model.unnorm_key, settings),
        preprocessing={
            "image_size": config.model.image_size or settings.get("image_sizes"),
            "cameras": list(config.env.cameras),
            **{name: settings[name] for name in ("image_resize_strategy", "prompt_template") if name in settings},
            "processor": _processor_settings(getattr(model, "processor", None)),
        },
        actions={
            "action_token_len": config.model.action_token_len,
            "action_chunks_len": config.model.action_chunks_len,
            **actions,
        },
        lora=lora,
        precision=config.model.precision,
        env=asdict(config.env),
        renderer=os.environ.get("MUJOCO_GL"),
        policy_version=policy_version,
        seed=config.seed,
        git_revision=git_revision(),
    )


def compare(saved: Manifest, present: Manifest) -> list[Mismatch]:
    """Return the fields that differ, those that must match first; ``files`` are not compared (see ``verify_files``)."""
    before, now = saved.facts(), present.facts()
    found = []
    for name in dict.fromkeys([*before, *now]):
        old, new = before.get(name), now.get(name)
        if _canonical(old) != _canonical(new):
            found.append(Mismatch(name, old, new, _must_match(name, old, new)))
    return sorted(found, key=lambda mismatch: not mismatch.must_match)


def check(saved: Manifest, present: Manifest, allow_mismatch: Sequence[str] = ()) -> list[Mismatch]:
    """Refuse conditions that differ from those of the checkpoint.

    Args:
        saved: The checkpoint's.
        present: The present ones.
        allow_mismatch: Fields that may differ; ``env`` stands for all that begins with ``env.``.

    Returns:
        The differences that were let pass.

    Raises:
        ManifestMismatchError: Fields that must match differ; lists all of them and the override to type.
        ConfigError: ``allow_mismatch`` names a field that does not exist.
    """
    known = {*saved.facts(), *present.facts()}
    known |= {name.rsplit(".", depth)[0] for name in known for depth in range(1, name.count(".") + 1)}
    for name in allow_mismatch:
        if name not in known:
            sections = sorted(known, key=lambda option: (option.count("."), option))
            raise ConfigError(
                f"evaluation.allow_mismatch names '{name}', which no manifest has.{did_you_mean(name, sections)}"
            )
    mismatches = compare(saved, present)
    refused = [m for m in mismatches if m.must_match and not any(_within(m.field, name) for name in allow_mismatch)]
    if refused:
        lines = "\n".join(f"  {mismatch}" for mismatch in refused)
        names = ",".join([*allow_mismatch, *(mismatch.field for mismatch in refused)])
        raise ManifestMismatchError(
            f"The checkpoint was made under conditions that differ from the present ones:\n{lines}\n"
            f"Restore them, or accept the differences with 'evaluation.allow_mismatch=[{names}]'."
        )
    return mismatches


def hash_files(folder: str | Path) -> dict[str, str]:
    """Return the SHA-256 of every file under ``folder`` except the manifest, by relative path."""
    folder = Path(folder)
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MANIFEST_FILE)
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in paths}


def changed_files(folder: str | Path, manifest: Manifest) -> list[str]:
    """Return the files that are missing or that are not those of the manifest; files it does not know are ignored."""
    folder = Path(folder)
    return [
        name
        for name, digest in manifest.files.items()
        if not (folder / name).is_file() or _sha256(folder / name) != digest
    ]


def verify_files(folder: str | Path, manifest: Manifest) -> None:
    """Refuse a folder whose files are not those of the manifest.

    Raises:
        CheckpointError: Names the files.
    """
    changed = changed_files(folder, manifest)
    if changed:
        raise CheckpointError(
            f"{folder} is damaged or was edited: {len(changed)} of {len(manifest.files)} files differ from its "
            f"{MANIFEST_FILE} or are missing ({', '.join(changed[:5])}). Use another checkpoint, or copy it again."
        )


def package_versions(simulators: Iterable[str] = SIMULATORS) -> dict[str, str]:
    """Return the versions of Python and of the installed packages that matter."""
    from rlinf import __version__

    found = {"python": platform.python_version(), "rlinf": __version__}
    for name in [*LIBRARIES, *simulators]:
        try:
            found.setdefault(name, version(name))
        except PackageNotFoundError:
            continue
    return found


def git_revision() -> str | None:
    """Return the commit of the repository that holds this file (``-dirty``: files differ from it), else None."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--dirty"],
            cwd=Path(__file__).parent, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return result.stdout.strip() or None


def _simulator_packages(env_name: str) -> Sequence[str]:
    """Return the packages that the env class declares in ``simulator_packages``, else all simulators known here."""
    from rlinf.envs import ENVS

    return getattr(ENVS.get(env_name), "simulator_packages", SIMULATORS)


def _normalization(unnorm_key: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    statistics = settings.get("norm_stats") or {}
    if unnorm_key is None and len(statistics) == 1:
        unnorm_key = next(iter(statistics))
    return {"unnorm_key": unnorm_key, "statistics": statistics.get(unnorm_key) if unnorm_key else None}


def _processor_settings(processor: Any) -> dict[str, Any] | None:
    """Image settings of a Hugging Face processor, and a hash of its vocabulary."""
    if processor is None:
        return None
    image_processor = getattr(processor, "image_processor", None)
    found = {}
    if hasattr(image_processor, "to_dict"):
        hidden = ("_processor_class", "processor_class", "transformers_version", "name_or_path")
        found = {name: value for name, value in image_processor.to_dict().items() if name not in hidden}
        found = json.loads(json.dumps(found, default=str))
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is not None:
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
        found["vocabulary_sha256"] = hashlib.sha256(vocabulary.encode()).hexdigest()
    return found


def _must_match(name: str, saved: Any, present: Any) -> bool:
    section, _, package = name.partition(".")
    if section == "versions":
        both = saved is not None and present is not None  # a package that is not installed takes no part in the run
        return package in MUST_MATCH_MINOR and both and _minor(saved) != _minor(present)
    return any(_within(name, required) for required in MUST_MATCH)


def _minor(text: str) -> list[str]:
    return text.split(".")[:2]


def _within(name: str, section: str) -> bool:
    return name == section or name.startswith(f"{section}.")


def _flatten(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict) or (path and not value):
        return {path: value}
    found = {}
    for name, item in value.items():
        found |= _flatten(item, f"{path}.{name}" if path else str(name))
    return found


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _short(value: Any, limit: int = 100) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else f"{text[:limit]}..."


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
