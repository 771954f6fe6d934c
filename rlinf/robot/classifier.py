"""Trains a success classifier on labelled frames, and measures its errors."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn

from rlinf.data.formats import describe_dataset
from rlinf.data.lerobot_dataset import open_dataset
from rlinf.data.lerobot_format import IMAGES
from rlinf.envs.success_network import SuccessClassifier, SuccessNetwork
from rlinf.errors import ConfigError, reject
from rlinf.evaluation.intervals import wilson_interval
from rlinf.files import Json
from rlinf.number_formats import format_interval
from rlinf.options import PathText, option, to_mapping
from rlinf.preflight.folders import check_writable
from rlinf.seeding import derive_seed
from rlinf.tracking.progress import Progress

NUM_BINS = 10


def choose_threshold(scores: np.ndarray, labels: np.ndarray, false_positives: float) -> float:
    """Return the smallest threshold with a false positive rate of at most ``false_positives``.

    ``scores`` are float32 ``[N]``. ``labels`` are bool ``[N]``, true for successes.
    """
    failures = np.sort(scores[~labels])[::-1]
    # Add 1e-9 because 100 * 0.29 is 28.999999999999996, which would allow one false positive too few.
    allowed = int(len(failures) * false_positives + 1e-9)
    return float(np.nextafter(failures[allowed], np.float32(np.inf)))


def errors(detected: np.ndarray, labels: np.ndarray, episodes: np.ndarray) -> Json:
    """Return the error rates of ``detected``, bool ``[N]``, as counts, fractions and 95 % Wilson intervals.

    ``false_positives`` is a fraction of the failures, ``false_negatives`` a fraction of the successes, and ``false_positive_episodes`` a
    fraction of the episodes with failures. The intervals assume independent frames.
    """
    wrong, failed, rates = detected & ~labels, np.unique(episodes[~labels]), {}
    kinds = ("false_positives", wrong[~labels]), ("false_negatives", ~detected[labels])
    for name, is_error in (*kinds, ("false_positive_episodes", np.isin(failed, episodes[wrong]))):
        k, n = int(is_error.sum()), len(is_error)
        rates[name] = {"count": k, "of": n, "fraction": k / n, "interval": list(wilson_interval(k, n))}
    return {"errors": rates}


def calibration(logits: np.ndarray, labels: np.ndarray) -> Json:
    """Return the ``reliability`` in ``NUM_BINS`` bins of equal width, omitting empty bins, and the ``calibration_error``.

    ``ECE = sum_b n_b / N |success rate in b - mean probability in b|`` (Guo et al. 2017, equation 3).
    """
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    numbers = np.minimum((probabilities * NUM_BINS).astype(int), NUM_BINS - 1)
    table = []
    for inside in (numbers == number for number in np.unique(numbers)):
        mean, rate = float(probabilities[inside].mean()), float(labels[inside].mean())
        table.append({"probability": mean, "success": rate, "frames": int(inside.sum())})
    error = sum(row["frames"] * abs(row["success"] - row["probability"]) for row in table) / len(labels)
    return {"reliability": table, "calibration_error": error}


HALF_BATCH, LEARNING_RATE = 16, 3e-3
SHIFT, NOISE = 4, 4.0
"""Augmentation of training images: maximum shift in pixels, and std of the offset added to each colour channel (0 to 255)."""


@dataclass
class ClassifierConfig:
    """Data and training settings of a success classifier."""

    data: PathText | None = option(None, "LeRobotDataset with successful and failed episodes, from `rlinf collect`.")
    extra_data: PathText | None = option(
        None, "Second dataset with the same camera, size and instructions, such as a policy's episodes."
    )
    output_dir: PathText | None = option(None, "New folder for the classifier, to be set as env.success_classifier.")
    test: PathText | None = option(None, "Dataset for measuring errors; null: cross-validate on data.")
    camera: str | None = option(None, "Camera of the input images; null: the dataset's first camera.")
    tail_frames: int = option(0, "Final frames of each successful episode to label as successes, too.", minimum=0)
    failures_per_episode: int | None = option(
        None, "Maximum failure frames per episode, preferring the last before a success; null: all.", minimum=1
    )
    instruction_negatives: bool = option(True, "Also use success frames as failures for all other instructions.")
    mirror: bool = option(False, "Also train on mirrored images, if left and right are equivalent.")
    num_folds: int = option(4, "Number of cross-validation folds; the networks of all folds vote.", minimum=2)
    false_positives: float = option(0.005, "Maximum fraction of failures classified as success.", minimum=0, below=1)
    num_steps: int = option(600, "Optimiser steps per network.", minimum=1)
    seed: int = option(0, "Random seed for folds, frames, weights and batches.")


@dataclass
class LabelledFrames:
    """Images ``[N, H, W, 3]`` with their instruction indices, labels (true: success) and episode indices, ``[N]`` each."""

    images: np.ndarray
    instructions: np.ndarray
    labels: np.ndarray
    episodes: np.ndarray

    def select(self, rows: np.ndarray) -> LabelledFrames:
        return LabelledFrames(*(array[rows] for array in vars(self).values()))

    def concatenate(self, other: LabelledFrames) -> LabelledFrames:
        """Return the frames of both datasets, with disjoint episode indices."""
        other = replace(other, episodes=other.episodes + self.episodes.max() + 1)
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return LabelledFrames(*(np.concatenate(arrays) for arrays in both))


def classifier(config: ClassifierConfig) -> SuccessClassifier:
    """Train, calibrate and write a success classifier; raise ConfigError for invalid data or a result no better than chance."""
    for key in ("data", "output_dir"):
        if getattr(config, key) is None:
            usage = "rlinf classifier data=data/labelled output_dir=outputs/classifier"
            raise ConfigError(f"`rlinf classifier` needs {key}=<folder>. Run {usage}")
    folder = Path(config.output_dir).expanduser()
    if os.path.lexists(folder):
        reject(f"output_dir='{folder}' exists", "a new folder", "output_dir=<a new folder>")
    check_writable(config.output_dir, "output_dir")
    about: Json = {"camera": config.camera, "config": to_mapping(config)}
    frames = read_frames(config, "data", about)
    if config.extra_data:
        frames = frames.concatenate(read_frames(config, "extra_data", about))
    test = read_frames(config, "test", about) if config.test else None
    logits, networks = cross_fit(frames, len(about["instructions"]), config)
    threshold = max(0.0, choose_threshold(logits, frames.labels, config.false_positives))  # at least even odds
    rates = errors(logits >= threshold, frames.labels, frames.episodes)["errors"]
    if rates["false_negatives"]["interval"][1] + rates["false_positives"]["interval"][1] >= 1:
        missed, wrong = (rates[name] for name in ("false_negatives", "false_positives"))
        raise ConfigError(
            f"On held-out episodes the classifier misses {missed['count']} of {missed['of']} successes and classifies {wrong['count']} "
            f"of {wrong['of']} failures as success; expected clearly fewer. Check the labels of {config.data}, or set "
            "data=<more episodes>, num_steps=2000 or false_positives=0.05"
        )
    result = SuccessClassifier(networks, about)
    about |= {"networks": len(networks), "threshold": threshold}
    about |= {"frames": len(frames.labels), "successes": int(frames.labels.sum())}
    if test is not None:
        logits, frames = result.logits(test.images, test.instructions), test
    about |= errors(logits >= threshold, frames.labels, frames.episodes) | calibration(logits, frames.labels)
    result.save(folder)
    print(f"{summary(about)}\nclassifier    {folder}\nuse it        env.success_classifier={folder}", flush=True)
    return result


def read_frames(config: ClassifierConfig, key: str, about: Json) -> LabelledFrames:
    """Read and label a dataset's frames. The first call fills ``about``; later datasets must match it."""
    info = describe_dataset(getattr(config, key), key)
    fix = f"{key}=<a different folder>"
    if not info.reports_success_per_row:
        reject(f"{info.folder} does not record success", "a column next.success", fix)
    cameras = {column.removeprefix(IMAGES): column for column in info.image_shapes}
    camera = about["camera"] = about["camera"] or next(iter(cameras), "")
    if camera not in cameras:
        actual = f"{info.folder} has the cameras [{', '.join(cameras)}]"
        reject(actual, f"the camera '{camera}'", f"camera={next(iter(cameras), '<name>')}, or {fix}")
    shape = list(info.image_shapes[cameras[camera]])
    if shape != about.setdefault("image_shape", shape):
        sizes = [" x ".join(map(str, size)) for size in (shape, about["image_shape"])]
        reject(f"The images '{camera}' of {info.folder} have {sizes[0]} pixels", f"{sizes[1]}, as in data", fix)
    stored = open_dataset(info.folder, {camera: cameras[camera]}, None, outcomes=True)
    known = about.setdefault("instructions", stored.tasks)
    for task in set(stored.tasks) - set(known):
        reject(f"{info.folder} has the instruction '{task}'", f"one of the {len(known)} of data", fix)
    most = config.failures_per_episode if key != "test" else None
    rows, labels = label_rows(stored.episode_ids, stored.outcomes.success, config.tail_frames, most, config.seed)
    check_both_classes(labels, str(info.folder))
    instructions = np.array([known.index(task) for task in stored.tasks])[stored.task_ids[rows]]
    return LabelledFrames(stored.frames[camera].read(rows), instructions, labels, stored.episode_ids[rows])


def label_rows(
    episodes: np.ndarray, success: np.ndarray, tail_frames: int, most_failures: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the labelled dataset rows, int64 ``[N]``, and their labels, bool ``[N]``.

    ``success``, bool ``[T]``, is true if the action after the frame, or an earlier one, reached the goal. Frames up to that action
    are labelled as failures, and the next frame as a success. At most ``most_failures`` failures per episode are used.
    """
    rows: list[int] = []
    labels: list[bool] = []
    generator = np.random.default_rng(derive_seed(seed, "labelled frames"))
    for episode in dict.fromkeys(episodes.tolist()):
        frames = np.flatnonzero(episodes == episode)
        reached = np.flatnonzero(success[frames])
        end = int(reached[0]) + 1 if len(reached) else len(frames)
        tail = frames[max(0, len(frames) - tail_frames) :] if len(reached) and tail_frames else frames[:0]
        # Frames after the first success are not labelled, because the robot may have left the goal again.
        positive = np.union1d(frames[end : end + 1], tail)
        negative = np.setdiff1d(frames[:end], positive)
        if most_failures is not None and len(negative) > most_failures:
            # The last frames before a success are the hardest to distinguish from it.
            candidates = negative if len(reached) else generator.permutation(negative)
            negative = candidates[-most_failures:]
        rows += [*negative.tolist(), *positive.tolist()]
        labels += [False] * len(negative) + [True] * len(positive)
    return np.array(rows, dtype=np.int64), np.array(labels, dtype=bool)


def check_both_classes(labels: np.ndarray, what: str) -> None:
    """Raise ConfigError if the labels are all successes or all failures."""
    if not labels.any() or labels.all():
        kind, missing = ("successes", "failures") if labels.any() else ("failures", "successes")
        hint = "collect with env.terminate_on_success=false collect.only_success=false, so that frames follow a success"
        reject(
            f"{what} has {len(labels)} labelled frames, all of them {kind}",
            f"{missing}, too",
            f"data=<more episodes> ({hint}), or tail_frames=1",
        )


def cross_fit(
    frames: LabelledFrames, num_instructions: int, config: ClassifierConfig
) -> tuple[np.ndarray, list[SuccessNetwork]]:
    """Train one network per fold; return each frame's held-out logit, float32 ``[N]``, and the networks."""
    episodes = np.unique(frames.episodes)
    if len(episodes) < config.num_folds:
        actual, required = f"{config.data} has {len(episodes)} episodes", f"num_folds={config.num_folds} of them"
        reject(actual, required, f"num_folds={max(2, len(episodes))}, or data=<more episodes>")
    order = np.random.default_rng(derive_seed(config.seed, "parts")).permutation(episodes)
    # Split by episode, not by frame: neighbouring frames are nearly identical and would leak between folds.
    folds = [np.isin(frames.episodes, fold) for fold in np.array_split(order, config.num_folds)]
    for number, fold in enumerate(folds, start=1):
        check_both_classes(frames.labels[~fold], f"{config.data} without fold {number} of {config.num_folds}")
    logits, networks = np.zeros(len(frames.labels), dtype=np.float32), []
    for number, fold in enumerate(folds):
        networks.append(train(frames.select(~fold), num_instructions, config, number))
        logits[fold] = SuccessClassifier(networks[-1:], {}).logits(frames.images[fold], frames.instructions[fold])
    return logits, networks


def train(frames: LabelledFrames, num_instructions: int, config: ClassifierConfig, number: int) -> SuccessNetwork:
    """Train the network of fold ``number`` on batches with 50 % successes and 25 % swapped instructions."""
    generator = np.random.default_rng(derive_seed(config.seed, "classifier batches", number))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "classifier weights", number))
        network = SuccessNetwork(num_instructions)
    positive, negative = np.flatnonzero(frames.labels), np.flatnonzero(~frames.labels)
    num_swapped = HALF_BATCH // 2 if config.instruction_negatives and num_instructions > 1 else 0
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=config.num_steps + 1)
    labels, progress = torch.arange(2 * HALF_BATCH) < HALF_BATCH, Progress()
    for step in range(config.num_steps):
        draws = ((positive, HALF_BATCH), (negative, HALF_BATCH - num_swapped), (positive, num_swapped))
        rows = np.concatenate([generator.choice(candidates, count) for candidates, count in draws])
        # Shifting the index by 1 to num_instructions - 1 always selects a different instruction.
        shifts = np.zeros(len(rows), dtype=np.int64)
        shifts[len(rows) - num_swapped :] = generator.integers(1, max(2, num_instructions), num_swapped)
        instructions = torch.from_numpy((frames.instructions[rows] + shifts) % num_instructions)
        logits = network(augment(frames.images[rows], config.mirror, generator), instructions)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.update("classifier", step + 1, config.num_steps, loss=loss.item())
    progress.close()
    with torch.no_grad():
        # Batches are balanced but the frames are not: correct the bias for their class ratio (King and Zeng 2001, equation 7).
        network.head.bias += float(np.log(len(positive) / len(negative) * (HALF_BATCH - num_swapped) / HALF_BATCH))
    return network


def augment(images: np.ndarray, mirror: bool, generator: np.random.Generator) -> torch.Tensor:
    """Return images ``[B, H, W, 3]`` as float32, all with one random shift, each with its own colour offset and randomly mirrored."""
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)), mode="edge")
    down, right = generator.integers(0, 2 * SHIFT + 1, 2)
    colours = generator.normal(0, NOISE, (len(images), 1, 1, 3)).astype(np.float32)
    shifted = padded[:, down : down + height, right : right + width] + colours
    if mirror:
        is_mirrored = generator.random(len(shifted)) < 0.5
        shifted[is_mirrored] = shifted[is_mirrored, :, ::-1]
    return torch.from_numpy(shifted)


def summary(about: Json) -> str:
    """Format the contents of ``classifier.json`` for the terminal."""
    where = "held-out episodes of data" if about["config"]["test"] is None else about["config"]["test"]
    lines = [f"trained on    {about['frames']} frames, {about['successes']} of success"]
    lines.append(f"threshold     {1 / (1 + np.exp(-about['threshold'])):.3f}; errors on {where}:")
    for name, error in about["errors"].items():
        interval = format_interval(*error["interval"], " - ")
        text = f"{error['count']} of {error['of']} = {error['fraction']:.1%} (95 % {interval})"
        lines.append(f"  {name.replace('_', ' '):<24}{text}")
    lines.append(f"calibration   error {about['calibration_error']:.3f}; probability, fraction of successes, frames:")
    lines += [f"  {row['probability']:.3f}  {row['success']:.3f}  {row['frames']}" for row in about["reliability"]]
    return "\n".join(lines)
