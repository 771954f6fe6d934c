"""The replay buffer next to a slow one: lists of episodes."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.errors import CheckpointError, ConfigError
from rlinf.offpolicy.replay import ReplayBuffer

CHUNK, GAMMA = 3, 0.9


def make(capacity: int = 12, num_envs: int = 2) -> ReplayBuffer:
    return ReplayBuffer(
        capacity, num_envs, feature_dim=1, num_candidates=1, output_dim=1, chunk_len=CHUNK, seed=0
    )  # fmt: skip


@dataclass
class Slow:
    """One env: a list of ``[features, action, rewards, executed, terminated]``, the action None where there is none."""

    num_slots: int
    slots: list[list] = field(default_factory=list)

    def observe(self, feature: float) -> None:
        self.slots = [*self.slots, [feature, None, [], 0, False]][-self.num_slots :]

    def act(self, action: float, rewards: list[float], executed: int, terminated: bool) -> None:
        self.slots[-1][1:] = [action, rewards, executed, terminated]

    def transitions(self, n_step: int) -> list[tuple]:
        """Return (feature, action, return, discount, next feature) of each, the last one 0 where nothing follows."""
        found = []
        for start, slot in enumerate(self.slots):
            if slot[1] is None or not (slot[4] or start + 1 < len(self.slots)):
                continue
            total, power, here, ended = 0.0, 0, start, False
            for _ in range(n_step):
                _, action, rewards, executed, terminated = self.slots[here]
                if action is None or not (terminated or here + 1 < len(self.slots)):
                    break  # the critic values this observation
                for reward in rewards[:executed]:
                    total += GAMMA**power * reward
                    power += 1
                if terminated:
                    ended = True
                    break
                here += 1
            after = 0.0 if ended else self.slots[here][0]
            found.append((slot[0], slot[1], total, 0.0 if ended else GAMMA**power, after))
        return found


events = st.lists(
    st.tuples(
        st.sampled_from(["continues", "terminated", "truncated", "lost"]), st.integers(1, CHUNK), st.integers(-3, 3)
    ),
    max_size=25,
)


def play(buffer: ReplayBuffer, slow: list[Slow], env: int, play_of: list) -> None:
    """Play the events of one env in both buffers."""
    index = torch.tensor([env])

    def observe() -> None:
        observe.count += 1.0
        buffer.observe(index, torch.tensor([[observe.count]]), torch.zeros(1, 1, 1))
        slow[env].observe(observe.count)

    observe.count = 100.0 * env
    for outcome, executed, reward in play_of:
        observe()
        if outcome == "lost":
            continue  # the next observation is that of the episode that started again
        mask = torch.arange(CHUNK) < executed
        rewards = (reward + torch.arange(CHUNK)) * mask
        done = torch.tensor([outcome == "terminated"])
        buffer.act(index, torch.tensor([[observe.count / 7]]), rewards[None].float(), mask[None], done)
        slow[env].act(observe.count / 7, rewards.tolist(), executed, bool(done))
        if outcome == "truncated":
            observe()  # the true last observation


@settings(max_examples=60, deadline=None)
@given(st.lists(events, min_size=2, max_size=2), st.integers(1, 4))
def test_transitions_are_those_of_a_list_of_episodes(plays, n_step):
    buffer, slow = make(), [Slow(6), Slow(6)]
    for env, each in enumerate(plays):
        play(buffer, slow, env, each)
    batch = buffer.batch(buffer.transitions(), GAMMA, n_step)
    after = torch.where(batch.discounts > 0, batch.next_features[:, 0], 0.0)
    columns = (batch.features[:, 0], batch.actions[:, 0], batch.returns, batch.discounts, after)
    found = sorted(zip(*(column.tolist() for column in columns), strict=True))
    wanted = sorted(each for env in slow for each in env.transitions(n_step))
    assert len(found) == len(wanted)
    assert all(one == pytest.approx(other, abs=1e-5) for one, other in zip(found, wanted, strict=True))


def test_a_chunk_that_the_end_cut_counts_its_executed_steps():
    buffer, env = make(), torch.tensor([0])
    buffer.observe(env, torch.tensor([[1.0]]), torch.zeros(1, 1, 1))
    executed = torch.tensor([[True, True, False]])
    buffer.act(env, torch.zeros(1, 1), torch.tensor([[1.0, 2.0, 0.0]]), executed, torch.tensor([False]))
    buffer.observe(env, torch.tensor([[5.0]]), torch.zeros(1, 1, 1))  # cut by the time limit
    buffer.observe(env, torch.tensor([[9.0]]), torch.zeros(1, 1, 1))  # the next episode
    batch = buffer.batch(buffer.transitions(), GAMMA)
    assert batch.returns.tolist() == pytest.approx([1 + 0.9 * 2])
    assert batch.discounts.tolist() == pytest.approx([0.9**2])
    assert batch.next_features.tolist() == [[5.0]]  # the last observation, not that of the next episode


def test_drawing_is_uniform_over_transitions_and_repeats_with_the_generator():
    buffer, slow = make(), [Slow(6), Slow(6)]
    play(buffer, slow, 0, [("continues", 1, 1)] * 5)
    play(buffer, slow, 1, [("terminated", 1, 1), ("lost", 1, 1), ("truncated", 1, 1)])
    state = buffer.generator.get_state()
    drawn = buffer.sample(6000, GAMMA).features.flatten()
    values, counts = drawn.unique(return_counts=True)
    assert values.tolist() == sorted(each[0] for env in slow for each in env.transitions(1))
    expected = 6000 / len(values)
    assert (counts - expected).abs().max() < 5 * expected**0.5
    buffer.generator.set_state(state)
    assert torch.equal(buffer.sample(6000, GAMMA).features.flatten(), drawn)
    assert not torch.equal(buffer.sample(6000, GAMMA).features.flatten(), drawn)


@pytest.mark.parametrize("num_events", [3, 20])
def test_a_restored_buffer_draws_what_the_other_would_have_drawn(num_events):
    buffer, slow = make(), [Slow(6), Slow(6)]
    for env in range(2):
        play(buffer, slow, env, [("continues", 2, env)] * num_events)
    buffer.sample(5, GAMMA)
    state = {name: tensor.clone() for name, tensor in buffer.state_dict().items()}
    assert len(state["features"]) == min(num_events, 6)  # what was not written is not saved
    other = make()
    other.load_state_dict(state)
    one, same = buffer.sample(50, GAMMA, 2), other.sample(50, GAMMA, 2)
    assert all(torch.equal(a, b) for a, b in zip(vars(one).values(), vars(same).values(), strict=True))


def test_a_buffer_of_another_size_is_refused():
    buffer = make()
    buffer.observe(torch.arange(2), torch.zeros(2, 1), torch.zeros(2, 1, 1))
    with pytest.raises(CheckpointError, match="Set algorithm.replay_capacity=12 rollout.num_envs=2"):
        make(capacity=20).load_state_dict(buffer.state_dict())
    wide = ReplayBuffer(12, 2, feature_dim=4, num_candidates=1, output_dim=1, chunk_len=CHUNK, seed=0)
    with pytest.raises(CheckpointError, match=r"'features' has the shape \[1\] per observation .*, but \[4\] here"):
        wide.load_state_dict(buffer.state_dict())


def test_what_cannot_be_drawn_from_is_refused():
    with pytest.raises(ConfigError, match="replay_capacity=3 for rollout.num_envs=2"):
        make(capacity=3)
    with pytest.raises(ConfigError, match="no transitions yet"):
        make().sample(1, GAMMA)
