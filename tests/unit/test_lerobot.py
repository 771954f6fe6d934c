"""Policies of lerobot act here as their own classes do; in this process, or in an interpreter of their own."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lerobot_folders import ACTIONS, SIZE, STATE, make, patch_pi0, theirs, theirs_of
from lerobot_policies import HERE, MARKS, PYTHON, Folders, observation, section
from safetensors.torch import load_file, save_file

import rlinf
from rlinf.cli import main
from rlinf.errors import CheckpointError, ConfigError, MissingDependencyError, PolicyServerError
from rlinf.models import build_policy
from rlinf.models.embodiment.actor_policy import ActorPolicy
from rlinf.models.embodiment.lerobot import check
from rlinf.models.embodiment.lerobot import runner as runner_module
from rlinf.models.embodiment.lerobot.chunks import seeds_of
from rlinf.models.embodiment.lerobot.folder import compare_weights
from rlinf.models.embodiment.lerobot.migrate import migrate
from rlinf.models.embodiment.lerobot.runner import greedy_noise
from rlinf.models.embodiment.lerobot.worker import WorkerRunner, interpreter_for, runs_here
from rlinf.types import Observation

pytestmark = MARKS
DRAWING = ("xvla", "groot")
"""Types whose own class takes no noise, and draws it by torch.randn."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Folders of all types."""
    return Folders(tmp_path_factory.mktemp("folders"))


@HERE
@pytest.mark.parametrize("kind", ["act", "smolvla", "diffusion", "xvla", "groot"])
def test_actions_are_those_of_lerobots_own_class(kind: str, folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole chunk, with the same noise; channels in another order, or moments, give other actions."""
    model = build_policy({"model": section(folders[kind])})
    policy, before, after = theirs(folders[kind])
    rows = Observation.stack_history([observation(), observation(seed=1)]) if kind == "diffusion" else observation()
    noise = (
        {} if model.config.noise_shape is None else {"noise": greedy_noise(model.config.noise_shape).repeat(3, 1, 1)}
    )
    with monkeypatch.context() as drawn:
        if kind in DRAWING:
            drawn.setattr(torch, "randn", lambda *shape, **options: noise["noise"].clone())
        chunk = policy.predict_action_chunk(before(theirs_of(rows)), **({} if kind in DRAWING else noise))
    expected = torch.stack([after(chunk[:, step]) for step in range(4)], 1)
    found = model.predict_action_batch(do_sample=False, **model.preprocess(rows)).actions
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    moments = (
        kind == "diffusion"
    )  # whose tiny network sees one point of an image, which says nothing: its moments are swapped
    rows.images["front"] = np.ascontiguousarray(rows.images["front"][..., ::-1])
    rows.state = np.ascontiguousarray(rows.state[:, ::-1]) if moments else rows.state
    other = model.predict_action_batch(do_sample=False, **model.preprocess(rows)).actions
    assert float((other - expected).abs().max()) > 1e-5


@HERE
def test_queues_are_kept_for_each_row(folders: Folders) -> None:
    """200 steps of three rows that reset at different times equal three single runs of lerobot's ``select_action``."""
    model = build_policy({"model": section(folders["act"])})
    generator = np.random.default_rng(1)
    resets = [{0, 37, 111}, {0, 50}, {0, 3, 4, 150}]
    seen = generator.standard_normal((200, 3, STATE), dtype=np.float32)
    images = generator.integers(0, 256, (200, 3, SIZE, SIZE, 3), dtype=np.uint8)

    def rows(step: int, which: list[int]) -> Observation:
        return Observation({"front": images[step, which]}, seen[step, which], ["pick up the red block"] * len(which))

    ours, queues = np.zeros((200, 3, ACTIONS), np.float32), [[], [], []]
    for step in range(200):  # as an env with chunks does it: a new chunk when the last one or the episode has ended
        for row in range(3):
            queues[row] = [] if step in resets[row] else queues[row]
        empty = [row for row in range(3) if not queues[row]]
        if empty:
            actions = model.predict_action_batch(do_sample=False, **model.preprocess(rows(step, empty))).actions.numpy()
            for row, chunk in zip(empty, actions, strict=True):
                queues[row] = list(chunk)
        for row in range(3):
            ours[step, row] = queues[row].pop(0)
    for row in range(3):
        policy, before, after = theirs(folders["act"])
        for step in range(200):
            if step in resets[row]:
                policy.reset()
            action = after(policy.select_action(before(theirs_of(rows(step, [row])))))
            np.testing.assert_allclose(ours[step, row], action[0].numpy(), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def apart(folders: Folders):
    """An ACT policy in an interpreter of its own."""
    return build_policy({"model": section(folders["act"], interpreter=PYTHON)})


def test_an_own_interpreter_is_the_same_policy(apart, folders: Folders) -> None:
    """Its actions are finite, repeat, and equal the actions of this process where lerobot imports."""
    assert isinstance(apart.runner, WorkerRunner)
    inputs = apart.preprocess(observation())
    found = apart.propose(inputs, 3)
    assert found.chunks.shape == (3, 3, 4, ACTIONS) and found.features.shape == (3, apart.feature_dim)
    assert torch.equal(found.chunks[:, 0], apart.predict_action_batch(do_sample=False, **inputs).actions)
    assert bool(torch.isfinite(found.chunks).all()) and float(found.chunks.std(0).mean()) > 1e-4
    if runs_here():
        here = build_policy({"model": section(folders["act"])}).propose(inputs, 3)
        torch.testing.assert_close(found.chunks, here.chunks, rtol=0, atol=1e-6)
        torch.testing.assert_close(found.features, here.features, rtol=0, atol=1e-6)


def test_a_killed_interpreter_costs_one_restart_and_no_answer(apart, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = apart.preprocess(observation())
    before = apart.predict_action_batch(do_sample=False, **inputs).actions
    runner = apart.runner
    os.kill(runner._child.process.pid, signal.SIGKILL)
    assert torch.equal(apart.predict_action_batch(do_sample=False, **inputs).actions, before)
    assert runner.num_restarts == 1

    def start_and_die() -> None:
        start()
        os.kill(runner._child.process.pid, signal.SIGKILL)

    start = runner._start
    monkeypatch.setattr(runner, "_start", start_and_die)
    os.kill(runner._child.process.pid, signal.SIGKILL)
    with pytest.raises(PolicyServerError, match="twice"):
        apart.predict_action_batch(do_sample=False, **inputs)
    monkeypatch.undo()
    runner._start()


def test_a_question_without_an_answer_leaves_nothing_behind(apart, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C the next question gets its own answer from a new interpreter; a silent one is named, and ended."""
    first, second = (apart.preprocess(observation(seed=seed)) for seed in (0, 5))
    expected = apart.predict_action_batch(do_sample=False, **second).actions
    runner = apart.runner

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "_reply", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apart.predict_action_batch(do_sample=False, **first)
    monkeypatch.undo()
    assert torch.equal(apart.predict_action_batch(do_sample=False, **second).actions, expected)
    monkeypatch.setattr(runner, "timeout_s", 1.0)
    os.kill(runner._child.process.pid, signal.SIGSTOP)
    with pytest.raises(PolicyServerError, match=r"model\.timeout_s"):
        apart.predict_action_batch(do_sample=False, **first)
    assert runner._child.process is None


def test_an_interpreter_without_lerobot_is_named(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is missing, and one that dies at the start."""
    with pytest.raises(MissingDependencyError, match="model.interpreter"):
        interpreter_for(str(tmp_path / "python"))
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(PolicyServerError, match="status 3 at the start"):
        build_policy({"model": section(folders["act"], interpreter=str(broken))})


@HERE
@pytest.mark.parametrize("kind", ["pi0", "pi05"])
def test_pi0_acts_beside_our_transformers(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As lerobot's own class; alone it does not act, which is one error. Its training path, which makes no such mask, agrees."""
    from lerobot.policies import pi_gemma
    from transformers.masking_utils import create_causal_mask

    patch_pi0(kind, monkeypatch)
    monkeypatch.setattr(pi_gemma, "create_causal_mask", create_causal_mask)
    folder = make(kind, tmp_path / kind)
    with monkeypatch.context() as unmended:
        unmended.setattr(runner_module, "let_masks_take_positions", lambda: None)
        with pytest.raises(CheckpointError, match=r"cannot act here .*cache_position.*model\.interpreter"):
            build_policy({"model": section(folder)})
    model = build_policy({"model": section(folder)})
    rows = observation()
    noise = greedy_noise(model.config.noise_shape).repeat(3, 1, 1)
    policy, before, after = theirs(folder)
    prepared = before(theirs_of(rows))
    chunk = policy.predict_action_chunk(prepared, noise=noise)
    expected = torch.stack([after(chunk[:, step]) for step in range(4)], 1)
    found = model.predict_action_batch(do_sample=False, **model.preprocess(rows)).actions
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    policy.config.num_inference_steps = (
        1  # so noise minus chunk is the velocity, and the loss of this chunk at time 1 is 0
    )
    chunk = policy.predict_action_chunk(prepared, noise=noise)
    monkeypatch.setattr(policy.model, "sample_noise", lambda *arguments: noise)
    monkeypatch.setattr(policy.model, "sample_time", lambda *arguments: torch.ones(3))
    with torch.no_grad():
        losses = [float(policy.forward({**prepared, "action": each})[0]) for each in (chunk, chunk + 0.01)]
    assert losses[0] < 1e-9 < 5e-5 < losses[1]


@HERE
def test_pi0_fast_acts_as_lerobots_own_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens, greedily, and its decoding; the tokenizers of a hub are taken from this machine."""
    patch_pi0("pi0_fast", monkeypatch)
    folder = make("pi0_fast", tmp_path / "pi0_fast")
    model = build_policy({"model": section(folder)})
    rows = observation()
    policy, before, after = theirs(folder)
    chunk = policy.predict_action_chunk(before(theirs_of(rows)))
    expected = torch.stack([after(chunk[:, step]) for step in range(4)], 1)
    inputs = model.preprocess(rows)
    found = model.predict_action_batch(do_sample=False, **inputs).actions
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert float((found[0] - found[1]).abs().max()) > 1e-3, "rows differ"
    proposed = model.propose(inputs)
    assert torch.equal(proposed.chunks[:, 0], found) and proposed.features.shape == (3, model.feature_dim)


def test_sizes_are_those_of_the_folder(folders: Folders) -> None:
    with pytest.raises(ConfigError, match="model.action_chunks_len=4"):
        build_policy({"model": section(folders["act"], action_chunks_len=8)})


def test_a_folder_of_an_old_lerobot_is_migrated(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its statistics come out of the weights; lerobot's own conversion loses a feature with `_` in its name."""
    camera, new, old = "cam_high", folders["act"], tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_text((new / "config.json").read_text().replace("images.front", f"images.{camera}"))
    (normalizer,) = new.glob("policy_preprocessor_*normalizer*.safetensors")
    state = load_file(new / "model.safetensors")
    for name, each in load_file(normalizer).items():
        feature, _, statistic = name.replace("front", camera).rpartition(".")
        buffer = f"buffer_{feature.replace('.', '_')}.{statistic}"
        for part in ("normalize_targets", "unnormalize_outputs") if "action" in name else ("normalize_inputs",):
            state |= {f"{part}.{buffer}": each.clone()} if name.endswith(("mean", "std")) else {}
    save_file(state, old / "model.safetensors")
    with pytest.raises(CheckpointError, match="migrate="):
        build_policy({"model": section(old, interpreter=PYTHON)})
    monkeypatch.setattr(check, "start_runner", lambda *arguments: SimpleNamespace(feature_dim=1))  # which takes seconds
    assert main(["check-policy", str(old), f"migrate={tmp_path / 'new'}", f"interpreter={PYTHON}"]) == 0
    with pytest.raises(ConfigError, match="exists"):
        migrate(old, tmp_path / "new")
    made = load_file(tmp_path / "new" / normalizer.name)
    expected = {name.replace("front", camera): each for name, each in load_file(normalizer).items()}
    assert f"observation.images.{camera}.mean" in made
    assert all(torch.equal(each, expected[name]) for name, each in made.items())
    weights = load_file(tmp_path / "new" / "model.safetensors")
    assert compare_weights(new, weights) == []


def test_load_policy_reads_a_folder_of_lerobot(folders: Folders) -> None:
    """Without a type and without sizes."""
    policy = rlinf.load_policy(folders["act"], overrides=[] if runs_here() else [f"model.interpreter={PYTHON}"])
    rows = observation(1)
    found = policy.act(
        {"images": {"front": rows.images["front"][0]}, "state": rows.state[0], "instruction": "pick up the red block"}
    )
    assert found.shape == (4, ACTIONS)


ENV = [
    "env=tabletop", "env.tasks=[reach]", "env.cameras=[front]", "env.image_size=32", "env.state=proprio", "env.max_episode_steps=10",
    "evaluation.num_episodes=4", "evaluation.num_envs=3", "evaluation.num_videos_per_task=0", "evaluation.probe=false",
    "tracking.progress=false", "cluster.num_threads=1",
]  # fmt: skip


def words(folder: Path) -> list[str]:
    """Return the overrides of a folder."""
    found = [f"model.model_path={folder}", f"model.action_token_len={ACTIONS}", "model.action_chunks_len=4"]
    return ["model=lerobot", *found, *([] if runs_here() else [f"model.interpreter={PYTHON}"])]


def evaluated(folder: Path, output: Path, *more: str) -> list[tuple]:
    """Return outcome, length and return of each episode by ``rlinf evaluate``."""
    from rlinf.evaluation.result import EvaluationResult

    assert main(["evaluate", *words(folder), *ENV, f"output_dir={output}", *more]) == 0
    results = EvaluationResult.from_json(output / "result.json").results
    return [(each.success, each.num_env_steps, round(each.episode_return, 5)) for each in results]


def test_an_evaluation_does_not_depend_on_who_plays_together(
    folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three envs and one env give the same episodes, also in an interpreter that is killed while it answers."""
    found = evaluated(folders["act"], tmp_path / "three")
    assert len(found) == 4
    runners: list[WorkerRunner] = []
    wait = WorkerRunner._reply

    def killed(runner: WorkerRunner, *arguments: object) -> dict:
        runners.append(runner)
        if len(runners) == 3:  # the first reply tells that the policy is loaded
            os.kill(runner._child.process.pid, signal.SIGKILL)
        return wait(runner, *arguments)

    monkeypatch.setattr(WorkerRunner, "_reply", killed)
    assert found == evaluated(folders["act"], tmp_path / "one", "evaluation.num_envs=1", f"model.interpreter={PYTHON}")
    assert [runner.num_restarts for runner in set(runners)] == [1]


@HERE
def test_a_history_is_kept_for_each_episode(folders: Folders) -> None:
    """200 steps of three episodes that start at different times equal single runs of ``select_action``, with n_obs_steps=2."""
    from rlinf.evaluation.evaluator import EpisodeContext
    from rlinf.evaluation.recording import ScoringPolicy

    model = build_policy({"model": section(folders["diffusion"])})
    policy = ScoringPolicy(model, ["reach"], greedy=True, temperature=1.0, seed=0)
    generator = np.random.default_rng(2)
    resets = [{0, 37, 111}, {0, 50}, {0, 3, 4, 150}]
    seen = generator.standard_normal((200, 3, STATE), dtype=np.float32)
    images = generator.integers(0, 256, (200, 3, SIZE, SIZE, 3), dtype=np.uint8)
    contexts: list[EpisodeContext] = []
    ours = np.zeros((200, 3, ACTIONS), np.float32)
    for step in range(200):
        contexts = [EpisodeContext(0, 2) if step in resets[row] else contexts[row] for row in range(3)]
        rows = Observation({"front": images[step]}, seen[step], ["pick up the red block"] * 3)
        ours[step] = policy.act(rows, contexts)[:, 0]
    for row in range(3):
        own, before, after = theirs(folders["diffusion"])
        noise = greedy_noise(model.config.noise_shape)[None]
        for step in range(200):
            if step in resets[row]:
                own.reset()
            one = Observation({"front": images[step, [row]]}, seen[step, [row]], ["pick up the red block"])
            action = after(own.select_action(before(theirs_of(one)), noise=noise))
            np.testing.assert_allclose(
                ours[step, row], action[0].numpy(), rtol=0, atol=1e-4
            )  # one row there, 16 here, in each step of the diffusion
    with pytest.raises(ConfigError, match="n_obs_steps"):
        model.preprocess(observation())


@HERE
def test_codes_are_drawn_for_each_row(folders: Folders) -> None:
    """VQ-BeT draws codes from torch's global stream: a row alone draws as it does among others, and as lerobot's own class."""
    model = build_policy({"model": section(folders["vqbet"])})
    rows = Observation.stack_history([observation(seed=0), observation(seed=1)])
    inputs = model.preprocess(rows)
    found = model.propose(inputs, 2)
    alone = model.preprocess(rows.select([2]))
    torch.testing.assert_close(model.propose(alone).chunks[0, 0], found.chunks[2, 0], rtol=0, atol=1e-6)
    policy, before, after = theirs(folders["vqbet"])
    torch.manual_seed(seeds_of(greedy_noise((1,))[None])[0])
    for moment in (0, 1):  # the second observation is not acted on yet, so the queue of actions is emptied
        policy._queues["action"].clear()
        batch = before(theirs_of(observation(seed=moment).select([2])))
        if moment == 1:
            torch.manual_seed(seeds_of(greedy_noise((1,))[None])[0])
        action = after(policy.select_action(batch))
    torch.testing.assert_close(found.chunks[2, 0, 0], action[0], rtol=0, atol=1e-6)


def test_a_head_learns_on_a_frozen_folder_and_is_exported(folders: Folders, tmp_path: Path) -> None:
    """A residual head on ACT: the run keeps the folder once, by its digest; the exported policy acts as the run's does."""
    run = tmp_path / "run"
    small = [
        "algorithm=sac", "algorithm.actor.name=residual", "rollout.num_envs=2", "rollout.num_chunks=6", "trainer.max_steps=2",
        "trainer.save_every=2", "algorithm.learning_starts=8", "algorithm.batch_size=8", "algorithm.replay_capacity=64",
        "algorithm.actor.hidden_size=16", "tracking.tensorboard=false", f"output_dir={run}",
    ]  # fmt: skip
    assert main(["train", *words(folders["act"]), *ENV, *small]) == 0
    assert main(["export", f"checkpoint={run}", f"output={tmp_path / 'export'}"]) == 0
    policies = [rlinf.load_policy(place) for place in (run, tmp_path / "export")]
    assert policies[0].model.base_sha256 is not None and isinstance(policies[0].model, ActorPolicy)
    rows = observation(2)
    given = {"images": rows.images, "state": rows.state, "instruction": rows.instruction}
    first, second = (policy.act(given) for policy in policies)
    np.testing.assert_array_equal(first, second)


@HERE
def test_threads_get_their_own_answers(folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that ask at once get features and actions of their own observations."""
    model = build_policy({"model": section(folders["act"])})
    asked = [model.preprocess(observation(seed=seed)) for seed in (0, 1)]
    expected = [model.propose(each) for each in asked]

    def ask(row: int) -> bool:
        found = [model.propose(asked[row]) for _ in range(20)]
        return all(torch.equal(each.features, expected[row].features) for each in found)

    before, at_work = model.runner._before, []

    def slowly(rows: dict) -> dict:
        """Its steps remember the rows that they work on, so a second thread must wait."""
        at_work.append(1)
        time.sleep(0.01)
        assert len(at_work) == 1
        at_work.clear()
        return before(rows)

    monkeypatch.setattr(model.runner, "_before", slowly)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(ask, (0, 1))) == [True, True]


@HERE
@pytest.mark.parametrize("kind", ["act", "smolvla", "xvla", "groot"])
def test_cloning_is_lerobots_own_loss_and_its_weights_go_back(kind: str, folders: Folders, tmp_path: Path) -> None:
    """Equal rows, padding and seed give lerobot's loss; the trained folder is loaded by lerobot, and acts as the model."""
    fields = {"override_config": {"trained": True}}
    model = build_policy({"model": section(folders[kind], **fields)})
    policy, before, _ = theirs(folders[kind])
    rows, actions = (
        observation(),
        torch.rand(3, model.sft_chunk_len, ACTIONS, generator=torch.Generator().manual_seed(2)),
    )
    uniforms = torch.full((3, 1), 0.25)
    model.train()
    losses = model.sft_loss(model.preprocess(rows), actions, uniforms)
    prepared = before({**theirs_of(rows), "action": actions})
    prepared["action_is_pad"] = torch.zeros(3, model.sft_chunk_len, dtype=torch.bool)
    for module in policy.modules():  # no policy of this project has dropout
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        elif isinstance(module, torch.nn.MultiheadAttention):
            module.dropout = 0.0
    torch.manual_seed(int(0.25 * 2**31))
    expected = policy.train().forward(prepared)[0]
    torch.testing.assert_close(losses, expected.expand(3), rtol=1e-6, atol=0)
    assert float((model.sft_loss(model.preprocess(rows), actions + 1, uniforms) - expected).abs().max()) > 1e-2, (
        "control"
    )

    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.Adam(trained, 1e-3)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model.sft_loss(model.preprocess(rows), actions, uniforms).mean()
        loss.backward()
        optimizer.step()
    assert float(loss) < 0.9 * float(expected)
    model.eval().save_pretrained(tmp_path / "out")
    assert check.report(tmp_path / "out")[1] == []
    for folder, equal in ((tmp_path / "out", True), (folders[kind], False)):
        again = build_policy({"model": section(folder)})
        found, own = (
            each.predict_action_batch(do_sample=False, **each.preprocess(rows)).actions for each in (again, model)
        )
        assert bool((found - own).abs().max() < 1e-6) == equal


def test_weights_that_stay_as_they_are_are_not_cloned(folders: Folders) -> None:
    for kind, named in (("act", "trained=true"), ("diffusion", "2 observations")):
        model = build_policy({"model": section(folders[kind], interpreter=PYTHON)})
        with pytest.raises(ConfigError, match=named):
            type(model).check_sft(model.config)
