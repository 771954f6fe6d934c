"""Every number of a rollout belongs to its step: an env and a policy whose numbers say which step they are of."""

import contextlib
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from rollout_batches import select_envs

from rlinf.envs.base import VectorEnv
from rlinf.envs.config import EnvConfig
from rlinf.envs.episodes import EpisodeSampler
from rlinf.envs.steps import SimulatorStep
from rlinf.errors import SimulatorError
from rlinf.models.embodiment.base import ActionModel
from rlinf.rollout.collector import ATTEMPT_STRIDE, RolloutCollector
from rlinf.seeding import derive_seed
from rlinf.types import ActionPrediction, Observation, RolloutBatch

NUM_ENVS, NUM_CHUNKS, CHUNK, HORIZON, GROUP = 6, 9, 2, 7, 2
SUCCESS_AT = {0: 5, 1: HORIZON + 1}
"""Task to the step that succeeds: episodes of task 0 terminate within a chunk, those of task 1 are truncated."""


def step_reward(init_state_id: int, step: int, action: float) -> float:
    """The reward of the env step with this number (from 1) of an episode."""
    return 100 * (init_state_id % 7) + step + 0.25 * action


def value_at(init_state_id: int, step: int) -> float:
    """What the policy believes of the state behind this many steps."""
    return 1000 * (init_state_id % 7) + step + 0.5


class ClockEnv(VectorEnv):
    """The state is (which episode, how many steps); so are the instruction and the image."""

    suite = "clock"
    state_dim = 2
    shows_state = True

    def __init__(self, config, num_envs, auto_reset):
        super().__init__(config, num_envs, auto_reset, action_low=-np.ones(1), action_high=np.ones(1))
        self.numbers = np.zeros(num_envs, dtype=np.int64)
        self.specs = [None] * num_envs

    @classmethod
    def all_task_names(cls, config):
        return ["terminates", "is truncated"]

    def _reset_env(self, index, spec):
        self.numbers[index], self.specs[index] = 0, spec

    def _step_envs(self, ids, actions):
        self.numbers[ids] += 1
        rewards = [
            step_reward(self.specs[row].init_state_id, self.numbers[row], float(action))
            for row, (action,) in zip(ids, actions, strict=True)
        ]
        done = [self.numbers[row] == SUCCESS_AT[self.specs[row].task_id] for row in ids]
        return SimulatorStep(np.array(rewards, dtype=np.float32), np.array(done))

    def _observe(self, ids):
        states = [(self.specs[row].init_state_id % 7, self.numbers[row]) for row in ids]
        sentences = [f"{self.specs[row].init_state_id} at {self.numbers[row]}" for row in ids]
        images = {"front": np.array(states, dtype=np.uint8).reshape(-1, 1, 2, 1).repeat(3, -1)}
        return Observation(images, np.array(states, dtype=np.float32) if self.shows_state else None, sentences)


class ClockPolicy(ActionModel, torch.nn.Module):
    """Acts as the given uniforms say; its log-probs and values say of which state they are."""

    evaluate_actions = None  # a rollout does not call it
    num_logprobs = num_uniforms = CHUNK
    predicts_values = True

    def preprocess(self, observation):
        return {"state": torch.from_numpy(observation.images["front"][:, 0, :, 0].astype(np.float32))}

    def predict_values(self, state):
        return 1000 * state[:, 0] + state[:, 1] + 0.5

    def predict_action_batch(self, *, do_sample, temperature, uniforms, state):
        logits = torch.stack([state[:, 0], state[:, 1]], dim=-1)
        return ActionPrediction(uniforms[..., None], uniforms, logits, self.predict_values(state))

    def rollout_logprobs(self, prediction, temperature):
        return prediction.sequences + 10 * prediction.logits[:, 1:] + 100 * prediction.logits[:, :1]


@contextlib.contextmanager
def collecting(auto_reset: bool, num_worker_threads=2, make=ClockEnv, horizon=HORIZON, group_size=GROUP, **kwargs):
    """Make a collector of clocks, and the sampler of its episodes; close it in the end."""
    config = EnvConfig(name="clock", max_episode_steps=horizon, success_bonus=0.0, cameras=[])
    specs, num_groups = ClockEnv(config, 1, auto_reset=False).episode_specs("train"), NUM_ENVS // group_size
    sampler = EpisodeSampler(specs, 2, num_groups=num_groups, group_size=group_size, seed=5)
    kwargs = {"num_envs": NUM_ENVS, "num_chunks": NUM_CHUNKS, "temperature": 1.0} | kwargs
    kwargs |= {} if num_worker_threads is None else {"num_worker_threads": num_worker_threads}
    collector = RolloutCollector(lambda count: make(config, count, auto_reset), sampler, **kwargs)
    try:
        yield collector, sampler
    finally:
        collector.close()


def play(auto_reset: bool, num_worker_threads: int = 2, attempt: int = 0, env_groups=None, needs_values=True, **kwargs):
    policy = kwargs.pop("policy", ClockPolicy)()
    with collecting(auto_reset, num_worker_threads, **kwargs) as (collector, sampler):
        return collector.collect(policy, 3, 42, needs_values, attempt, env_groups), sampler


def expected_rows(batch, sampler, auto_reset: bool, attempt: int):
    """What each row must hold, walking each env alone from its episodes; only the sampled actions are taken as given."""
    for b in range(NUM_ENVS):
        position, step, over = 0, 0, False
        for t in range(NUM_CHUNKS):
            spec = sampler.spec(3, b, position, attempt)
            which, start = spec.init_state_id, step
            rewards, executed = [0.0] * CHUNK, [False] * CHUNK
            terminated = truncated = False
            for c in range(CHUNK):
                if over or terminated or truncated:
                    continue
                step += 1
                rewards[c], executed[c] = step_reward(which, step, float(batch.action_tokens[t, b, c])), True
                terminated = step == SUCCESS_AT[spec.task_id]
                truncated = not terminated and step == HORIZON
            ended = terminated or truncated
            follows = truncated or (t == NUM_CHUNKS - 1 and not ended and not over)
            yield t, b, {
                "valid": not over, "spec": spec, "start": start, "rewards": rewards, "executed": executed,
                "terminated": terminated, "truncated": truncated,
                "bootstrap": value_at(which, step) if follows else 0.0, "position": position,
            }  # fmt: skip
            if ended and auto_reset:
                position, step = position + 1, 0
            elif ended:
                over = True


@pytest.mark.parametrize("num_worker_threads", [1, 2, 4])
@pytest.mark.parametrize("auto_reset", [True, False])
@pytest.mark.parametrize("attempt", [0, 2])
def test_every_number_of_a_rollout_belongs_to_its_step(auto_reset, num_worker_threads, attempt):
    batch, sampler = play(auto_reset, num_worker_threads, attempt)
    states = torch.from_numpy(batch.observation.state).unflatten(0, (NUM_CHUNKS, NUM_ENVS))
    images = torch.from_numpy(batch.observation.images["front"]).unflatten(0, (NUM_CHUNKS, NUM_ENVS))
    assert images.shape == (NUM_CHUNKS, NUM_ENVS, 1, 2, 3) and images.dtype == torch.uint8
    ends = {"terminated": 0, "truncated": 0}
    for t, b, row in expected_rows(batch, sampler, auto_reset, attempt):
        where = (t, b, row)
        assert bool(batch.loss_mask[t, b]) == row["valid"], where
        assert batch.action_mask[t, b].tolist() == row["executed"], where
        assert batch.action_rewards[t, b].tolist() == pytest.approx(row["rewards"], abs=1e-4), where
        assert bool(batch.terminated[t, b]) == row["terminated"], where
        assert bool(batch.truncated[t, b]) == row["truncated"], where
        assert float(batch.bootstrap_values[t, b]) == pytest.approx(row["bootstrap"]), where
        assert int(batch.policy_version[t, b]) == 42
        assert int(batch.group_ids[t, b]) == b // GROUP + attempt * ATTEMPT_STRIDE
        if not row["valid"]:
            for numbers in (batch.action_tokens, batch.rollout_logprobs, batch.rollout_values):
                assert not numbers[t, b].any(), where
            continue
        which = row["spec"].init_state_id
        assert states[t, b].tolist() == [which % 7, row["start"]], where
        assert images[t, b, 0, :, 2].tolist() == [which % 7, row["start"]], where
        assert batch.observation.instruction[t * NUM_ENVS + b] == f"{which} at {row['start']}", where
        seen = batch.action_tokens[t, b] + 10 * row["start"] + 100 * (which % 7)
        torch.testing.assert_close(batch.rollout_logprobs[t, b], seen)
        assert float(batch.rollout_values[t, b]) == pytest.approx(value_at(which, row["start"])), where
        number = row["position"] * NUM_ENVS + b + attempt * ATTEMPT_STRIDE
        assert int(batch.episode_ids[t, b]) == number and batch.specs[number] == row["spec"]
        ends["terminated"] += row["terminated"]
        ends["truncated"] += row["truncated"]
    assert min(ends.values()) >= 2, "the test needs both kinds of end"
    # Actions are as random as they should be: no row repeats another.
    tokens = batch.action_tokens[batch.loss_mask].flatten()
    assert len(tokens.unique()) == len(tokens) and 0 < float(tokens.min()) and float(tokens.max()) < 1


def test_results_are_those_of_the_first_episode_of_each_env():
    batch, sampler = play(auto_reset=True)
    expected = []
    for b in range(NUM_ENVS):
        spec = sampler.spec(3, b, 0)
        rewards = batch.action_rewards[:, b][batch.episode_ids[:, b] == b]
        length = SUCCESS_AT[0] if spec.task_id == 0 else HORIZON
        expected.append((spec, spec.task_id == 0, length, pytest.approx(float(rewards.sum()), rel=1e-5)))
    results = [(one.spec, one.success, one.num_env_steps, one.episode_return) for _, one in batch.episodes]
    assert len(results) == NUM_ENVS and all(any(one == other for one in expected) for other in results)


@pytest.mark.parametrize("auto_reset", [True, False])
def test_behind_the_last_call_stands_the_value_of_what_follows_unless_the_episode_is_over(auto_reset):
    """Rollouts that end with a termination, with a truncation, one call later, and in between."""
    seen = {"terminated": 0, "truncated": 0, "running": 0, "over": 0}
    for num_chunks in (2, 3, 4, 5):
        batch, _ = play(auto_reset, num_chunks=num_chunks)
        states = batch.observation.state.reshape(num_chunks, NUM_ENVS, 2)[-1]
        for b, (which, start) in enumerate(states):
            expected = value_at(which, start + int(batch.action_mask[-1, b].sum()))
            kinds = {"over": not batch.loss_mask[-1, b], "terminated": batch.terminated[-1, b],
                     "truncated": batch.truncated[-1, b], "running": True}  # fmt: skip
            kind = next(name for name, holds in kinds.items() if holds)
            seen[kind] += 1
            value = float(batch.bootstrap_values[-1, b])
            assert value == (0.0 if kind in ("over", "terminated") else expected), (num_chunks, b, kind)
    assert seen.pop("over") >= (0 if auto_reset else 2) and min(seen.values()) >= 2


def assert_equal_rollouts(one, other):
    assert one.tensors().keys() == other.tensors().keys()
    for name, tensor in one.tensors().items():
        assert torch.equal(other.tensors()[name], tensor), name
    valid = one.loss_mask.flatten().numpy()  # elsewhere it depends on the other rows of a thread
    assert len(other.observation) == len(one.observation) == len(valid)
    np.testing.assert_array_equal(other.observation.state[valid], one.observation.state[valid])
    np.testing.assert_array_equal(other.observation.images["front"][valid], one.observation.images["front"][valid])
    pairs = zip(one.observation.instruction, other.observation.instruction, valid, strict=True)
    assert all(mine == theirs for mine, theirs, counts in pairs if counts)


@pytest.mark.parametrize("auto_reset", [True, False])
def test_rollouts_of_ranks_and_of_chosen_envs_are_columns_of_the_whole(auto_reset):
    whole, _ = play(auto_reset)
    ranks = [play(auto_reset, rank=rank, num_ranks=3)[0] for rank in range(3)]
    joined = RolloutBatch.concatenate(ranks)
    assert_equal_rollouts(whole, joined)
    assert joined.specs == whole.specs and joined.episodes == [each for part in ranks for each in part.episodes]
    parts = [select_envs(whole, torch.tensor(columns)) for columns in ([0], [1, 2, 3], [4, 5])]
    assert_equal_rollouts(whole, RolloutBatch.concatenate(parts))
    assert_equal_rollouts(whole, RolloutBatch.concatenate([whole]))
    for num_worker_threads in (1, 2):
        part, _ = play(False, num_worker_threads, env_groups=[0, 2])
        assert_equal_rollouts(select_envs(play(False)[0], torch.tensor([0, 1, 4, 5])), part)
        assert sorted(env for env, _ in part.episodes) == [0, 1, 4, 5] == sorted(part.specs)


def test_a_worker_thread_without_an_env_plays_nothing():
    for num_ranks, env_group in ((1, 1), (3, 2)):
        rank = env_group if num_ranks > 1 else 0
        one, _ = play(False, num_worker_threads=2, group_size=1, num_ranks=num_ranks, rank=rank, env_groups=[5])
        assert one.episode_ids[0].tolist() == [5] and [env for env, _ in one.episodes] == [5]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_rank_draws_the_random_numbers_of_its_own_blocks_only(monkeypatch, num_ranks):
    drawn, rand = [], torch.rand
    whole, _ = play(False)

    def counted(*shape, generator):
        drawn.append((shape, generator.initial_seed()))
        return rand(*shape, generator=generator)

    monkeypatch.setattr(torch, "rand", counted)
    parts = [play(False, num_worker_threads=1, rank=rank, num_ranks=num_ranks)[0] for rank in range(num_ranks)]
    assert_equal_rollouts(whole, RolloutBatch.concatenate(parts))
    assert [shape for shape, _ in drawn] == [(NUM_CHUNKS, GROUP, CHUNK)] * (NUM_ENVS // GROUP)
    assert [seed for _, seed in drawn] == [
        derive_seed(5, "actions", 3, 0, env_group) for env_group in range(NUM_ENVS // GROUP)
    ]


class LosingClock(ClockEnv):
    """Loses the simulator of env 1 in its second call, in its first episode; that of env 4 in the first call of its second one."""

    losses = ()

    def reset(self, **kwargs):
        self.num_calls = 0
        return super().reset(**kwargs)

    def _step_chunk(self, ids, actions, steps_left):
        chunk = super()._step_chunk(ids, actions, steps_left)
        for row, call in self.losses:
            if call == self.num_calls:
                self._reset_env(row, self._specs[row])
                self._lost[row] = True
                for array in chunk:
                    array[ids == row] = 0
        self.num_calls += 1
        return chunk


def calls_of_first_episode(sampler, env):
    """An episode of task 0 ends in its third call, one of task 1 in its fourth."""
    return 3 if sampler.spec(3, env, 0).task_id == 0 else 4


def test_an_episode_whose_simulator_is_lost_is_void_and_begins_again():
    plain, sampler = play(True, num_worker_threads=1)
    second = calls_of_first_episode(sampler, 4)
    env = type("Losing", (LosingClock,), {"losses": ((1, 1), (4, second))})
    batch, _ = play(True, num_worker_threads=1, make=env)
    valid = torch.ones(NUM_CHUNKS, NUM_ENVS, dtype=torch.bool)
    valid[:2, 1] = valid[second, 4] = False
    assert torch.equal(batch.loss_mask, valid) and plain.loss_mask.all()
    # Env 1: two void calls, then its first episode again; env 4: its first episode, a void call, its second one again.
    first = calls_of_first_episode(sampler, 1)
    assert batch.episode_ids[:, 1].tolist()[: 3 + first] == [1] * 2 + [1 + NUM_ENVS] * first + [1 + 2 * NUM_ENVS]
    assert batch.episode_ids[:, 4].tolist()[: second + 2] == [4] * second + [4 + NUM_ENVS, 4 + 2 * NUM_ENVS]
    assert batch.specs[1] == batch.specs[1 + NUM_ENVS] == sampler.spec(3, 1, 0)
    assert batch.specs[4 + NUM_ENVS] == batch.specs[4 + 2 * NUM_ENVS] == sampler.spec(3, 4, 1)
    states = torch.from_numpy(batch.observation.state).unflatten(0, (NUM_CHUNKS, NUM_ENVS))
    assert torch.equal(states[2, 1], states[0, 1]) and torch.equal(states[second + 1, 4], states[second, 4])
    others = torch.tensor([0, 2, 3, 5])
    for name, tensor in select_envs(plain, others).tensors().items():
        assert torch.equal(select_envs(batch, others).tensors()[name], tensor), name
    assert batch.episodes == [], "a first episode was lost: results of the others would favour quick successes"
    later, _ = play(True, num_worker_threads=1, make=type("Later", (LosingClock,), {"losses": ((4, second),)}))
    assert later.episodes == plain.episodes and len(later.episodes) == NUM_ENVS
    at_once, _ = play(False, num_worker_threads=1, make=type("AtOnce", (LosingClock,), {"losses": ((2, 0),)}))
    assert at_once.loss_mask[:, 2].tolist()[:4] == [False, True, True, True] and at_once.loss_mask[0, [0, 1, 3]].all()


def test_episodes_that_all_end_in_the_first_call_leave_zeros_behind_them():
    batch, _ = play(False, horizon=CHUNK)
    assert batch.loss_mask[0].all() and not batch.loss_mask[1:].any() and batch.truncated[0].all()
    seen = (batch.observation.state, batch.observation.images["front"])
    seen = [torch.from_numpy(array).unflatten(0, (NUM_CHUNKS, NUM_ENVS)) for array in seen]
    for numbers in (batch.action_tokens, batch.rollout_logprobs, batch.rollout_values, *seen):
        assert len(numbers) == NUM_CHUNKS and numbers[0].any() and not numbers[1:].any()
    assert batch.bootstrap_values[0].all() and not batch.bootstrap_values[1:].any()


def test_values_and_states_are_recorded_where_they_are_asked_for_and_exist(monkeypatch):
    without, _ = play(True, needs_values=False)
    assert without.rollout_values is None and not without.bootstrap_values.any()
    blind, _ = play(True, policy=type("Blind", (ClockPolicy,), {"predicts_values": False}))
    assert blind.rollout_values is None
    whole = play(True)[0]
    assert whole.rollout_values.shape == (NUM_CHUNKS, NUM_ENVS)
    stateless, _ = play(True, make=type("Stateless", (ClockEnv,), {"shows_state": False, "state_dim": 0}))
    assert stateless.observation.state is None and torch.equal(stateless.rollout_logprobs, whole.rollout_logprobs)
    np.testing.assert_array_equal(stateless.observation.images["front"], whole.observation.images["front"])
    monkeypatch.setattr(torch, "rand", lambda *shape, generator: torch.zeros(shape))
    tokens = play(True)[0].action_tokens
    assert 0 < tokens.min() and tokens.max() < 1e-30, "of a generator's 0, no quantile would be finite"


@pytest.mark.parametrize("offload", [{}, {"offload_envs": True}])
def test_envs_are_made_for_two_threads_and_offloaded_only_where_asked(offload):
    offloaded, sizes = [], []

    class Offloading(ClockEnv):
        def __init__(self, config, num_envs, auto_reset):
            super().__init__(config, num_envs, auto_reset)
            sizes.append(num_envs)

        def offload(self):
            offloaded.append(True)

    batch, _ = play(True, None, make=Offloading, group_size=1, **offload)
    assert sizes == [3, 3] and len(offloaded) == (2 if offload else 0)
    assert batch.group_ids[0].tolist() == list(range(NUM_ENVS)), "the first attempt, unless told otherwise"


@pytest.mark.parametrize(("threads", "on_gpu", "own_streams"), [(1, False, False), (2, False, True), (2, True, False)])
def test_threads_beside_others_have_a_stream_unless_the_simulation_is_on_the_gpu(threads, on_gpu, own_streams):
    make = type("Env", (ClockEnv,), {"on_gpu": on_gpu})
    with collecting(True, threads, make=make) as (collector, _):
        assert [thread.stream._own_stream for thread in collector.worker_threads] == [own_streams] * threads


class WatchedPolicy(ClockPolicy):
    """Notes how it is called."""

    def __init__(self):
        super().__init__()
        self.calls = set()

    def predict_action_batch(self, *, do_sample, temperature, **inputs):
        self.calls.add((do_sample, temperature, torch.get_num_threads(), len(contexts)))
        return super().predict_action_batch(do_sample=do_sample, temperature=temperature, **inputs)


contexts: list[int] = []


@contextlib.contextmanager
def counted_context():
    contexts.append(threading.get_ident())
    try:
        yield
    finally:
        contexts.pop()


@pytest.mark.parametrize(("num_worker_threads", "torch_threads"), [(1, 4), (3, 1), (6, 1)])
def test_each_thread_plays_in_its_context_with_its_share_of_the_threads(num_worker_threads, torch_threads):
    policy, before = WatchedPolicy(), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with collecting(True, num_worker_threads, temperature=1.5, autocast=counted_context) as (collector, _):
            collector.collect(policy, 3, 42, needs_values=False)
        with ThreadPoolExecutor(1) as fresh:  # torch's own threads start like this one
            assert fresh.submit(torch.get_num_threads).result() == torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert {call[:3] for call in policy.calls} == {(True, 1.5, torch_threads)}
    assert not contexts and all(call[3] > 0 for call in policy.calls)


def test_a_failure_in_one_thread_ends_the_other_with_its_call():
    """The second thread stands in its third call until the failure of the first one has arrived here."""
    envs, go_on, stands = [], threading.Event(), threading.Event()

    class Failing(ClockEnv):
        num_calls = 0

        def chunk_step(self, actions):
            self.num_calls += 1
            if self is envs[0] and self.num_calls == 2:
                stands.wait(30)
                raise SimulatorError("the second call")
            if self is envs[1] and self.num_calls == 3:
                stands.set()
                go_on.wait(30)
            return super().chunk_step(actions)

    def make(*arguments):
        envs.append(Failing(*arguments))
        return envs[-1]

    with collecting(True, make=make) as (collector, _):
        try:
            with pytest.raises(SimulatorError, match="the second call"):
                collector.collect(ClockPolicy(), 3, 42, needs_values=False)
        finally:
            go_on.set()
        envs[0].num_calls = 2
        again = collector.collect(ClockPolicy(), 3, 42, needs_values=True)
    assert envs[1].num_calls == 3 + NUM_CHUNKS
    assert_equal_rollouts(again, play(True)[0])


def test_closing_ends_the_calls_that_are_under_way_and_then_closes_the_envs():
    """The first thread stands in its second call until the env of the second thread is closed."""
    envs, stands, second_is_closed, ended = [], threading.Event(), threading.Event(), []

    class Standing(ClockEnv):
        num_calls, steps_now, closed_in_a_call = 0, False, False

        def chunk_step(self, actions):
            self.num_calls += 1
            self.steps_now = True
            if self is envs[0] and self.num_calls == 2:
                stands.set()
                second_is_closed.wait(30)
            step = super().chunk_step(actions)
            self.steps_now = False
            return step

        def close(self):
            self.closed_in_a_call = self.steps_now
            super().close()
            if self is envs[1]:
                second_is_closed.set()

    def make(*arguments):
        envs.append(Standing(*arguments))
        return envs[-1]

    def collect(collector):
        with pytest.raises(CancelledError):
            collector.collect(ClockPolicy(), 3, 42, needs_values=False)
        ended.append(True)

    with collecting(True, make=make) as (collector, _):
        thread = threading.Thread(target=collect, args=(collector,))
        thread.start()
        assert stands.wait(30)
    thread.join(30)
    assert ended and envs[0].num_calls == 2 and not any(env.closed_in_a_call for env in envs)


def test_a_closed_collector_plays_no_more_and_says_what_went_wrong_in_closing():
    closed = []

    class Closing(ClockEnv):
        def close(self):
            closed.append(True)
            super().close()
            if len(closed) == 3:
                raise SimulatorError("cannot close")

    with collecting(True, make=Closing) as (collector, _):
        pass
    assert len(closed) == 2
    with pytest.raises(RuntimeError, match="after shutdown"):
        collector.collect(ClockPolicy(), 3, 42, needs_values=False)
    with pytest.raises(SimulatorError, match="cannot close"), collecting(True, make=Closing):
        pass
