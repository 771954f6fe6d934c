"""lerobot's own evaluation plays exported policies in our environments (``examples/lerobot_policy_rlinf``)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlinf
from rlinf.commands.export import export
from rlinf.models.embodiment.lerobot.worker import OWN_PLACE, VARIABLE, runs_here

PYTHON = sys.executable if runs_here() else os.environ.get(VARIABLE) or (str(OWN_PLACE) if OWN_PLACE.exists() else None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="no Python with lerobot: bash scripts/setup.sh --lerobot makes one"),
]
ROOT = Path(__file__).parents[2]
EPISODES = 12


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Exports of a policy that sees images and decides on two actions at once, cloned for a while and for longer."""
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
def there(exports, tmp_path_factory):
    """What lerobot, loaded by its own factories, says of the first export."""
    folder = tmp_path_factory.mktemp("lerobot") / "folder"
    command = [PYTHON, str(ROOT / "tests" / "lerobot_plays.py"), str(exports[0]), str(folder), str(EPISODES)]
    path = os.pathsep.join(map(str, (ROOT / "examples" / "lerobot_policy_rlinf", ROOT)))
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_lerobots_factories_load_a_policy_that_acts_as_ours(there, exports):
    """The two actions of a chunk come in turn; other colours give other actions."""
    policy = rlinf.load_policy(exports[0])
    env = rlinf.make_env(policy.config.env, 4)
    seen, _ = env.reset(options={"episodes": env.episode_specs("eval")[:4]})
    expected, (found, of_other_colours) = policy.act(seen), map(np.array, there["actions"])
    env.close()
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(of_other_colours - expected).max() > 1e-3


def test_episodes_end_as_in_our_evaluation(there, exports):
    """The same successes and returns, episode by episode; another policy's differ."""
    ours, other = (rlinf.evaluate(rlinf.load_policy(folder), episodes=EPISODES).results for folder in exports)
    assert len({result.success for result in ours}) == 2
    assert [episode["success"] for episode in there["episodes"]] == [result.success for result in ours]
    returns = [result.episode_return for result in ours]
    np.testing.assert_allclose([episode["sum_reward"] for episode in there["episodes"]], returns, atol=1e-5)
    assert [result.success for result in other] != [result.success for result in ours]


def test_what_cannot_be_is_refused(there):
    """Training there, no seed, episodes that do not exist, and a folder that is no export."""
    assert "rlinf train init_from" in there["training"] and "rlinf export" in there["no export"]
    assert all("--seed=0" in message for message in there["seeds"])
