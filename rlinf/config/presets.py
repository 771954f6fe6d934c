"""Values of ``algorithm.preset``, which make an algorithm equivalent to its version in a different library (docs/results.md)."""

from collections.abc import Collection

from omegaconf import DictConfig, OmegaConf

from rlinf.errors import ConfigError
from rlinf.files import Json

KEY = "algorithm.preset"

_SAC_AND_TD3 = {
    "algorithm.gamma": 0.99,
    "algorithm.tau": 0.005,
    "algorithm.batch_size": 256,
    "algorithm.replay_capacity": 1_000_000,
    "algorithm.learning_starts": 100,
    "algorithm.utd_ratio": 1.0,
    "algorithm.actor.hidden_size": 256,
    "algorithm.actor.layer_norm": False,
}

PRESETS: dict[str, dict[str, Json]] = {
    "sb3": {
        "ppo": {
            "algorithm.update_epochs": 10,
            "algorithm.gamma": 0.99,
            "algorithm.gae_lambda": 0.95,
            "algorithm.value_coef": 1.0,
            "algorithm.normalize_over": "minibatch",
            "algorithm.critic_warmup_steps": 0,
            "algorithm.old_logprobs": "rollout",
            "algorithm.entropy_level": "action",
            "rollout.continue_episodes": True,
            "trainer.minibatch_size": 64,
            "trainer.learning_rate": 3e-4,
            "trainer.value_learning_rate": 3e-4,
            "trainer.adam_beta2": 0.999,
            "trainer.adam_eps": 1e-5,
            "trainer.max_grad_norm": 0.5,
            "trainer.clip_together": True,
        },
        "sac": _SAC_AND_TD3
        | {
            "algorithm.learning_rate": 3e-4,
            "algorithm.initial_alpha": 1.0,
            "algorithm.entropy_in_target": True,
            "algorithm.actor_q": "min",
            "algorithm.critic_loss_weight": 0.5,
            "algorithm.actor.log_std_min": -20.0,
            "algorithm.actor.log_std_max": 2.0,
            "algorithm.actor.tanh_epsilon": 1e-6,
        },
        "td3": _SAC_AND_TD3
        | {
            "algorithm.learning_rate": 1e-3,
            "algorithm.actor_q": "first",
            "algorithm.target_policy": True,
            "algorithm.target_update_interval": 2,
        },
    }
}
"""Values by preset, algorithm and dotted key."""


def apply_preset(composed: DictConfig, explicit: Collection[str]) -> DictConfig:
    """Apply ``algorithm.preset`` except for ``explicit`` keys; raise ConfigError for an algorithm that it does not support."""
    preset, name = (OmegaConf.select(composed, key) for key in (KEY, "algorithm.name"))
    if preset not in PRESETS:  # none, or a value that the option rejects
        return composed
    if name not in PRESETS[preset]:
        known = ", ".join(PRESETS[preset])
        raise ConfigError(f"{KEY}={preset} with algorithm={name}; expected one of {known}. Set {KEY}=null")
    for key, value in PRESETS[preset][name].items():
        if key not in explicit:
            OmegaConf.update(composed, key, value)
    return composed
