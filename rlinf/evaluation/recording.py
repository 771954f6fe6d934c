"""Record episodes step by step: images, and for each policy call the action chunk, value, entropy and log-probability."""

from __future__ import annotations

import base64
import io
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlinf.errors import CheckpointError, ConfigError, RLinfError
from rlinf.evaluation.evaluator import (
    BatchedPolicy,
    CallablePolicy,
    EpisodeContext,
    RankGroup,
    predictions_for_rows,
    replay_episodes,
    slug,
    success_of,
)
from rlinf.evaluation.recorded import SCORES, is_recording, write_recording
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import Json, replace_folder
from rlinf.models.precision import evaluation_mode
from rlinf.types import ActionPrediction, EpisodeResult, Observation

if TYPE_CHECKING:
    from rlinf.envs.base import VectorEnv
    from rlinf.models.embodiment.base import ActionModel
    from rlinf.types import ChunkStep, SupportsAct

JPEG_QUALITY = 85


def record_episodes(
    model: ActionModel | SupportsAct,
    env: VectorEnv,
    evaluation: EvaluationResult,
    folder: str | os.PathLike,
    num_per_task: int,
    size: int = 224,
    ranks: RankGroup = RankGroup(),
) -> None:
    """Rerun each task's first ``num_per_task`` episodes, and write a recording of each into ``folder``.

    Raise CheckpointError if ``folder`` contains any files that are not recordings.

    Args:
        evaluation: Result of ``evaluate_policy`` with the same model, env and ranks; it is not modified.
    """
    if not num_per_task:
        return
    folder = Path(folder)
    unfinished = folder.with_name(f".{folder.name}.tmp")
    # Earlier recordings are not replaced until all new ones are written. gather also makes all ranks wait for the folder.
    ranks.gather(lambda: _make_folder(folder, unfinished) if ranks.rank == 0 else None)
    kind: Any = ScoringPolicy if hasattr(model, "predict_action_batch") else CallablePolicy
    policy = kind(model, env.stream_names, evaluation.greedy, evaluation.temperature, evaluation.seed)
    numbered = _first_of_tasks(evaluation, num_per_task)[ranks.rank :: ranks.count]
    with evaluation_mode(model):
        ranks.gather(partial(_record, policy, env, numbered, unfinished, size))
    ranks.gather(lambda: replace_folder(unfinished, folder) if ranks.rank == 0 else None)


def recording_failed(error: Exception, folder: Path) -> RLinfError:
    """Return the error to raise if an evaluation was saved, but its episodes could not be recorded."""
    cause = f"{type(error).__name__}: {error}"
    return RLinfError(
        f"The episodes of {folder} could not be recorded ({cause}); its result is saved. To continue without recordings, set "
        "evaluation.record_episodes=0"
    )


def _make_folder(folder: Path, unfinished: Path) -> None:
    """Create an empty folder for new recordings; raise CheckpointError if replacing ``folder`` would delete other files."""
    foreign = [path.name for path in folder.iterdir() if not is_recording(path)] if folder.exists() else []
    if foreign:
        raise CheckpointError(
            f"{folder} contains '{foreign[0]}', which is not a recorded episode. Move it to a different folder"
        )
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


@dataclass
class ScoringPolicy(BatchedPolicy):
    """A ``BatchedPolicy`` that stores the ``score`` of each row's most recent actions."""

    scores: list[dict[str, float | None]] = field(default_factory=list)

    def act(self, observation: Observation, contexts: Sequence[EpisodeContext]) -> np.ndarray:
        """Return bitwise the same actions as ``BatchedPolicy.act``; a model with ``num_observations > 1`` has no scores."""
        if getattr(self.model, "num_observations", 1) > 1:
            self.scores = [dict.fromkeys(SCORES)] * len(observation)
            return super().act(observation, contexts)
        actions: dict[int, np.ndarray] = {}
        scored: dict[int, dict[str, float | None]] = {}
        for rows, inputs, prediction in predictions_for_rows(
            self.model, observation, self.draws(contexts), self.temperature
        ):
            actions |= zip(rows, prediction.actions[: len(rows)].float().cpu().numpy(), strict=True)
            scored |= zip(rows, score(self.model, inputs, prediction, self.temperature)[: len(rows)], strict=True)
        self.scores = [scored[row] for row in range(len(observation))]
        return np.stack([actions[row] for row in range(len(observation))])


def score(
    model: ActionModel, inputs: dict[str, Any], prediction: ActionPrediction, temperature: float
) -> list[dict[str, float | None]]:
    """Return each row's ``value``, ``entropy`` and ``logprob``; None for outputs that the policy does not have.

    Log-probability and entropy, in nat, are computed at ``temperature`` and summed over the chunk's ``A`` columns.
    """
    scores: Json = dict.fromkeys(SCORES)
    if getattr(model, "value_head", None) is not None:
        scores["value"] = prediction.values
    try:
        model.check_rl(model.config)
    except ConfigError:  # the model's current settings do not allow it
        has_logprobs = False
    else:
        has_logprobs = model.has_logprobs
    if has_logprobs:
        scores["logprob"] = model.rollout_logprobs(prediction, temperature).sum(1)
        scores["entropy"] = model.evaluate_actions(inputs, prediction.sequences, temperature).entropy.sum(1)
    columns = {name: None if values is None else values.float().tolist() for name, values in scores.items()}
    return [
        {name: None if column is None else column[row] for name, column in columns.items()}
        for row in range(len(prediction.actions))
    ]


class Recorder:
    """Stores the policy calls and rewards of replayed episodes (a ``Watcher``).

    Attributes:
        calls: Policy calls per env slot: the env step (from 0) of the first action, the chunk, its path in the image, and scores.
        rewards: Rewards per env slot and env step.
    """

    def __init__(self, policy: BatchedPolicy, env: VectorEnv, num_rows: int, size: int) -> None:
        self.policy, self.env, self.num_rows, self.size = policy, env, num_rows, size
        self.reset()

    def reset(self) -> None:
        """Discard everything stored so far; called at the start and when episodes restart because a simulator was lost."""
        self.calls: list[list[Json]] = [[] for _ in range(self.num_rows)]
        self.rewards: list[list[float]] = [[] for _ in range(self.num_rows)]

    def decided(self, rows: np.ndarray, chunks: np.ndarray) -> None:
        """Store each chunk with its path in the image and its scores."""
        paths = self.env.chunk_paths(
            rows.tolist(), np.clip(chunks, self.env.action_low, self.env.action_high), self.size
        )
        scored = getattr(self.policy, "scores", [dict.fromkeys(SCORES)] * len(rows))
        for index, row in enumerate(rows.tolist()):
            call = {"step": len(self.rewards[row]), "chunk": chunks[index].tolist()}
            call["path"] = None if paths is None else _without_nan(paths[index])
            self.calls[row].append({**call, **scored[index]})

    def stepped(self, rows: np.ndarray, step: ChunkStep) -> None:
        """Store the rewards."""
        for row in rows.tolist():
            self.rewards[row].append(float(step.rewards[row, 0]))


def _first_of_tasks(evaluation: EvaluationResult, num_per_task: int) -> list[tuple[int, EpisodeResult]]:
    """Return each task's first results with their indices in the list."""
    seen: Counter[str] = Counter()
    chosen = []
    for number, result in enumerate(evaluation.results):
        seen[evaluation.group_of(result.task)] += 1
        if seen[evaluation.group_of(result.task)] <= num_per_task:
            chosen.append((number, result))
    return chosen


def _record(
    policy: BatchedPolicy, env: VectorEnv, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int
) -> None:
    for first in range(0, len(numbered), env.num_envs):
        batch = numbered[first : first + env.num_envs]
        recorder = Recorder(policy, env, len(batch), size)
        replays = replay_episodes(policy, env, [counted.spec for _, counted in batch], size, recorder)
        for row, ((number, counted), (result, instruction, frames)) in enumerate(zip(batch, replays, strict=True)):
            same = (result.success, result.num_env_steps) == (counted.success, counted.num_env_steps)
            content = {
                "number": number, "spec": asdict(result.spec), "task": result.task, "instruction": instruction,
                "success": success_of(result, env), "as_counted": bool(same), "size": size,
                "low": env.action_low.tolist(), "high": env.action_high.tolist(),
                "rewards": recorder.rewards[row], "calls": recorder.calls[row],
                "frames": [_image(frame) for frame in frames],
            }  # fmt: skip
            write_recording(folder / f"{slug(result.task)}_{number:03d}.js", content)


def _image(frame: np.ndarray) -> str:
    """Return a frame as a JPEG data URL."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _without_nan(path: np.ndarray) -> list[list[float] | None]:
    return [[float(x), float(y)] if np.isfinite([x, y]).all() else None for x, y in path]
