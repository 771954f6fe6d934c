"""The replay buffer holds what the env and the frozen policy were told, in the order in which it happened."""

import numpy as np
import pytest
import torch
from offpolicy_runs import config_of

from rlinf.commands.train import build
from rlinf.envs.tabletop.env import TabletopVectorEnv
from rlinf.offpolicy.trainer import OffPolicyTrainer
from rlinf.offpolicy.transitions import TransitionCollector

NUM_ITERATIONS, NUM_CALLS, NUM_ENVS = 2, 10, 4


class Record:
    """Observations of each env in turn, and of each the action that followed and what came of it."""

    def __init__(self, env) -> None:
        self.slots: list[list[dict]] = [[] for _ in range(NUM_ENVS)]
        self.env, self.calls = env, 0
        self.reset, self.chunk_step = env.reset, env.chunk_step
        env.reset, env.chunk_step = self.on_reset, self.on_chunk_step

    def see(self, rows, states) -> None:
        for row, state in zip(rows, states, strict=True):
            self.slots[row].append({"state": state.copy(), "acted": False, "terminated": False})

    def on_reset(self, **kwargs):
        observation, info = self.reset(**kwargs)
        self.see(range(NUM_ENVS), observation.state)
        return observation, info

    def on_chunk_step(self, actions):
        chunk = self.chunk_step(actions)
        self.calls += 1
        for row in range(NUM_ENVS):
            self.slots[row][-1] |= {
                "acted": True, "action": actions[row].copy(), "rewards": chunk.rewards[row].copy(),
                "executed": chunk.executed[row].copy(), "terminated": bool(chunk.terminated[row]),
            }  # fmt: skip
        cut = [place for place, row in enumerate(chunk.final_env_ids) if chunk.truncated[row]]
        if cut:
            self.see(chunk.final_env_ids[cut], chunk.final_observation.state[cut])
        ended = set(chunk.final_env_ids.tolist()) if self.calls % NUM_CALLS == 0 else set()
        rows = [row for row in range(NUM_ENVS) if row not in ended]
        self.see(rows, chunk.observation.state[rows])
        return chunk


@pytest.fixture
def episodes_of_both_ends(monkeypatch):
    """Let a tenth of the env steps succeed, and the env cut a tenth of them: episodes terminate, or are cut by env or limit."""
    random, step = np.random.default_rng(0), TabletopVectorEnv._step_envs

    def some_end(self, ids, actions):
        draws = random.random(len(ids))
        return step(self, ids, actions)._replace(success=draws < 0.1, truncated=draws > 0.9)

    monkeypatch.setattr(TabletopVectorEnv, "_step_envs", some_end)


def played(folder, *overrides):
    """Return the trainer of a run of two iterations, and the record of its env."""
    run = build(config_of(folder, f"trainer.max_steps={NUM_ITERATIONS}", *overrides))
    run.loop.evaluate_once = lambda tag: None
    record = Record(run.rl.env)
    run.execute()
    return run.rl, record


def differences(trainer: OffPolicyTrainer, record: Record) -> set[str]:
    """Return which tensors of the buffer are not as the record says."""
    replay, policy, found = trainer.replay, trainer.policy, set()
    if replay.counts.tolist() != [len(slots) for slots in record.slots]:
        return {"counts"}
    for env, slots in enumerate(record.slots):
        for slot, told in enumerate(slots):
            inputs = {"state": torch.from_numpy(told["state"])[None]}
            said = policy.query_base(inputs, torch.empty(1, policy.num_base_uniforms))
            pairs = {
                "features": (replay.features[slot, env], said.features[0]),
                "base": (replay.base[slot, env], policy.normalize(said.chunks)[0]),
                "has_action": (replay.has_action[slot, env], torch.tensor(told["acted"])),
                "terminated": (replay.terminated[slot, env], torch.tensor(told["terminated"])),
            }
            if told["acted"]:
                names = ("rewards", "executed")
                pairs |= {name: (getattr(replay, name)[slot, env], torch.from_numpy(told[name])) for name in names}
                pairs["actions"] = (replay.actions[slot, env], torch.from_numpy(told["action"]).flatten())
            found |= {
                name
                for name, (one, other) in pairs.items()
                if not torch.allclose(one.float(), other.float(), atol=1e-5)
            }
    return found


@pytest.mark.parametrize("overrides", [[], ["algorithm.overlap=true"]])
def test_the_buffer_holds_what_env_and_policy_were_told(tmp_path, episodes_of_both_ends, overrides):
    trainer, record = played(tmp_path, *overrides)
    assert (trainer.env.action_low == -1).all() and (
        trainer.env.action_high == 1
    ).all()  # so actions are what is stored
    assert differences(trainer, record) == set()
    ends = [slot for slots in record.slots for slot in slots[:-1]]
    assert sum(slot["terminated"] for slot in ends) >= 2 and sum(not slot["acted"] for slot in ends) >= 2
    # What is drawn says the same: only an episode that terminated has no value behind it.
    known = trainer.replay.transitions()
    batch = trainer.replay.batch(known, gamma=0.9)
    told = [record.slots[int(number) % NUM_ENVS][int(number) // NUM_ENVS] for number in known]
    assert [bool(discount == 0) for discount in batch.discounts] == [each["terminated"] for each in told]


def test_a_control_that_stores_time_limits_as_ends_is_noticed(tmp_path, episodes_of_both_ends, monkeypatch):
    store = TransitionCollector.store

    def with_limits_as_ends(self, actions, outcome):
        outcome.terminated[outcome.ended] = True
        store(self, actions, outcome)

    monkeypatch.setattr(TransitionCollector, "store", with_limits_as_ends)
    assert differences(*played(tmp_path)) == {"terminated"}
