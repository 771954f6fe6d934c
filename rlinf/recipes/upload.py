"""Upload of a run's checkpoints and exports to the Hugging Face Hub or to S3.

Credentials are read from the environment, checked before training, and never shown in messages. Requests are attempted ``TRIES`` times.
"""

import json
import logging
import os
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from rlinf.checkpoints.folders import flat
from rlinf.errors import CheckpointError, ConfigError, import_extra
from rlinf.files import Json, write_text
from rlinf.manifest import Manifest
from rlinf.run_folder import CONFIG_FILE, MANIFEST_FILE, SAFETENSORS_FOLDER, STATE_FILE

TRIES = 3
BACKOFF_S = 2.0
"""Delay before the second attempt, in seconds; doubled for each further attempt."""
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")
AWS_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")

# The base class of HfHubHTTPError is the error class of huggingface_hub's HTTP library: requests, httpx or httpx2.
HUB_ERRORS = (OSError, HfHubHTTPError.__bases__[0], HFValidationError)

logger = logging.getLogger("rlinf")

Result = TypeVar("Result")


class HubUpload:
    """Uploads the final policy and a model card to a new private repository ``<owner>/<name>-<time of the run>``.

    Raises ConfigError if the token is missing, invalid or read-only.

    Args:
        repo_name: ``owner/name``, or just ``name`` for the token's owner.
    """

    every = False

    def __init__(self, repo_name: str) -> None:
        token, where = get_token(), "train.ckpt.upload_hf=true needs a token with write access"
        if not token:
            raise ConfigError(
                f"{where}, but none is set. Set the environment variable HF_TOKEN, or train.ckpt.upload_hf=false"
            )
        self.api = HfApi(token=token)
        try:
            owner = _retried(self.api.whoami, HUB_ERRORS, "ask the hub for the owner of HF_TOKEN")
        except CheckpointError as error:
            raise ConfigError(f"{where}: {error}. Set HF_TOKEN, or train.ckpt.upload_hf=false") from error
        role = owner.get("auth", {}).get("accessToken", {}).get("role")
        if role == "read":
            raise ConfigError(
                f"{where}, but the token of '{owner['name']}' is read-only. Set HF_TOKEN, or train.ckpt.upload_hf=false"
            )
        self.repo_name = repo_name if "/" in repo_name else f"{owner['name']}/{repo_name}"

    def upload(self, run_folder: Path, folders: Sequence[Path]) -> None:
        """Upload the exported policy; raise CheckpointError on failure."""
        repo_id = self._repo_id(run_folder)
        for folder in _exported(folders):
            states = [path / STATE_FILE for path in folders if (path / STATE_FILE).is_file()]  # of the checkpoint
            state = json.loads(states[0].read_text(encoding="utf-8")) if states else {"loop_state": {"trainer": {}}}
            write_text(folder / "README.md", model_card(folder, state["loop_state"]["trainer"].get("scores")))

            def send(folder: Path = folder) -> Any:
                self.api.create_repo(repo_id, private=True, exist_ok=True)
                message = f"Policy of {run_folder.name}"
                return self.api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=message)

            logger.info(
                "Uploaded %s: %s", folder, _retried(send, HUB_ERRORS, f"upload {folder} to the hub as {repo_id}")
            )

    def commands(self, run_folder: Path, folders: Sequence[Path]) -> list[str]:
        """Return the Hub CLI command that uploads the exported policy."""
        repo_id = self._repo_id(run_folder)
        return [shlex.join(["hf", "upload", repo_id, str(folder), "--private"]) for folder in _exported(folders)]

    def _repo_id(self, run_folder: Path) -> str:
        return f"{self.repo_name}-{run_folder.name}"


class S3Upload:
    """Uploads checkpoints and exported policies to ``<bucket>/<prefix>/<name of output_dir>/<time of the run>/...``.

    A folder is skipped if the bucket already contains it with an identical manifest. Raises ConfigError if the bucket does not exist
    or is inaccessible, or an environment variable is missing; MissingDependencyError if boto3 is not installed.
    """

    def __init__(self, bucket: str | None, prefix: str = "", every: bool = False) -> None:
        if not bucket:
            raise ConfigError(
                "train.ckpt.upload_s3 needs a bucket. Set train.ckpt.s3_bucket=<name>, or train.ckpt.upload_s3=false"
            )
        boto3: Any = import_extra("boto3", "train.ckpt.upload_s3", "s3", ", or set train.ckpt.upload_s3=false")
        from boto3.exceptions import Boto3Error
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        self.bucket, self.prefix, self.every = bucket, prefix.strip("/"), every
        self._errors = (OSError, Boto3Error, BotoCoreError, ClientError)
        session = boto3.Session()
        try:
            is_complete = session.get_credentials() is not None and session.region_name is not None
        except BotoCoreError:  # only one of the two keys is set
            is_complete = False
        if not is_complete:
            missing = [name for name in AWS_NAMES if not os.environ.get(name)]
            raise ConfigError(
                f"train.ckpt.upload_s3 needs credentials and a region, but {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
                "set. Set them in the environment, or train.ckpt.upload_s3=false"
            )
        # Region, endpoint (AWS_ENDPOINT_URL) and keys are read from the environment. boto3 tries once: `_retried` retries.
        self.client = session.client("s3", config=Config(retries={"total_max_attempts": 1}))
        try:
            _retried(lambda: self.client.head_bucket(Bucket=bucket), self._errors, f"use the S3 bucket '{bucket}'")
        except CheckpointError as error:
            raise ConfigError(
                f"{error}. Set train.ckpt.s3_bucket=<your bucket>, and check {', '.join(AWS_NAMES)}"
            ) from error

    def upload(self, run_folder: Path, folders: Sequence[Path]) -> None:
        """Upload folders of a run; raise CheckpointError on failure."""
        for folder in folders:
            if self._is_there(run_folder, folder / MANIFEST_FILE):
                continue
            files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
            # Upload the manifest last, so that any folder with a manifest in the bucket is complete.
            for path in sorted(files, key=lambda path: path == folder / MANIFEST_FILE):
                key = self.key_of(run_folder, path)
                send = partial(self.client.upload_file, str(path), self.bucket, key)
                _retried(send, self._errors, f"upload {path} to s3://{self.bucket}/{key}")
            logger.info("Uploaded %s: s3://%s/%s", folder, self.bucket, self.key_of(run_folder, folder))

    def commands(self, run_folder: Path, folders: Sequence[Path]) -> list[str]:
        """Return the AWS CLI commands that upload the folders."""
        command, root = ["aws", "s3", "cp", "--recursive"], f"s3://{self.bucket}"
        return [shlex.join([*command, str(path), f"{root}/{self.key_of(run_folder, path)}"]) for path in folders]

    def _is_there(self, run_folder: Path, manifest: Path) -> bool:
        """Return whether the bucket has this folder with an identical manifest, which contains the hashes of all files."""
        with suppress(*self._errors):  # including a missing manifest
            sent = self.client.get_object(Bucket=self.bucket, Key=self.key_of(run_folder, manifest))["Body"].read()
            return sent == manifest.read_bytes()
        return False

    def key_of(self, run_folder: Path, path: Path) -> str:
        """Return a file's key, or the key prefix of a folder."""
        run = run_folder.absolute()
        parts = (self.prefix, run.parent.name, run.name, path.relative_to(run_folder).as_posix())
        return "/".join(part for part in parts if part)


Upload = HubUpload | S3Upload
"""Uploads complete folders of a run at its end, or with ``every``, after each save."""


def model_card(folder: Path, scores: dict[str, float] | None = None) -> str:
    """Return an export's README, with its origin, settings, and validation ``scores`` by checkpoint name."""
    manifest = Manifest.load(folder)
    config = flat(yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8")))
    base, datasets = (config.get(key) for key in ("policy.model_name_or_path", "train.train_policy.dataset.name"))
    kind = str(config.get("train.train_policy.type") or "").upper()
    head: Json = {"library_name": "transformers", "tags": ["rlinf", *([kind.lower()] if kind else [])]}
    # Omit local paths: the Hub accepts only its own model and dataset IDs in the card's metadata.
    named = (("base_model", base), ("datasets", datasets))
    head |= {key: name for key, name in named if name and not Path(name).exists()}
    trained = {"merged": "LoRA adapters, merged", "adapter": "LoRA adapters"}
    facts = {
        "class": manifest.model.get("class"),
        "trained": trained.get(manifest.lora.get("state", ""), "all weights"),
        "updates": manifest.policy_version,
        "seed": manifest.seed,
        "rlinf": manifest.versions.get("rlinf"),
        "code": manifest.git_revision,
        **{name: manifest.versions.get(name) for name in ("torch", "transformers", "peft")},
    }
    rows = [f"| {name} | {value} |" for name, value in facts.items() if value is not None]
    title = Path(base).name if base else folder.name
    by, origin = (f" by {kind}" if kind else ""), (f" from {head['base_model']}" if "base_model" in head else "")
    lines = ["---", yaml.safe_dump(head, sort_keys=False).strip(), "---", "", f"# {title}", ""]
    lines += [f"Trained{by}{origin} with rlinf.", "", "| | |", "|---|---|", *rows, ""]
    if scores:
        lines += ["## Validation", "", "| checkpoint | score |", "|---|---|"]
        lines += [f"| {name} | {score:.4f} |" for name, score in scores.items()] + [""]
    return "\n".join(lines)


def _exported(folders: Sequence[Path]) -> list[Path]:
    return [folder for folder in folders if folder.parent.name == SAFETENSORS_FOLDER]


def _retried(action: Callable[[], Result], errors: tuple[type[Exception], ...], what: str) -> Result:
    """Run ``action`` up to ``TRIES`` times and return its result. Secrets are redacted from the CheckpointError on failure."""
    for number in range(TRIES - 1):
        with suppress(*errors):
            return action()
        time.sleep(BACKOFF_S * 2**number)
    try:
        return action()
    except errors as error:
        reason = f"{type(error).__name__}: {error}"
        for secret in {*(os.environ.get(name) for name in SECRETS), get_token()} - {None, ""}:
            reason = reason.replace(secret, "***")
        # Use `from None` because the original error's text may contain a secret.
        raise CheckpointError(f"Cannot {what} after {TRIES} attempts ({reason})") from None
