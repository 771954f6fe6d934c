"""SAC and TD3 without a frozen policy: the same trainer, with the actor ``scratch``."""

import json

import gymnasium
import numpy as np
import pytest
import torch
from offpolicy_runs import all_tensors
from run_results import run_config

import rlinf
from rlinf.cli import main
from rlinf.commands.export import random_observation
from rlinf.commands.train import build, train
from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.errors import ConfigError
from rlinf.offpolicy.replay import ReplayBuffer
from rlinf.preflight.validation import validate

QUICK = [
    "rollout.num_envs=3", "trainer.max_steps=4", "evaluation.num_episodes=4", "evaluation.num_videos_per_task=0", "evaluation.probe=false",
    "tracking.tensorboard=false", "tracking.progress=false", "cluster.num_threads=1", "algorithm.learning_starts=20",
    "algorithm.batch_size=8", "algorithm.replay_capacity=300", "algorithm.actor.hidden_size=16", "algorithm.n_step=3",
]  # fmt: skip
STATE = [
    "model=mlp", "model.init_config.state_dim=3", "model.action_token_len=1", "env=gymnasium", "env.tasks=[Pendulum-v1]",
    "env.num_processes=0", "env.max_episode_steps=12",
]  # fmt: skip
IMAGES = [
    "model=cnn", "model.init_config.image_size=36", "model.init_config.feature_dim=16", "env=tabletop", "env.tasks=[reach]",
    "env.image_size=36", "env.max_episode_steps=8",
]  # fmt: skip
WITH_STATE = [*IMAGES, "env.state=full", "model.init_config.state_dim=31"]


class Images(gymnasium.Env):
    """Shows images alone."""

    observation_space = gymnasium.spaces.Dict({"front": gymnasium.spaces.Box(0, 255, (16, 16, 3), np.uint8)})
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    metadata = {"render_modes": []}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return {"front": np.zeros((16, 16, 3), np.uint8)}, {}

    def step(self, action):
        return {"front": np.zeros((16, 16, 3), np.uint8)}, 0.0, False, False, {}


class Unbounded(Images):
    action_space = gymnasium.spaces.Box(-np.inf, np.inf, (1,), np.float32)


gymnasium.register("Images-v0", entry_point=Images, max_episode_steps=6)
gymnasium.register("Unbounded-v0", entry_point=Unbounded, max_episode_steps=6)


@pytest.mark.parametrize(("algorithm", "words"), [("sac", STATE), ("sac", IMAGES), ("td3", WITH_STATE)])
def test_a_run_from_scratch_is_exported_and_evaluated(tmp_path, algorithm, words):
    words = [*words, *QUICK, f"algorithm={algorithm}", "trainer.save_every=2"]
    words += ["algorithm.target_policy=true"] if algorithm == "td3" else ["algorithm.entropy_in_target=true"]
    run = build(config_of(tmp_path / "whole", *words))
    run.execute()
    whole = all_tensors(tmp_path / "whole" / "checkpoints" / "rl_000004")
    policy, learner = run.rl.policy.eval(), run.rl.learner
    assert policy.actor.base_dim == 0 and run.rl.replay.base.numel() == 0 and learner.num_updates > 0
    encoder = [name for name in whole if name.startswith("actor.encoder")]
    assert bool(encoder) == (words[0] == "model=cnn")
    for name in encoder:  # the critics train it, and its slow copy follows; the frozen one is as it was
        other = policy.base.state_dict()[name.removeprefix("actor.encoder.")]
        slow = learner.target_encoder.state_dict()[name.removeprefix("actor.encoder.")]
        assert not torch.equal(whole[name], other) and not torch.equal(whole[name], slow)
        assert (slow - other).abs().max() < (whole[name] - other).abs().max()
    assert main(["export", f"checkpoint={tmp_path / 'whole'}", f"output={tmp_path / 'export'}"]) == 0
    seen = random_observation(run.parts.config, policy.base, num_rows=50)
    acted = policy.predict_action_batch(do_sample=False, **policy.preprocess(seen)).actions.numpy()
    assert np.array_equal(rlinf.load_policy(tmp_path / "export").act(seen), acted) and np.ptp(acted) > 0
    assert main(["evaluate", f"checkpoint={tmp_path / 'whole'}", f"output_dir={tmp_path / 'result'}"]) == 0
    again = json.loads((tmp_path / "result" / "result.json").read_text(encoding="utf-8"))["results"]
    assert [each["episode_return"] for each in again] == [
        each["episode_return"]
        for each in json.loads((tmp_path / "whole/eval/after_rl/result.json").read_text())["results"]
    ]


def config_of(folder, *words):
    config = run_config(folder, *words)
    validate(config)
    return config


def test_the_head_is_chosen_by_whether_there_is_something_to_correct():
    def chosen(*words):
        config = build_config(compose_config(["env=tabletop", "algorithm=sac", *words]))
        return config.algorithm.actor.name, config.model.features

    assert chosen("model=mlp") == chosen("model=cnn") == ("scratch", "inputs")
    assert chosen("model=mlp", "sft.max_steps=9") == chosen("model=openvla_tiny") == ("residual", "hidden")
    assert chosen("model=mlp", "algorithm.actor.name=residual", "model.features=pooled") == ("residual", "pooled")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            [*STATE, "env.id=CartPole-v1", "env.tasks=null", "model.init_config.state_dim=4"],
            "some of whose actions are discrete.*Set algorithm=ppo",
        ),
        ([*STATE, "env.id=Unbounded-v0", "env.tasks=null"], "Box with finite bounds.*ActionWrapper"),
        ([*STATE, "env.id=Images-v0", "env.tasks=null"], "provides no state. Set model=cnn"),
        (
            [*STATE, "algorithm.replay_capacity=4000000000"],
            "80% of the memory of this machine.*Set algorithm.replay_capacity=",
        ),
        ([*STATE, "sft.max_steps=5", "algorithm.actor.name=scratch"], "sft.max_steps=5 with.*Set sft.max_steps=0"),
        (
            ["model=openvla_tiny", "env=tabletop", "algorithm.actor.name=scratch"],
            "no encoder.*algorithm.actor.name=residual",
        ),
        (
            ["model=openvla_tiny", "env=tabletop", "algorithm.actor.name=expo", "algorithm.entropy_in_target=true"],
            "no density.*Set algorithm.entropy_in_target=false",
        ),
    ],
)
def test_what_cannot_be_learnt_is_refused_with_the_cure(tmp_path, words, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config_of(tmp_path, "algorithm=sac", *QUICK, *words)


def test_known_transitions_are_kept_up_to_date_slot_by_slot():
    draw = torch.Generator().manual_seed(0)
    buffer = ReplayBuffer(24, 3, feature_dim=1, num_candidates=1, output_dim=1, chunk_len=1, seed=0)

    def flag(size):
        return torch.rand(size, generator=draw) < 0.6

    for _ in range(200):
        envs = flag(3).nonzero().flatten()
        buffer.observe(envs, torch.zeros(len(envs), 1), torch.zeros(len(envs), 1, 1))
        acting = envs[flag(len(envs))]
        zeros = torch.zeros(len(acting), 1)
        buffer.act(acting, zeros, zeros, zeros.bool(), flag(len(acting)) & flag(len(acting)))
        newest = torch.zeros(8, 3, dtype=torch.bool)
        for env in buffer.counts.nonzero().flatten().tolist():
            newest[(buffer.counts[env] - 1) % 8, env] = True
        wanted = (buffer.has_action & (buffer.terminated | ~newest)).flatten().nonzero().flatten()
        assert torch.equal(buffer.transitions(), wanted)
    assert len(wanted) > 5 and int(buffer.counts.min()) > 16  # the control: every ring has turned twice


def test_sac_swings_up_the_pendulum(tmp_path):
    words = [
        "experiment=gymnasium_pendulum_sac",
        "trainer.max_steps=3",
        "trainer.eval_every=0",
        "evaluation.num_episodes=20",
        "seed=0",
    ]
    train(config_of(tmp_path, *words, "tracking.tensorboard=false", "cluster.num_threads=1"))
    before, after = (
        json.loads((tmp_path / "eval" / name / "result.json").read_text(encoding="utf-8"))["results"]
        for name in ("before_rl", "after_rl")
    )
    assert (
        np.mean([each["episode_return"] for each in after])
        > -200
        > -900
        > np.mean([each["episode_return"] for each in before])
    )
