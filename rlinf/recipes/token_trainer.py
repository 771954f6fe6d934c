"""Base class for recipe trainers, which handles the learning rate, logging, metrics and validation."""

import hashlib
import json
import logging
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

import rlinf.recipes.metrics  # noqa: F401 - declares them
from rlinf.distributed.deadlines import deadline, heartbeat, portable
from rlinf.distributed.process_group import gather_objects, maximum, rank, world_size
from rlinf.errors import ConfigError
from rlinf.files import write_bytes, write_text
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.manifest import Manifest
from rlinf.models.config import LoraConfig
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.schedule import learning_rate
from rlinf.options import from_mapping
from rlinf.recipes.checkpoints import RecipeCheckpoints
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.datasets import StreamedRows
from rlinf.recipes.hf_folder import token_manifest
from rlinf.recipes.samples import tokens_of
from rlinf.run_folder import SAMPLES_FOLDER
from rlinf.training.loop import Loop, Update

logger = logging.getLogger("rlinf")

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Names in the manifest for ``param_dtype``."""


@dataclass
class TokenUpdate:
    """Result of a step: metrics, number of tokens (without padding) and rows on all ranks, and labelled values for the console line."""

    loss: float
    metrics: dict[str, float]
    num_tokens: float
    num_rows: float
    shown: dict[str, float] = field(default_factory=dict)


@dataclass
class Validation:
    """Result of a validation on every rank. A higher ``score`` is better; ``samples`` are completions, available on rank 0."""

    score: float
    metrics: dict[str, float]
    text: str
    samples: list[dict[str, Any]] = field(default_factory=list)


class TokenTrainer(ABC):
    """Trainer for a token policy; subclasses implement ``step`` and ``validate`` (see ``rlinf.training.loop.Trainer``).

    The run sets ``config``, ``loop`` and ``data`` before ``begin``.

    Attributes:
        data: Settings that determine the model and the rows of each step; they must be the same in a resumed run.
        num_tokens: Number of tokens trained on or scored so far, without padding, across all ranks.
        scores: Score of each validation, by the name of the following checkpoint; higher is better.
    """

    phase: str
    last_tag: str | None = None
    ends_run = True
    config: RecipeConfig
    loop: Loop

    def __init__(self, policy: HuggingFacePolicy, rows: Any, num_steps: int) -> None:
        self.policy, self.rows, self.num_steps = policy, rows, num_steps
        self.data: dict[str, Any] = {}
        self.num_tokens = 0.0
        self.scores: dict[str, float] = {}
        self.last_validation: dict[str, float] = {}

    @abstractmethod
    def step(self, step: int) -> TokenUpdate:
        """Take one step (a collective call)."""

    @abstractmethod
    def validate(self, step: int) -> Validation | None:
        """Evaluate the current weights (a collective call); return None without validation data."""

    def named(self, metrics: Mapping[str, float], *names: str) -> dict[str, float]:
        """Return those metrics of a policy's step that exist, as ``sft/<name>`` or ``train/<name>``, and its memory."""
        section = "sft" if self.phase == "sft" else "train"
        memory = {name: value for name, value in metrics.items() if name.startswith("memory/")}
        return {f"{section}/{name}": metrics[name] for name in names if name in metrics} | memory

    @property
    def model(self) -> nn.Module:
        """The trained model."""
        return self.policy.model

    @property
    def optimizer(self) -> MasterAdamW:
        """Optimiser for the trained model."""
        return self.policy.optimizer

    def begin(self) -> None:
        """Export and upload the last checkpoint if the run was interrupted between saving and exporting it."""
        if self.is_done() and self.loop.resumed_from is not None:
            with deadline("save"):
                cast(RecipeCheckpoints, self.loop.checkpoints).finish(self.loop.resumed_from)

    def is_done(self) -> bool:
        """Return whether all steps are done."""
        return self.loop.state.done >= self.num_steps

    def update(self, step: int) -> Update:
        """Set the step's learning rate, take the step, and log it."""
        start, config = time.monotonic(), self.config
        train = config.train
        rate = learning_rate(
            step, self.num_steps, train.optm_lr, train.optm_warmup_steps, train.optm_decay_type,
            train.optm_decay_ratio, train.optm_min_lr_factor,
        )  # fmt: skip
        self.policy.set_learning_rate(rate)
        result = self.step(step)
        # Check the stream, because the step may have opened a new block.
        check_equal_stream(self.rows)
        heartbeat()
        self.num_tokens += result.num_tokens
        seconds = time.monotonic() - start
        speed, done = result.num_tokens / seconds, step + 1
        if done % config.logging.log_interval == 0 or done == self.num_steps:
            logger.info(
                "[Policy] Step: %d/%d, [Policy] Loss: %.6g%s, Learning rate: %.4g, Iteration time: %.2fs",
                done, self.num_steps, result.loss,
                "".join(f", {name}: {value:.4g}" for name, value in result.shown.items()), rate, seconds,
            )  # fmt: skip
        metrics = result.metrics | {
            f"{'sft' if self.phase == 'sft' else 'train'}/learning_rate": rate,
            "time/update_s": seconds,
            "throughput/tokens_per_s": speed,
        }
        peak = peak_flops()
        if peak is not None:
            flops = flops_per_token(self.policy.model, result.num_tokens / result.num_rows)
            metrics["throughput/mfu"] = speed * flops / (peak * world_size())
        shown = {} if "Reward" in result.shown else {"loss": result.loss}
        shown |= {name.lower(): value for name, value in result.shown.items()}
        return Update(metrics, shown | {"tokens/s": speed})

    def evaluation_due(self, last: bool) -> str | None:
        """Return the current checkpoint's name if a validation is due, which can be before the first step."""
        validation, done, tag = self.config.validation, self.loop.state.done, self.checkpoint_name
        is_due = validation.enable and (last or done % validation.freq == 0) if done else validation.val_before_train
        return tag if is_due and tag not in self.scores else None

    def evaluate(self, tag: str, step: int) -> None:
        """Validate the current weights (a collective call)."""
        start, done = time.monotonic(), self.loop.state.done
        result = self.validate(done)
        if result is None:
            return
        self.scores[tag], self.last_validation = result.score, result.metrics
        logger.info("[Policy] Validation: %s for train step %d/%d", result.text, done, self.num_steps)
        self.loop.log(step, result.metrics | {"time/eval_s": time.monotonic() - start})
        if rank() == 0 and result.samples:
            write_samples(self.loop.folder / SAMPLES_FOLDER, tag, result.samples)

    @property
    def checkpoint_name(self) -> str:
        """Name for a checkpoint of the current state."""
        return f"step_{self.loop.state.done}"

    def best_checkpoint(self, names: Collection[str]) -> str | None:
        """Return the one of the checkpoints ``names`` with the highest score; the newest if tied."""
        return best_of(self.scores, names)

    def state_dict(self) -> dict[str, Tensor]:
        """Return an empty dict, because checkpoints already contain the policy and optimiser."""
        return {}

    def loop_state(self) -> dict[str, Any]:
        """Return the validations so far, the number of tokens, and the state of the dataset."""
        names = ("data", "num_tokens", "scores", "last_validation")
        return {name: getattr(self, name) for name in names} | {"rows": self.rows.state_dict()}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Continue from the ``loop_state`` of a checkpoint."""
        for name in ("num_tokens", "scores", "last_validation"):
            setattr(self, name, saved[name])
        self.rows.load_state_dict(saved["rows"])

    def manifest(self) -> Manifest:
        """Return the policy's manifest."""
        policy, train, steps = self.policy, self.config.train, self.loop.state.done
        precision, seed = PRECISIONS[train.param_dtype], train.seed or 0
        return token_manifest(
            policy.model, policy.model_name, precision=precision, seed=seed, policy_version=steps, lora=lora_of(policy)
        )

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Release resources."""


def lora_of(policy: HuggingFacePolicy) -> LoraConfig | None:
    """Return the trained adapters' settings, or None if all weights are trained."""
    return None if policy.config.lora is None else from_mapping(LoraConfig, policy.config.lora)


def write_samples(folder: Path, name: str, samples: Sequence[Mapping[str, Any]]) -> None:
    """Write completions to ``<name>.jsonl``, and their images with ``write_images``."""
    lines = []
    for sample in samples:
        images = sample.get("images", ())
        shown = {**sample, "images": write_images(folder, images)} if images else sample
        lines.append(json.dumps(shown, ensure_ascii=False) + "\n")
    write_text(folder / f"{name}.jsonl", "".join(lines))


def write_images(folder: Path, images: Sequence[bytes]) -> list[str]:
    """Write JPEG images that do not exist yet to ``images/<digest>.jpg``, and return all their names."""
    files = [f"images/{hashlib.sha256(image).hexdigest()[:16]}.jpg" for image in images]
    for file, image in zip(files, images, strict=True):
        if not (folder / file).exists():
            write_bytes(folder / file, image)
    return files


def best_of(scores: Mapping[str, float], names: Collection[str]) -> str | None:
    """Return the one of ``names`` with the highest score, the newest if tied; ``scores`` are in evaluation order."""
    scored = [name for name in reversed(list(scores)) if name in names]
    return max(scored, key=lambda name: comparable(scores[name]), default=None)


def comparable(score: float) -> float:
    """Return a score that can be compared: NaN and infinite scores become minus infinity."""
    return score if math.isfinite(score) else -math.inf


def rank_batches(num_rows: int, size: int) -> Iterator[range]:
    """Yield the row numbers of this rank's part (``rank_slice``), at most ``size`` at a time."""
    part = rank_slice(num_rows)
    return (range(start, min(start + size, part.stop)) for start in range(part.start, part.stop, size))


def rank_slice(num_rows: int) -> slice:
    """Return the slice of a batch for this rank; if the rows do not divide evenly, the first ranks have one row more."""
    size, extra = divmod(num_rows, world_size())
    start = rank() * size + min(rank(), extra)
    return slice(start, start + size + (rank() < extra))


PEAK_FLOPS = {
    "A100": 312e12,
    "A800": 312e12,
    "B200": 2250e12,
    "GB200": 2500e12,
    "GH200": 989e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "L40S": 362e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
}
"""Peak bfloat16 FLOP/s without sparsity, by a part of the GPU's name, from the vendor's data sheets."""


def flops_per_token(model: Any, length: float) -> float:
    """Estimate the number of floating-point operations per token in training (Kaplan et al. 2020, section 2.1).

    Each weight in a matrix product needs 2 operations forward, 2 for its input's gradient, and 2 for its own gradient if it is trained.
    In a mixture of experts, only active experts are included. Attention needs 4 x hidden size x length per layer forward, and twice as
    many backward. Embedding lookups and recomputation by gradient checkpointing are excluded. ``length`` is the mean row length.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)
    # A tied embedding is also the output projection, so include its matrix product.
    looked_up = 0 if tied else sum(p.numel() for p in embedding.parameters())
    text = model.config.get_text_config()
    num_experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    used = getattr(text, "num_experts_per_tok", None)
    active = used / num_experts if used and num_experts else 1.0
    sizes = [(p.numel() * (active if ".experts." in name else 1.0), p) for name, p in model.named_parameters()]
    total = sum(size for size, _ in sizes) - looked_up
    trained = min(total, sum(size for size, p in sizes if p.requires_grad))
    # Causal attention covers half of the row on average.
    attention = 4 * text.num_hidden_layers * text.hidden_size * length / 2
    return 4 * total + 2 * trained + 3 * attention


def peak_flops() -> float | None:
    """Return the peak bfloat16 FLOP/s of this process's GPU, or None without a GPU or if it is unknown."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    # Try longer names first, in case two of them match.
    return next(
        (PEAK_FLOPS[key] for key in sorted(PEAK_FLOPS, key=len, reverse=True) if re.search(rf"\b{key}\b", name)), None
    )


FIX = "A script must pass all rows on every rank; the trainer divides them"


def check_equal_rows(rows: Any) -> None:
    """Raise ConfigError on every rank if the rows differ between ranks (a collective call).

    The check compares the number of rows and the first, middle and last row; for a stream, in the first block. If one rank cannot pack a
    row, all ranks raise its error.
    """
    if isinstance(rows, StreamedRows):
        with deadline("start"):
            check_equal_stream(rows)
        return
    if world_size() == 1:
        return
    packed: dict[int, list[list[int]]] = {}
    error: Exception | None = None
    try:
        packed = {row: tokens_of(rows[row]) for row in (0, len(rows) // 2, len(rows) - 1)}
    except Exception as raised:  # noqa: BLE001 - the other ranks wait for this one, no matter what a packer raises
        error = raised
    with deadline("start"):
        gathered = gather_objects((len(rows), packed, None if error is None else portable(error, rank())))
    # Prefer the local error, which has the traceback, over a copy from a different rank.
    for rank_error in (error, *(remote for *_, remote in gathered)):
        if rank_error is not None:
            raise rank_error
    expected_rows, expected, _ = gathered[0]
    for number, (num_rows, tokens, _) in enumerate(gathered):
        difference = f"rank 0 has {expected_rows} rows, rank {number} has {num_rows}"
        if num_rows == expected_rows:
            changed = [row for row in tokens if tokens[row] != expected[row]]
            if not changed:
                continue
            difference = f"row {changed[0]} of rank {number} differs from rank 0"
        raise ConfigError(f"The dataset differs between ranks: {difference}. {FIX}")


def check_equal_stream(rows: Any) -> None:
    """Raise ConfigError on every rank if ranks have read different blocks of a stream (a collective call); accept rows without a stream."""
    if not isinstance(rows, StreamedRows) or world_size() == 1:
        return
    # Reducing (x, -x) once yields both the maximum and the minimum.
    largest, negative_smallest = maximum(rows.digest, -rows.digest)
    if largest != -negative_smallest:
        raise ConfigError(f"The stream of {rows.source} differs between ranks in its first {rows.num_read} rows. {FIX}")
