"""Cloning with `sft.augment`: what the policy sees in training is changed, and nothing that it sees in an evaluation."""

from pathlib import Path

import numpy as np
import pytest
from run_results import clone, differing_weights, weights_of

from rlinf.cli import main
from rlinf.data import lerobot_dataset
from rlinf.envs.base import VectorEnv
from rlinf.models.embodiment.cnn_action_model import CNNForRLActionPrediction
from rlinf.types import Observation

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install -e '.[lerobot]'")

ENV = ["env=tabletop", "env.tasks=[reach]", "env.max_episode_steps=6"]
QUIET = ["tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1"]
CLONE = [
    *ENV, *QUIET, "model=cnn", "model.action_chunks_len=2", "sft.batch_size=8", "sft.max_steps=4", "trainer.max_steps=0", "trainer.max_keep=-1",
    "evaluation.num_episodes=2", "evaluation.num_envs=2", "evaluation.num_videos_per_task=0",
]  # fmt: skip
AUGMENT = ["sft.augment.crop_area=0.9", "sft.augment.brightness=0.2", "sft.augment.hue=0.05"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("expert") / "data"
    words = [f"dataset={folder}", "collect.num_episodes=6", "collect.only_success=false"]
    assert main(["collect", *ENV, *QUIET, *words]) == 0
    return folder


def test_a_resumed_run_sees_the_same_changed_images_however_they_are_read(dataset, tmp_path):
    clone(tmp_path / "whole", dataset, *CLONE, *AUGMENT)
    clone(tmp_path / "halves", dataset, *CLONE, *AUGMENT, "sft.max_steps=2", "sft.num_workers=0")
    clone(tmp_path / "halves", dataset, *CLONE, *AUGMENT, f"resume={tmp_path / 'halves'}", "sft.num_workers=3")
    clone(tmp_path / "plain", dataset, *CLONE)
    whole, halves, plain = (weights_of(tmp_path / name, "sft_000004") for name in ("whole", "halves", "plain"))
    assert not differing_weights(whole, halves) and differing_weights(whole, plain)


def fraction_of(observations: list[Observation], images: np.ndarray) -> float:
    """Fraction of the rows whose image is among ``images``."""
    rows = np.concatenate([observation.images["front"] for observation in observations])
    return float(np.mean([(images == row).all((1, 2, 3)).any() for row in rows]))


def test_an_evaluation_sees_the_images_of_the_env(dataset, tmp_path, monkeypatch):
    seen: dict[bool, list[Observation]] = {True: [], False: []}
    shown: list[Observation] = []
    preprocess, reset, chunk_step = CNNForRLActionPrediction.preprocess, VectorEnv.reset, VectorEnv.chunk_step

    def recorded(self, observation):
        seen[self.training].append(observation)
        return preprocess(self, observation)

    def recorded_reset(self, **options):
        found = reset(self, **options)
        shown.append(found[0])
        return found

    def recorded_step(self, actions):
        found = chunk_step(self, actions)
        shown.append(found.observation)
        return found

    monkeypatch.setattr(CNNForRLActionPrediction, "preprocess", recorded)
    monkeypatch.setattr(VectorEnv, "reset", recorded_reset)
    monkeypatch.setattr(VectorEnv, "chunk_step", recorded_step)
    clone(tmp_path / "run", dataset, *CLONE, *AUGMENT, "sft.num_workers=0")
    stored = lerobot_dataset.open_dataset(dataset, {"front": "observation.images.front"}, None)
    known = stored.rows(np.arange(len(stored)))[0].images["front"]
    of_env = np.concatenate([observation.images["front"] for observation in shown])
    assert len(seen[True]) == 4 and all(observation.is_cropped for observation in seen[True])
    assert fraction_of(seen[True], known) == 0
    assert len(seen[False]) > 2 and fraction_of(seen[False], of_env) == 1
    assert not any(observation.is_cropped for observation in seen[False])
    seen[True].clear()
    clone(tmp_path / "plain", dataset, *CLONE, "sft.num_workers=0")
    assert fraction_of(seen[True], known) == 1, "without augmentation, training sees the images of the dataset"
