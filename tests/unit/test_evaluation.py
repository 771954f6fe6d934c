"""Evaluation: intervals by hand, and results that depend on the policy and the list of episodes only."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from thread_ranks import on_threads

from rlinf.envs.base import VectorEnv
from rlinf.errors import CheckpointError, ConfigError
from rlinf.evaluation.evaluator import EvaluationPlan, RankGroup, evaluate_policy
from rlinf.evaluation.intervals import wilson_interval
from rlinf.evaluation.result import EvaluationResult
from rlinf.models.embodiment.base import ActionModel
from rlinf.models.sampling import sample_tokens
from rlinf.types import ActionPrediction, ChunkStep, EpisodeResult, EpisodeSpec, Observation

TASKS = ("reach the red block", "push the blue block")


class NumberLineEnv:
    """Rows stand on a number line and must reach +3 within 12 steps; start and task come from the spec."""

    max_episode_steps = 12
    num_restarts = 0
    config = None
    task_names = TASKS
    stream_names = VectorEnv.stream_names

    def twin_of(self, config, task):
        return None

    def caveats(self, config):
        return []

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.num_episodes = 0

    def reports_success(self, config):
        return True

    def horizon_of(self, config, task):
        return self.max_episode_steps

    def reset(self, options):
        self.specs = options["episodes"]
        assert len(self.specs) == self.num_envs
        self.num_episodes += sum(spec is not None for spec in self.specs)
        self.position = np.array([0 if spec is None else self._start(spec) for spec in self.specs], np.float32)
        self.steps = np.zeros(self.num_envs, int)
        self.returns = np.zeros(self.num_envs)
        self.finished = np.array([spec is None for spec in self.specs])
        return self._observe(), {}

    def _start(self, spec):
        return np.random.default_rng([spec.task_id, spec.init_state_id, spec.seed]).uniform(-4, 1)

    def _observe(self):
        tasks = ["" if spec is None else self.task_names[spec.task_id] for spec in self.specs]
        state = np.stack([self.position, self.steps.astype(np.float32)], 1)
        return Observation({}, state.astype(np.float32), tasks)

    def chunk_step(self, actions):
        num_rows, chunk_len = actions.shape[:2]
        executed = np.zeros((num_rows, chunk_len), bool)
        ended = np.zeros(num_rows, bool)
        for c in range(chunk_len):
            alive = ~self.finished
            executed[:, c] = alive
            self.position[alive] += actions[alive, c, 0]
            self.steps[alive] += 1
            self.returns[alive] -= 0.1
            done = alive & ((self.position >= 3) | (self.steps >= self.max_episode_steps))
            self.finished |= done
            ended |= done
        success = self.position >= 3
        rows = np.flatnonzero(ended)
        tasks = [None if spec is None else self.task_names[spec.task_id] for spec in self.specs]
        episodes = [
            EpisodeResult(self.specs[i], tasks[i], bool(success[i]), self.returns[i], int(self.steps[i])) for i in rows
        ]
        observation = self._observe()
        final = observation.select(rows) if len(rows) else None
        rewards, ends = np.where(executed, -0.1, 0).astype(np.float32), (ended & success, ended & ~success)
        return ChunkStep(observation, rewards, executed, *ends, success, rows, final, episodes)

    def render_frames(self, ids, size):
        return np.stack([np.full((size, size, 3), 20 * self.steps[i], np.uint8) for i in ids])


class LosingEnv(NumberLineEnv):
    """Loses the simulators of the rows ``losses[k]`` during the ``k``-th chunk; ``forget`` says nothing of it."""

    def __init__(self, num_envs: int, losses: dict[int, list[int]], forget: bool = False) -> None:
        super().__init__(num_envs)
        self.losses, self.forget, self.num_chunks, self.num_lost = losses, forget, 0, 0

    def reset(self, options):
        result = super().reset(options)
        self.start = self.position.copy()
        return result

    def chunk_step(self, actions):
        lost = np.array([row for row in self.losses.get(self.num_chunks, ()) if not self.finished[row]], int)
        self.num_chunks += 1
        self.num_lost += len(lost)
        self.finished[lost] = True
        step = super().chunk_step(actions)
        self.finished[lost] = False
        self.position[lost], self.steps[lost], self.returns[lost] = self.start[lost], 0, 0
        return replace(step, observation=self._observe(), lost_env_ids=lost[: 0 if self.forget else None])


class BinPolicy(ActionModel, torch.nn.Module):
    """A fixed random network that chooses one of five step widths; counts the rows of its calls."""

    num_logprobs = 2

    rollout_logprobs = evaluate_actions = None  # an evaluation calls neither

    def __init__(self, chunk_len: int = 2) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Dropout(0.5), torch.nn.Linear(32, 10)
        )
        self.chunk_len = chunk_len
        self.row_counts: list[int] = []

    def preprocess(self, observation):
        assert not self.training and not torch.is_grad_enabled()
        return {"state": torch.from_numpy(observation.state)}

    def predict_action_batch(self, *, do_sample, temperature, uniforms, state):
        self.row_counts.append(len(state))
        logits = self.net(state).view(-1, 2, 5) * 4
        tokens = sample_tokens(logits, do_sample, temperature, uniforms)
        actions = (tokens.float() - 2).unsqueeze(-1)[:, : self.chunk_len]
        return ActionPrediction(actions, tokens, logits, torch.zeros(len(state)))


def specs_of(num_episodes: int) -> list[EpisodeSpec]:
    return [EpisodeSpec("line", i % 2, i // 2, 7) for i in range(num_episodes)]


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    # Worked out by hand from Wilson's formula with z = 1.96; 81/263 is the example of Newcombe (1998).
    [(81, 263, 0.2553, 0.3662), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (1, 2, 0.0945, 0.9055), (0, 0, 0.0, 1.0)],
)
def test_wilson_interval_equals_published_values(successes, trials, low, high):
    assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize("greedy", [True, False])
def test_results_do_not_depend_on_the_number_of_envs(greedy):
    specs = specs_of(45)
    policy = BinPolicy()
    results = [
        evaluate_policy(policy, NumberLineEnv(num_envs), specs, greedy=greedy, seed=3).results
        for num_envs in (1, 7, 45, 64)
    ]
    assert results[0] == results[1] == results[2] == results[3]
    assert [result.spec for result in results[0]] == specs
    assert 0 < sum(result.success for result in results[0]) < 45, "a control: the episodes must differ"


def test_no_episode_is_started_twice_to_fill_rows(tmp_path):
    env = NumberLineEnv(8)
    evaluate_policy(BinPolicy(), env, specs_of(11))
    assert env.num_episodes == 11
    result = evaluate_policy(BinPolicy(), env, specs_of(3), plan=EvaluationPlan(tmp_path, video_size=32))
    assert result.videos and env.num_episodes == 11 + 3 + len(result.videos)


def test_ranks_together_return_what_one_process_returns(tmp_path):
    """Three threads in the place of ranks, with different numbers of envs; the videos are shared out, too."""
    policy, envs = BinPolicy().eval(), [NumberLineEnv(num_envs) for num_envs in (2, 5, 16)]

    def evaluate(env, folder, ranks=RankGroup()):
        plan = EvaluationPlan(folder / "videos", num_videos_per_task=3, video_size=32, ranks=ranks)
        return evaluate_policy(policy, env, specs_of(31), greedy=False, seed=3, plan=plan)

    alone = evaluate(NumberLineEnv(8), tmp_path)
    results = on_threads(3, lambda ranks: evaluate(envs[ranks.rank], tmp_path / "ranks", ranks))
    assert len(alone.videos) == 6
    assert [env.num_episodes for env in envs] == [10 + 2, 10 + 2, 11 + 2], "31 episodes and 6 videos, dealt to 3 ranks"
    for result in results:
        assert replace(result, wall_s=0) == replace(alone, wall_s=0)
    for video in alone.videos:
        assert (tmp_path / video["path"]).read_bytes() == (tmp_path / "ranks" / video["path"]).read_bytes()


LOSSES = {0: [0], 1: [0, 3], 2: [3, 5], 3: [1, 2, 4], 7: [6], 9: [5]}


def test_lost_episodes_begin_again_and_each_counts_once():
    """In a sampled evaluation, whose random streams have to start again, too."""
    specs, policy, seen = specs_of(30), BinPolicy(), []
    expected = evaluate_policy(policy, NumberLineEnv(7), specs, greedy=False, seed=3).results
    env = LosingEnv(7, LOSSES)
    found = evaluate_policy(policy, env, specs, greedy=False, seed=3, on_result=seen.append).results
    assert found == expected and env.num_lost > 5
    assert sorted(result.spec for result in seen) == sorted(specs)
    silent = evaluate_policy(policy, LosingEnv(7, LOSSES, forget=True), specs, greedy=False, seed=3).results
    assert silent != expected, "a control: a stream that continues gives other actions"
    few = evaluate_policy(policy, NumberLineEnv(3), specs[:3]).results
    often = LosingEnv(3, {chunk: [1] for chunk in range(20)})
    assert evaluate_policy(policy, often, specs[:3]).results == few, "more losses than the horizon has steps"


def test_videos_of_lost_episodes_show_one_whole_episode(tmp_path, monkeypatch):
    recorded = []

    def record(path, frames, instruction, success):
        recorded.append((path.name, np.array(frames), success))
        return path

    monkeypatch.setattr("rlinf.evaluation.evaluator.write_video", record)
    for env in (NumberLineEnv(8), LosingEnv(8, {chunk: [chunk % 3] for chunk in range(4, 60, 3)})):
        evaluate_policy(BinPolicy(), env, specs_of(30), greedy=False, plan=EvaluationPlan(tmp_path, video_size=16))
    expected, found = recorded[: len(recorded) // 2], recorded[len(recorded) // 2 :]
    assert env.num_lost > 5 and len(expected) == 4
    for one, other in zip(expected, found, strict=True):
        assert (one[0], one[2]) == (other[0], other[2])
        np.testing.assert_array_equal(one[1], other[1])


def test_sampling_depends_on_seed_and_temperature_and_not_on_other_episodes_and_greedy_on_neither():
    specs, policy = specs_of(40), BinPolicy()

    def results(specs=specs, **options):
        return evaluate_policy(policy, NumberLineEnv(16), specs, **options).results

    sampled = results(greedy=False, seed=0)
    assert sampled == results(greedy=False, seed=0)
    assert sampled != results(greedy=False, seed=1)
    assert sampled != results(greedy=False, seed=0, temperature=0.1)
    assert results(seed=0) == results(seed=1)
    assert results(specs[5:6], greedy=False) == sampled[5:6]


def test_sampled_episode_does_not_depend_on_which_tasks_are_left(monkeypatch):
    """``env.tasks`` changes a task's number, and not its name."""
    policy, start = BinPolicy(), NumberLineEnv._start
    monkeypatch.setattr(NumberLineEnv, "_start", lambda env, spec: start(env, replace(spec, task_id=1)))
    every = evaluate_policy(policy, NumberLineEnv(20), specs_of(20), greedy=False).results
    second = [result for result in every if result.task == TASKS[1]]
    monkeypatch.setitem(globals(), "TASKS", TASKS[1:])
    monkeypatch.setattr(NumberLineEnv, "task_names", TASKS)
    renamed = [replace(one.spec, task_id=0) for one in second]
    alone = evaluate_policy(policy, NumberLineEnv(20), renamed, greedy=False).results
    assert [replace(one, spec=two.spec) for one, two in zip(alone, second, strict=True)] == second
    other = evaluate_policy(policy, NumberLineEnv(20), [one.spec for one in alone], greedy=False, seed=1).results
    assert other != alone, "a control"


def test_counts_and_metrics_are_those_of_the_results_and_the_mode_of_the_model_is_restored():
    policies = [BinPolicy().train(was_training) for was_training in (True, False)]
    result, _ = (evaluate_policy(policy, NumberLineEnv(10), specs_of(41)) for policy in policies)
    assert [policy.training for policy in policies] == [True, False]
    per_task = result.per_task
    assert {task: success.episodes for task, success in per_task.items()} == {TASKS[0]: 21, TASKS[1]: 20}
    assert sum(success.successes for success in per_task.values()) == result.successes
    assert result.interval == wilson_interval(result.successes, 41)
    metrics = result.metrics()
    assert metrics["eval/success_rate"] == result.successes / 41
    assert metrics[f"eval/success_rate/{TASKS[0]}"] == per_task[TASKS[0]].successes / 21
    assert f"{result.successes}/41" in result.table().splitlines()[-1]


def test_json_round_trip(tmp_path):
    result = evaluate_policy(BinPolicy(), NumberLineEnv(10), specs_of(11), greedy=False, seed=2)
    path = result.to_json(tmp_path / "eval" / "result.json")
    assert EvaluationResult.from_json(path) == result
    data = json.loads(path.read_text())
    assert data["episodes"] == 11 and data["successes"] == result.successes
    assert [p.name for p in path.parent.iterdir()] == ["result.json"], "no temporary file may stay"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="not an evaluation result"):
        EvaluationResult.from_json(path)


def test_videos_show_the_first_success_and_failure_of_each_task_of_any_name(tmp_path, monkeypatch):
    names = ("put the red block into " + 60 * "the drawer and ", "把红色方块放进抽屉")
    monkeypatch.setitem(globals(), "TASKS", names)
    monkeypatch.setattr(NumberLineEnv, "task_names", names)

    def evaluate(specs, **plan):
        return evaluate_policy(BinPolicy(), NumberLineEnv(8), specs, plan=EvaluationPlan(**plan))

    filmed = {"video_folder": tmp_path / "videos", "video_size": 64}
    result, plain = evaluate(specs_of(30), **filmed), evaluate(specs_of(30))
    assert plain.results == result.results and plain.videos == []
    expected = {(one.task, one.success) for one in result.results}
    assert {(video["task"], video["success"]) for video in result.videos} == expected and len(expected) == 4
    assert all((tmp_path / video["path"]).stat().st_size > 500 for video in result.videos)
    good = evaluate([one.spec for one in result.results if one.success], **filmed)
    assert good.videos and all(video["success"] for video in good.videos), "no failure, no video of one"


def test_replayed_episode_is_the_evaluated_one_and_has_a_frame_per_env_step(tmp_path, monkeypatch):
    recorded = []

    def record(path, frames, instruction, success):
        recorded.append((path.name, len(frames), instruction, success))
        return path

    monkeypatch.setattr("rlinf.evaluation.evaluator.write_video", record)
    result = evaluate_policy(BinPolicy(), NumberLineEnv(8), specs_of(30), greedy=False, plan=EvaluationPlan(tmp_path))
    for video, (_, num_frames, instruction, success) in zip(result.videos, recorded, strict=True):
        first = next(r for r in result.results if (r.task, r.success) == (video["task"], video["success"]))
        assert (num_frames, instruction, success) == (first.num_env_steps + 1, first.task, first.success)


class ForgetfulEnv(NumberLineEnv):
    """Starts an episode elsewhere when it is played for the second time."""

    def _start(self, spec):
        self.seen = {**getattr(self, "seen", {}), spec: getattr(self, "seen", {}).get(spec, -1) + 1}
        return super()._start(spec) - 2 * self.seen[spec]


@pytest.mark.parametrize(("env", "warned"), [(ForgetfulEnv, True), (NumberLineEnv, False)])
def test_replays_that_end_otherwise_than_counted_are_warned_of(tmp_path, env, warned):
    result = evaluate_policy(BinPolicy(), env(8), specs_of(30), plan=EvaluationPlan(tmp_path, video_size=32))
    found = [text for text in result.warnings if f"of {len(result.videos)} episodes ended differently" in text]
    assert result.warnings == found and bool(found) == warned
    assert result.results == evaluate_policy(BinPolicy(), NumberLineEnv(8), specs_of(30)).results, "counts stay"


@pytest.mark.parametrize(("num_episodes", "warned"), [(1, True), (2, False), (5, False)])
def test_tasks_without_an_episode_are_warned_of(num_episodes, warned):
    result = evaluate_policy(BinPolicy(), NumberLineEnv(2), specs_of(num_episodes))
    expected = "1 of 2 tasks have no episode in the list of 1 (evaluation.num_episodes), so the total excludes them"
    assert result.warnings == [expected] * warned


def test_endless_env_and_empty_list_are_errors():
    env = NumberLineEnv(4)
    env.chunk_step = lambda actions: ChunkStep(
        env._observe(), None, None, None, None, None, np.array([], int), None, []
    )
    with pytest.raises(ConfigError, match="3 episodes.*horizon of 12 env steps"):
        evaluate_policy(BinPolicy(), env, specs_of(3))
    with pytest.raises(ConfigError, match="empty"):
        evaluate_policy(BinPolicy(), NumberLineEnv(4), [])
