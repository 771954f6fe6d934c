"""Every env says how many env steps make a second of its time: datasets take their frames per second from it."""

import gymnasium
import pytest

from rlinf.config.compose import compose_config
from rlinf.config.schema import build_config
from rlinf.envs import make_env
from rlinf.errors import MissingDependencyError

ENVS = {
    "tabletop": (["env=tabletop"], 12.5),
    "metaworld": (["env=metaworld"], 80),
    "metaworld, repeated": (["env=metaworld", "env.action_repeat=5"], 16),
    "libero": (["env=libero_spatial"], 20),
    "maniskill": (["env=maniskill"], 20),
    "gymnasium": (["env=gymnasium", "env.id=Pendulum-v1"], gymnasium.make("Pendulum-v1").metadata["render_fps"]),
}


@pytest.mark.parametrize(("overrides", "expected"), ENVS.values(), ids=ENVS)
def test_the_rate_is_that_of_the_simulator(overrides, expected):
    config = build_config(compose_config([*overrides, "env.cameras=[]"])).env
    try:
        env = make_env(config, 1, auto_reset=False)
    except MissingDependencyError as error:
        pytest.skip(str(error))
    assert env.metadata["render_fps"] == pytest.approx(expected)
    env.close()


def test_the_rate_of_metaworld_is_what_it_says_of_itself():
    sawyer = pytest.importorskip("metaworld.sawyer_xyz_env", reason="Meta-World is not installed")
    assert sawyer.SawyerXYZEnv.metadata["render_fps"] == ENVS["metaworld"][1]


def test_the_rate_of_libero_is_that_at_which_its_demonstrations_were_collected():
    pytest.importorskip("robosuite", reason="robosuite is not installed")
    from rlinf.envs.libero.scene import CONTROL_FREQ_HZ

    assert CONTROL_FREQ_HZ == ENVS["libero"][1]
