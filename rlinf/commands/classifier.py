"""Trains a success classifier on labelled frames, and measures its errors."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rlinf.data.formats import describe_dataset
from rlinf.data.lerobot_dataset import open_dataset
from rlinf.data.lerobot_format import IMAGES
from rlinf.envs.success_network import SuccessClassifier, SuccessNetwork
from rlinf.errors import ConfigError
from rlinf.evaluation.detection import calibration, choose_threshold, errors
from rlinf.number_formats import format_interval
from rlinf.options import PathText, option, to_mapping
from rlinf.preflight.folders import check_writable
from rlinf.preflight.reject import reject
from rlinf.seeding import derive_seed
from rlinf.tracking.progress import Progress

HALF_BATCH, LEARNING_RATE = 16, 3e-3
SHIFT, NOISE = 4, 4.0
"""Pixels by which images of training are moved at random, and deviation of the change of each of their colours, of 255."""


@dataclass
class ClassifierConfig:
    """What a success classifier learns from, and how."""

    data: PathText | None = option(None, "LeRobotDataset of episodes that succeed and fail, of `rlinf collect`.")
    more: PathText | None = option(
        None, "Another one, of the same camera, size and instructions, such as a trained policy's own episodes."
    )
    output_dir: PathText | None = option(None, "Folder to write, for env.success_classifier.")
    test: PathText | None = option(
        None, "Dataset that measures the errors; null: data, each part by a network of the others."
    )
    camera: str | None = option(None, "Camera that it looks through; null: the first one of the dataset.")
    tail_frames: int = option(0, "Last frames of successful episodes that count as successes, too.", minimum=0)
    failures_per_episode: int | None = option(
        None, "Most frames of failure of an episode, the last ones before a success, else drawn; null: all.", minimum=1
    )
    instruction_negatives: bool = option(True, "A frame of success is a failure of every other instruction.")
    mirror: bool = option(False, "Also learn from mirrored images, where left and right make no difference.")
    num_folds: int = option(
        4, "TrainerContext of the episodes, each scored by a network of the others; all networks vote.", minimum=2
    )
    false_positives: float = option(
        0.005, "Largest fraction of failures that may be seen as success.", minimum=0, below=1
    )
    num_steps: int = option(600, "Optimiser steps of each network.", minimum=1)
    seed: int = option(0, "Seed of parts, frames, weights and batches.")


@dataclass
class LabelledFrames:
    """Images ``[N, H, W, 3]``, numbers of their instructions, labels (true: success), and numbers of their episodes."""

    images: np.ndarray
    sentences: np.ndarray
    labels: np.ndarray
    episodes: np.ndarray

    def select(self, rows: np.ndarray) -> LabelledFrames:
        return LabelledFrames(*(array[rows] for array in vars(self).values()))

    def joined(self, other: LabelledFrames) -> LabelledFrames:
        """Return both, as different episodes."""
        other = replace(other, episodes=other.episodes + self.episodes.max() + 1)
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return LabelledFrames(*(np.concatenate(arrays) for arrays in both))


def classifier(config: ClassifierConfig) -> SuccessClassifier:
    """Train, choose the threshold, measure the errors, write the folder and print its numbers.

    Raise ConfigError for datasets that do not fit, frames of one class, or a classifier that does not tell success from failure.
    """
    for key in ("data", "output_dir"):
        if getattr(config, key) is None:
            usage = "rlinf classifier data=data/labelled output_dir=outputs/classifier"
            raise ConfigError(f"`rlinf classifier` needs {key}=<folder>. Run {usage}")
    folder = Path(config.output_dir).expanduser()
    if os.path.lexists(folder):
        reject(f"output_dir='{folder}' exists", "a new folder", "output_dir=<a new folder>")
    check_writable(config.output_dir, "output_dir")
    about: dict[str, Any] = {"camera": config.camera, "config": to_mapping(config)}
    frames = read_frames(config, "data", about)
    if config.more:
        frames = frames.joined(read_frames(config, "more", about))
    test = read_frames(config, "test", about) if config.test else None
    logits, networks = cross_fitted(frames, len(about["instructions"]), config)
    threshold = max(0.0, choose_threshold(logits, frames.labels, config.false_positives))  # at least even odds
    known = errors(logits >= threshold, frames.labels, frames.episodes)["errors"]
    if known["false_negatives"]["interval"][1] + known["false_positives"]["interval"][1] >= 1:
        missed, wrong = (known[name] for name in ("false_negatives", "false_positives"))
        raise ConfigError(
            f"The classifier misses {missed['count']} of {missed['of']} successes of episodes that it does not know, and sees {wrong['count']} "
            f"of {wrong['of']} failures as success; required: clearly fewer. Check the labels of {config.data}, or set data=<more episodes>, "
            "num_steps=2000 or false_positives=0.05"
        )
    found = SuccessClassifier(networks, about)
    about |= {"networks": len(networks), "threshold": threshold}
    about |= {"frames": len(frames.labels), "successes": int(frames.labels.sum())}
    if test is not None:
        logits, frames = found.logits(test.images, test.sentences), test
    about |= errors(logits >= threshold, frames.labels, frames.episodes) | calibration(logits, frames.labels)
    found.save(folder)
    print(f"{summary(about)}\nclassifier    {folder}\nuse it        env.success_classifier={folder}", flush=True)
    return found


def read_frames(config: ClassifierConfig, key: str, about: dict[str, Any]) -> LabelledFrames:
    """Read and label the frames of a dataset. ``data`` fills in ``about``, which ``test`` must fit."""
    info = describe_dataset(getattr(config, key), key)
    other = f"{key}=<another folder>"
    if not info.reports_success_per_row:
        reject(f"{info.folder} does not say which episodes succeeded", "a column next.success", other)
    cameras = {column.removeprefix(IMAGES): column for column in info.image_shapes}
    camera = about["camera"] = about["camera"] or next(iter(cameras), "")
    if camera not in cameras:
        found = f"{info.folder} has the cameras [{', '.join(cameras)}]"
        reject(found, f"'{camera}' among them", f"camera={next(iter(cameras), '<name>')}, or {other}")
    shape = list(info.image_shapes[cameras[camera]])
    if shape != about.setdefault("image_shape", shape):
        sizes = [" x ".join(map(str, each)) for each in (shape, about["image_shape"])]
        reject(f"The images '{camera}' of {info.folder} have {sizes[0]} pixels", f"{sizes[1]}, as in data", other)
    stored = open_dataset(info.folder, {camera: cameras[camera]}, None, outcomes=True)
    known = about.setdefault("instructions", stored.tasks)
    for task in set(stored.tasks) - set(known):
        reject(f"{info.folder} has the instruction '{task}'", f"one of the {len(known)} of data", other)
    most = config.failures_per_episode if key != "test" else None
    rows, labels = label_rows(stored.episode_ids, stored.outcomes.success, config.tail_frames, most, config.seed)
    check_both_classes(labels, str(info.folder))
    sentences = np.array([known.index(task) for task in stored.tasks])[stored.task_ids[rows]]
    return LabelledFrames(stored.frames[camera].read(rows), sentences, labels, stored.episode_ids[rows])


def label_rows(
    episodes: np.ndarray, success: np.ndarray, tail_frames: int, most_failures: int | None, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that have a label, int64 ``[N]``, and their labels, bool ``[N]``.

    ``success``, bool ``[T]``: the action after the frame, or an earlier one, has reached the goal. Frames up to there are failures, and
    the next one is a success. Later ones are left out, because the goal may have been left again. ``most_failures`` of an episode are
    the last ones before its success, which are the hardest to tell from it.
    """
    rows: list[int] = []
    labels: list[bool] = []
    generator = np.random.default_rng(derive_seed(seed, "labelled frames"))
    for episode in dict.fromkeys(episodes.tolist()):
        own = np.flatnonzero(episodes == episode)
        reached = np.flatnonzero(success[own])
        end = int(reached[0]) + 1 if len(reached) else len(own)
        last = own[max(0, len(own) - tail_frames) :] if len(reached) and tail_frames else own[:0]
        positive = np.union1d(own[end : end + 1], last)
        negative = np.setdiff1d(own[:end], positive)
        if most_failures is not None and len(negative) > most_failures:
            drawn = negative if len(reached) else generator.permutation(negative)
            negative = drawn[-most_failures:]
        rows += [*negative.tolist(), *positive.tolist()]
        labels += [False] * len(negative) + [True] * len(positive)
    return np.array(rows, dtype=np.int64), np.array(labels, dtype=bool)


def check_both_classes(labels: np.ndarray, what: str) -> None:
    """Raise ConfigError if the labels are all successes or all failures."""
    if not labels.any() or labels.all():
        kind, missing = ("successes", "failures") if labels.any() else ("failures", "successes")
        found, required = f"{what} has {len(labels)} labelled frames, all of them {kind}", f"{missing}, too"
        more = "collect with env.terminate_on_success=false collect.only_success=false, so that frames follow a success"
        reject(found, required, f"data=<more episodes> ({more}), or tail_frames=1")


def cross_fitted(
    frames: LabelledFrames, num_sentences: int, config: ClassifierConfig
) -> tuple[np.ndarray, list[SuccessNetwork]]:
    """Return the logit of each frame, float32 ``[N]``, by the network that was trained on other episodes, and all ``num_folds`` networks."""
    episodes = np.unique(frames.episodes)
    if len(episodes) < config.num_folds:
        found, required = f"{config.data} has {len(episodes)} episodes", f"num_folds={config.num_folds} of them"
        reject(found, required, f"num_folds={max(2, len(episodes))}, or data=<more episodes>")
    order = np.random.default_rng(derive_seed(config.seed, "parts")).permutation(episodes)
    parts = [np.isin(frames.episodes, part) for part in np.array_split(order, config.num_folds)]
    for number, part in enumerate(parts, start=1):
        check_both_classes(frames.labels[~part], f"{config.data} without part {number} of {config.num_folds}")
    logits, networks = np.zeros(len(frames.labels), dtype=np.float32), []
    for number, part in enumerate(parts):
        networks.append(train(frames.select(~part), num_sentences, config, number))
        logits[part] = SuccessClassifier(networks[-1:], {}).logits(frames.images[part], frames.sentences[part])
    return logits, networks


def train(frames: LabelledFrames, num_sentences: int, config: ClassifierConfig, number: int) -> SuccessNetwork:
    """Return a trained network, whose weights and batches are drawn by ``number``.

    Half of a batch are successes. Half of the others are successes under another instruction, where there is one. The last bias is then
    corrected to the frames' own fraction of successes (King and Zeng 2001, equation 7).
    """
    generator = np.random.default_rng(derive_seed(config.seed, "classifier batches", number))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(config.seed, "classifier weights", number))
        network = SuccessNetwork(num_sentences)
    positive, negative = np.flatnonzero(frames.labels), np.flatnonzero(~frames.labels)
    num_others = HALF_BATCH // 2 if config.instruction_negatives and num_sentences > 1 else 0
    optimizer = torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=config.num_steps + 1)
    labels, progress = torch.arange(2 * HALF_BATCH) < HALF_BATCH, Progress()
    for step in range(config.num_steps):
        drawn = ((positive, HALF_BATCH), (negative, HALF_BATCH - num_others), (positive, num_others))
        rows = np.concatenate([generator.choice(each, count) for each, count in drawn])
        turns = np.zeros(len(rows), dtype=np.int64)
        turns[len(rows) - num_others :] = generator.integers(1, max(2, num_sentences), num_others)
        sentences = torch.from_numpy((frames.sentences[rows] + turns) % num_sentences)
        logits = network(changed(frames.images[rows], config.mirror, generator), sentences)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        progress.update("classifier", step + 1, config.num_steps, loss=loss.item())
    progress.close()
    with torch.no_grad():
        network.head.bias += float(np.log(len(positive) / len(negative) * (HALF_BATCH - num_others) / HALF_BATCH))
    return network


def changed(images: np.ndarray, mirror: bool, generator: np.random.Generator) -> torch.Tensor:
    """Return images ``[B, H, W, 3]`` as float32, all moved by the same few pixels, each with colours of its own, and mirrored or not."""
    height, width = images.shape[1:3]
    padded = np.pad(images, ((0, 0), (SHIFT, SHIFT), (SHIFT, SHIFT), (0, 0)), mode="edge")
    down, right = generator.integers(0, 2 * SHIFT + 1, 2)
    colours = generator.normal(0, NOISE, (len(images), 1, 1, 3)).astype(np.float32)
    moved = padded[:, down : down + height, right : right + width] + colours
    if mirror:
        turned = generator.random(len(moved)) < 0.5
        moved[turned] = moved[turned, :, ::-1]
    return torch.from_numpy(moved)


def summary(about: dict[str, Any]) -> str:
    """Return the numbers of ``classifier.json`` as text."""
    where = "other episodes of data" if about["config"]["test"] is None else about["config"]["test"]
    lines = [f"trained on    {about['frames']} frames, {about['successes']} of success"]
    lines.append(f"threshold     {1 / (1 + np.exp(-about['threshold'])):.3f}; errors on {where}:")
    for name, one in about["errors"].items():
        interval = format_interval(*one["interval"], " - ")
        shown = f"{one['count']} of {one['of']} = {one['fraction']:.1%} (95 % {interval})"
        lines.append(f"  {name.replace('_', ' '):<24}{shown}")
    lines.append(f"calibration   error {about['calibration_error']:.3f}; probability, fraction of successes, frames:")
    lines += [f"  {one['probability']:.3f}  {one['success']:.3f}  {one['frames']}" for one in about["reliability"]]
    return "\n".join(lines)
