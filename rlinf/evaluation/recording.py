"""Record episodes step by step: images, the policy's decision in each call, and its own judgement of that."""

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
    RankGroup,
    Stream,
    predictions_for_rows,
    replay_episodes,
    slug,
    success_of,
)
from rlinf.evaluation.recorded import JUDGEMENTS, is_recording, write_recording
from rlinf.evaluation.result import EvaluationResult
from rlinf.files import replace_folder
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
    """Play the first ``num_per_task`` episodes of each task again, and write a recording of each into ``folder``.

    The evaluation stays as it is. Earlier recordings in ``folder`` stay whole until all new ones are written; with
    ``num_per_task=0`` nothing is touched. Raise CheckpointError if ``folder`` holds anything but recordings.

    Args:
        evaluation: The result of ``evaluate_policy`` with the same model, env and ranks.
    """
    if not num_per_task:
        return
    folder = Path(folder)
    unfinished = folder.with_name(f".{folder.name}.tmp")
    ranks.gather(lambda: _make_room(folder, unfinished) if ranks.rank == 0 else None)
    kind: Any = JudgedPolicy if hasattr(model, "predict_action_batch") else CallablePolicy
    policy = kind(model, env.task_names, evaluation.greedy, evaluation.temperature, evaluation.seed)
    numbered = _first_of_tasks(evaluation.results, num_per_task)[ranks.rank :: ranks.count]
    with evaluation_mode(model):
        ranks.gather(partial(_record, policy, env, numbered, unfinished, size))
    ranks.gather(lambda: replace_folder(unfinished, folder) if ranks.rank == 0 else None)


def recording_failed(error: Exception, folder: Path) -> RLinfError:
    """Return the error of an evaluation whose result is written, but whose episodes could not be recorded."""
    cause = f"{type(error).__name__}: {error}"
    return RLinfError(
        f"The episodes of {folder} could not be recorded ({cause}); its result is kept. To continue without recordings, set "
        "evaluation.record_episodes=0"
    )


def _make_room(folder: Path, unfinished: Path) -> None:
    """Make an empty folder for new recordings; raise CheckpointError if replacing ``folder`` would delete other files."""
    others = [path.name for path in folder.iterdir() if not is_recording(path)] if folder.exists() else []
    if others:
        raise CheckpointError(
            f"{folder} holds '{others[0]}', which is not a recorded episode. Move it to another folder"
        )
    if unfinished.exists():
        shutil.rmtree(unfinished)
    unfinished.mkdir(parents=True)


@dataclass
class JudgedPolicy(BatchedPolicy):
    """A ``BatchedPolicy`` that keeps the judgements of its last actions, one of ``judge`` for each row."""

    judgements: list[dict[str, float | None]] = field(default_factory=list)

    def act(self, observation: Observation, streams: Sequence[Stream]) -> np.ndarray:
        """Return float32 actions ``[K, C, D]``, bit-equal to ``BatchedPolicy.act``. A policy that remembers has no judgements."""
        if getattr(self.model, "num_observations", 1) > 1:
            self.judgements = [dict.fromkeys(JUDGEMENTS)] * len(observation)
            return super().act(observation, streams)
        actions: dict[int, np.ndarray] = {}
        judged: dict[int, dict[str, float | None]] = {}
        for rows, inputs, prediction in predictions_for_rows(
            self.model, observation, self.draws(streams), self.temperature
        ):
            actions |= zip(rows, prediction.actions[: len(rows)].float().cpu().numpy(), strict=True)
            judged |= zip(rows, judge(self.model, inputs, prediction, self.temperature)[: len(rows)], strict=True)
        self.judgements = [judged[row] for row in range(len(observation))]
        return np.stack([actions[row] for row in range(len(observation))])


def judge(
    model: ActionModel, inputs: dict[str, Any], prediction: ActionPrediction, temperature: float
) -> list[dict[str, float | None]]:
    """Return ``value``, ``entropy`` and ``logprob`` of each row of a prediction; None where the policy has no such number.

    Log-probability and entropy, in nat, belong to the whole chunk: they are sums over its ``A`` columns, at ``temperature``.
    """
    found: dict[str, Any] = dict.fromkeys(JUDGEMENTS)
    if getattr(model, "value_head", None) is not None:
        found["value"] = prediction.values
    try:
        model.check_rl(model.config)
    except ConfigError:  # the model's present settings do not allow it
        has_logprobs = False
    else:
        has_logprobs = model.has_logprobs
    if has_logprobs:
        found["logprob"] = model.rollout_logprobs(prediction, temperature).sum(1)
        found["entropy"] = model.evaluate_actions(inputs, prediction.sequences, temperature).entropy.sum(1)
    columns = {name: None if numbers is None else numbers.float().tolist() for name, numbers in found.items()}
    return [
        {name: None if column is None else column[row] for name, column in columns.items()}
        for row in range(len(prediction.actions))
    ]


class Recorder:
    """Keeps the calls and rewards of replayed episodes (a ``Watcher``).

    Attributes:
        calls: Of each row: the env step (from 0) of the first action, the chunk, its path in the image, and judgements.
        rewards: Of each row and env step.
    """

    def __init__(self, policy: BatchedPolicy, env: VectorEnv, num_rows: int, size: int) -> None:
        self.policy, self.env, self.num_rows, self.size = policy, env, num_rows, size
        self.begin()

    def begin(self) -> None:
        """Forget all."""
        self.calls: list[list[dict[str, Any]]] = [[] for _ in range(self.num_rows)]
        self.rewards: list[list[float]] = [[] for _ in range(self.num_rows)]

    def decided(self, rows: np.ndarray, chunks: np.ndarray) -> None:
        """Keep what the policy decided, and where it would lead."""
        paths = self.env.chunk_paths(
            rows.tolist(), np.clip(chunks, self.env.action_low, self.env.action_high), self.size
        )
        judged = getattr(self.policy, "judgements", [dict.fromkeys(JUDGEMENTS)] * len(rows))
        for place, row in enumerate(rows.tolist()):
            call = {"step": len(self.rewards[row]), "chunk": chunks[place].tolist()}
            call["path"] = None if paths is None else _without_nan(paths[place])
            self.calls[row].append({**call, **judged[place]})

    def stepped(self, rows: np.ndarray, step: ChunkStep) -> None:
        """Keep the rewards."""
        for row in rows.tolist():
            self.rewards[row].append(float(step.rewards[row, 0]))


def _first_of_tasks(results: Sequence[EpisodeResult], num_per_task: int) -> list[tuple[int, EpisodeResult]]:
    """Return the first results of each task with their numbers in the list."""
    seen: Counter[str] = Counter()
    chosen = []
    for number, result in enumerate(results):
        seen[result.task] += 1
        if seen[result.task] <= num_per_task:
            chosen.append((number, result))
    return chosen


def _record(
    policy: BatchedPolicy, env: VectorEnv, numbered: Sequence[tuple[int, EpisodeResult]], folder: Path, size: int
) -> None:
    for first in range(0, len(numbered), env.num_envs):
        batch = numbered[first : first + env.num_envs]
        recorder = Recorder(policy, env, len(batch), size)
        played = replay_episodes(policy, env, [counted.spec for _, counted in batch], size, recorder)
        for row, ((number, counted), (result, instruction, frames)) in enumerate(zip(batch, played, strict=True)):
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
    """Return a JPEG as an address that holds its data."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(frame).save(file, "JPEG", quality=JPEG_QUALITY)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def _without_nan(path: np.ndarray) -> list[list[float] | None]:
    return [[float(x), float(y)] if np.isfinite([x, y]).all() else None for x, y in path]
