"""lerobot's own evaluation plays exported policies in our environments (``examples/lerobot_policy_rlinf``)."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import rlinf
from rlinf.commands.export import export
from rlinf.models.embodiment.lerobot.worker import runs_here

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not runs_here(), reason="lerobot does not import in this Python: scripts/setup.sh --lerobot"),
]
EPISODES = 12


@pytest.fixture(scope="module", autouse=True)
def plugin():
    """Import the package, which need not be installed."""
    place = str(Path(__file__).parents[2] / "examples" / "lerobot_policy_rlinf")
    sys.path.insert(0, place)
    import lerobot_policy_rlinf  # noqa: F401

    yield
    sys.path.remove(place)


@pytest.fixture(scope="module")
def exports(plugin, tmp_path_factory):
    """Exports of a policy that sees pictures and decides on two actions at once, cloned for a while and for longer."""
    place, found = tmp_path_factory.mktemp("exports"), []
    for steps in (40, 120):
        run = rlinf.train(
            ["model=cnn", "model.init_config.image_size=40", "model.action_chunks_len=2", "env=tabletop",
             "env.image_size=40", "env.tasks=[reach]", "env.tolerance_m=0.08", f"sft.max_steps={steps}",
             "sft.num_demonstrations=48", "sft.learning_rate=3e-3", "evaluation.num_episodes=1",
             "evaluation.num_videos_per_task=0", "evaluation.probe=false", f"output_dir={place}/run{steps}"],
            sft_only=True,
        )  # fmt: skip
        found.append(export(run, place / f"export{steps}"))
    return found


@pytest.fixture(scope="module")
def played(exports, tmp_path_factory):
    """lerobot's policy, processors and env of the first export."""
    from lerobot.configs import PreTrainedConfig
    from lerobot.envs import make_env, make_env_config, make_env_pre_post_processors
    from lerobot.policies import make_policy, make_pre_post_processors
    from lerobot_policy_rlinf.__main__ import write_folder

    folder = tmp_path_factory.mktemp("lerobot") / "folder"
    write_folder(exports[0], folder)
    env_config = make_env_config("rlinf", checkpoint=str(exports[0]))
    env = make_env(env_config, n_envs=4)["rlinf"][0]
    config = PreTrainedConfig.from_pretrained(folder)
    config.pretrained_path = folder
    policy = make_policy(config, env_cfg=env_config)
    overrides = {"device_processor": {"device": "cpu"}, "rename_observations_processor": {"rename_map": {}}}
    processors = make_pre_post_processors(config, pretrained_path=str(folder), preprocessor_overrides=overrides)
    yield policy, (*make_env_pre_post_processors(env_config, config), *processors), env
    env.close()


def test_lerobots_factories_load_a_policy_that_acts_as_ours(played, exports):
    """One call gives both actions of the chunk in turn; other colours give other actions."""
    from lerobot.envs.utils import preprocess_observation

    policy, (_, _, before, after), env = played
    seen, _ = env.reset(seed=0)
    expected = rlinf.load_policy(exports[0]).act(
        {"images": seen["pixels"], "state": seen["agent_pos"], "instruction": list(env.call("task_description"))}
    )

    def act(pixels):
        policy.reset()
        batch = preprocess_observation({**seen, "pixels": pixels}) | {"task": list(env.call("task_description"))}
        return np.stack([after(policy.select_action(before(dict(batch)))).numpy() for _ in range(2)], 1)

    np.testing.assert_allclose(act(seen["pixels"]), expected, atol=1e-6)
    assert np.abs(act({"front": seen["pixels"]["front"][..., ::-1].copy()}) - expected).max() > 1e-3


def test_episodes_end_as_in_our_evaluation(played, exports):
    """The same successes and returns, episode by episode; another policy's differ."""
    from lerobot.scripts.lerobot_eval import eval_policy

    policy, processors, env = played
    with torch.no_grad():
        theirs = eval_policy(env, policy, *processors, n_episodes=EPISODES, start_seed=0)["per_episode"]
    ours, other = (rlinf.evaluate(rlinf.load_policy(folder), episodes=EPISODES).results for folder in exports)
    assert len({result.success for result in ours}) == 2
    assert [episode["success"] for episode in theirs] == [result.success for result in ours]
    returns = [result.episode_return for result in ours]
    np.testing.assert_allclose([episode["sum_reward"] for episode in theirs], returns, atol=1e-5)
    assert [result.success for result in other] != [result.success for result in ours]


def test_what_cannot_be_is_refused(played, exports, tmp_path):
    """Training there, an episode that does not exist, and a folder that is no export."""
    from lerobot_policy_rlinf.__main__ import write_folder

    policy, _, env = played
    with pytest.raises(NotImplementedError, match="rlinf train init_from"):
        policy.forward({})
    for seed in (None, -1, 1000):
        with pytest.raises(ValueError, match="--seed=0"):
            env.reset(seed=seed)
    with pytest.raises(rlinf.errors.CheckpointError, match="rlinf export"):
        write_folder(tmp_path, tmp_path / "new")
