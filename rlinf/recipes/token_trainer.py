"""What the trainers of recipes share: the learning rate, lines of log and metrics, and validations."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rlinf.checkpoints.hf_folder import token_manifest
from rlinf.distributed.deadlines import deadline, heartbeat
from rlinf.distributed.process_group import rank, world_size
from rlinf.files import write_bytes, write_text
from rlinf.llm.hf_policy import HuggingFacePolicy
from rlinf.manifest import Manifest
from rlinf.models.config import LoraConfig
from rlinf.optim.master_adamw import MasterAdamW
from rlinf.optim.schedule import learning_rate
from rlinf.options import from_mapping
from rlinf.recipes.config import RecipeConfig
from rlinf.recipes.equal_rows import check_equal_stream
from rlinf.run_folder import SAMPLES_FOLDER
from rlinf.training.loop import Loop, Update

logger = logging.getLogger("rlinf")

PRECISIONS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""``param_dtype`` as the manifest names it."""


@dataclass
class TokenUpdate:
    """What a step of a recipe returns.

    Attributes:
        metrics: Named as in ``rlinf.tracking.METRICS``.
        num_tokens: Tokens of the batch on all ranks, without padding.
        num_rows: Rows of the batch on all ranks.
        shown: Further numbers of the console's line, by their names there.
    """

    loss: float
    metrics: dict[str, float]
    num_tokens: float
    num_rows: float
    shown: dict[str, float] = field(default_factory=dict)


@dataclass
class Validation:
    """What an evaluation returns on every rank.

    Attributes:
        score: By which checkpoints are compared; higher is better.
        metrics: Named as in ``rlinf.tracking.METRICS``.
        samples: Completions with their rewards, on rank 0.
    """

    score: float
    metrics: dict[str, float]
    text: str
    samples: list[dict[str, Any]] = field(default_factory=list)


class TokenTrainer(ABC):
    """Trains a token policy by ``step``, which a subclass has (see ``rlinf.training.loop.Trainer``).

    Attributes:
        config, loop: Of the run, set before ``begin``.
    """

    phase: str
    last_tag: str | None = None
    ends_run = True
    config: RecipeConfig
    loop: Loop

    def __init__(self, policy: HuggingFacePolicy, rows: Any, num_steps: int) -> None:
        self.policy, self.rows, self.num_steps = policy, rows, num_steps

    @abstractmethod
    def step(self, step: int) -> TokenUpdate:
        """Take one step (a collective call)."""

    @abstractmethod
    def validate(self, step: int) -> Validation | None:
        """Evaluate the present weights (a collective call); None: there is nothing to evaluate on."""

    @property
    def model(self) -> nn.Module:
        """The network that is trained."""
        return self.policy.model

    @property
    def optimizer(self) -> MasterAdamW:
        """Its optimiser."""
        return self.policy.optimizer

    def begin(self) -> None:
        """Export and upload the last checkpoint of a run that was interrupted after it: it is whole before it is exported."""
        if self.is_done() and self.loop.resumed_from is not None:
            with deadline("save"):
                self.loop.checkpoints.finish(self.loop.resumed_from)

    def is_done(self) -> bool:
        """Return whether no step is left."""
        return self.loop.state.step >= self.num_steps

    def update(self, step: int) -> Update:
        """Take one step with its learning rate, and write its line of the log."""
        start, state, config = time.monotonic(), self.loop.state, self.config
        train = config.train
        rate = learning_rate(
            step, self.num_steps, train.optm_lr, train.optm_warmup_steps, train.optm_decay_type,
            train.optm_decay_ratio, train.optm_min_lr_factor,
        )  # fmt: skip
        self.policy.set_learning_rate(rate)
        found = self.step(step)
        check_equal_stream(self.rows)
        heartbeat()
        state.num_tokens += found.num_tokens
        seconds = time.monotonic() - start
        speed, done = found.num_tokens / seconds, step + 1
        if done % config.logging.log_interval == 0 or done == self.num_steps:
            logger.info(
                "[Policy] Step: %d/%d, [Policy] Loss: %.6g%s, Learning rate: %.4g, Iteration time: %.2fs",
                done, self.num_steps, found.loss,
                "".join(f", {name}: {value:.4g}" for name, value in found.shown.items()), rate, seconds,
            )  # fmt: skip
        metrics = found.metrics | {
            f"{'sft' if self.phase == 'sft' else 'train'}/learning_rate": rate,
            "time/update_s": seconds,
            "throughput/tokens_per_s": speed,
        }
        peak = peak_flops()
        if peak is not None:
            flops = flops_per_token(self.policy.model, found.num_tokens / found.num_rows)
            metrics["throughput/mfu"] = speed * flops / (peak * world_size())
        shown = {} if "Reward" in found.shown else {"loss": found.loss}
        shown |= {name.lower(): value for name, value in found.shown.items()}
        return Update(metrics, shown | {"tokens/s": speed})

    def evaluation_due(self, last: bool) -> str | None:
        """Return the name of the present checkpoint if a validation is due, which may be so before the first step."""
        validation, state = self.config.validation, self.loop.state
        if state.step == 0:
            return state.name if validation.val_before_train else None
        return state.name if validation.enable and (last or state.step % validation.freq == 0) else None

    def evaluate(self, tag: str, step: int) -> None:
        """Validate the present weights (a collective call)."""
        start, state = time.monotonic(), self.loop.state
        result = self.validate(state.step)
        if result is None:
            return
        state.scores[tag], state.last_validation = result.score, result.metrics
        logger.info("[Policy] Validation: %s for train step %d/%d", result.text, state.step, self.num_steps)
        self.loop.log(step, result.metrics | {"time/eval_s": time.monotonic() - start})
        if rank() == 0 and result.samples:
            write_samples(self.loop.folder / SAMPLES_FOLDER, tag, result.samples)

    def state_dict(self) -> dict[str, Tensor]:
        """Note the state of the dataset in the loop's state."""
        self.loop.state.rows = self.rows.state_dict()
        return {}

    def manifest(self) -> Manifest:
        """Return the conditions of the policy."""
        policy, train, steps = self.policy, self.config.train, self.loop.state.step
        precision, seed = PRECISIONS[train.param_dtype], train.seed or 0
        return token_manifest(
            policy.model, policy.model_name, precision=precision, seed=seed, policy_version=steps, lora=lora_of(policy)
        )

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """Free what it holds."""


def lora_of(policy: HuggingFacePolicy) -> LoraConfig | None:
    """Return the settings of the adapters that are trained."""
    return None if policy.config.lora is None else from_mapping(LoraConfig, policy.config.lora)


def write_samples(folder: Path, name: str, samples: Sequence[Mapping[str, Any]]) -> None:
    """Write completions into ``<name>.jsonl``, and their images by ``write_images``."""
    lines = []
    for sample in samples:
        images = sample.get("images", ())
        shown = {**sample, "images": write_images(folder, images)} if images else sample
        lines.append(json.dumps(shown, ensure_ascii=False) + "\n")
    write_text(folder / f"{name}.jsonl", "".join(lines))


def write_images(folder: Path, images: Sequence[bytes]) -> list[str]:
    """Write JPEG images once into ``images/<digest>.jpg``, and return these names."""
    files = [f"images/{hashlib.sha256(image).hexdigest()[:16]}.jpg" for image in images]
    for file, image in zip(files, images, strict=True):
        if not (folder / file).exists():
            write_bytes(folder / file, image)
    return files


def own_share(num_rows: int) -> slice:
    """Return the neighbouring rows of a batch that this rank takes; the first ranks take one more if they do not divide."""
    share, extra = divmod(num_rows, world_size())
    start = rank() * share + min(rank(), extra)
    return slice(start, start + share + (rank() < extra))


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
"""Peak of a GPU in bfloat16 without sparsity, by a part of its name, from the data sheets of its maker."""


def flops_per_token(model: Any, length: float) -> float:
    """Estimate the floating-point operations that training takes for a token (Kaplan et al. 2020, section 2.1).

    A weight in a matrix product takes 2 operations forward, 2 for the gradient of its input, and, if it is trained, 2
    for its own gradient. In a mixture, only the experts of one token count. Attention takes 4 times hidden size and
    length per layer forward, and twice as many backward. Embeddings are looked up and cost nothing, unless they are
    also the head. Passes that gradient checkpointing repeats are not counted. ``length`` is the mean number of tokens
    of a row.
    """
    embedding = model.get_input_embeddings()
    head = model.get_output_embeddings()
    tied = head is not None and getattr(head, "weight", None) is getattr(embedding, "weight", None)
    looked_up = 0 if tied else sum(p.numel() for p in embedding.parameters())
    text = model.config.get_text_config()
    num_experts = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    used = getattr(text, "num_experts_per_tok", None)
    share = used / num_experts if used and num_experts else 1.0
    sizes = [(p.numel() * (share if ".experts." in name else 1.0), p) for name, p in model.named_parameters()]
    total = sum(size for size, _ in sizes) - looked_up
    trained = min(total, sum(size for size, p in sizes if p.requires_grad))
    # Causal attention looks at half of the row on average.
    attention = 4 * text.num_hidden_layers * text.hidden_size * length / 2
    return 4 * total + 2 * trained + 3 * attention


def peak_flops() -> float | None:
    """Return the peak of this process's device in bfloat16; None: it is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next(
        (PEAK_FLOPS[key] for key in sorted(PEAK_FLOPS, key=len, reverse=True) if re.search(rf"\b{key}\b", name)), None
    )
