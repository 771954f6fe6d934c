"""The loop as a whole: resume, independence of micro-batches and ranks, the parity gate, and what stops a run."""

from __future__ import annotations

import json
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from run_results import SMALL_RUN, run_config, untimed_metrics, weights_of

from rlinf.checkpoints import folders as checkpoint_folders
from rlinf.commands import train as run_module
from rlinf.commands.train import build, train
from rlinf.config.compose import compose_config
from rlinf.config.schema import RunConfig, build_config
from rlinf.envs.graphics.renderer import StateRenderer
from rlinf.errors import CheckpointError, ConfigError, ManifestMismatchError, NonFiniteError, ParityError
from rlinf.models.embodiment.mlp_action_model import MLPForRLActionPrediction
from rlinf.preflight import conditions
from rlinf.training import cloning_trainer, evaluator
from rlinf.training.rl_trainer import RLTrainer

SMALL = [*SMALL_RUN, "trainer.max_steps=4", "algorithm.critic_warmup_steps=1"]


def config_of(folder: Path, *overrides: str) -> RunConfig:
    return run_config(folder, *SMALL, *overrides)


def assert_equal(left: dict, right: dict) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


# AdamW's first step is the sign of the gradient where adam_eps is tiny, which turns rounding of a gradient near 0 into a
# whole step. With this epsilon a step is a smooth function of the gradient, and equal gradients give equal weights.
SMOOTH = "trainer.adam_eps=1e-3"


def rl_step(folder: Path, *overrides: str) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    run = build(config_of(folder, "trainer.max_steps=1", "algorithm.critic_warmup_steps=0", SMOOTH, *overrides))
    run.execute()
    line = next(line for line in untimed_metrics(folder) if "train/loss" in line)
    return line, {name: p.detach().clone() for name, p in run.parts.worker.model.named_parameters()}


@pytest.fixture(scope="module")
def uncut(tmp_path_factory):
    """A step, which moves the weights by far more than the tolerances."""
    folder = tmp_path_factory.mktemp("uncut")
    line, weights = rl_step(folder)
    untouched = build(config_of(folder / "control")).parts.worker.model
    assert max((p.detach() - weights[name]).abs().max().item() for name, p in untouched.named_parameters()) > 1e-4
    return line, weights


@pytest.fixture(scope="module")
def one_step(tmp_path_factory):
    """A run of one iteration."""
    folder = tmp_path_factory.mktemp("one_step")
    train(config_of(folder, "trainer.max_steps=1"))
    return folder


CUTS = (
    "model.micro_batch_size=5",
    "model.val_micro_batch_size=7",
    "rollout.pipeline_stages=1",
    "rollout.worker_processes=2",
)


@pytest.mark.parametrize("overrides", CUTS)
def test_results_do_not_depend_on_how_work_is_cut(tmp_path, uncut, overrides):
    line, weights = uncut
    other_line, other_weights = rl_step(tmp_path, overrides)
    for name, value in line.items():
        if name.startswith("train/"):
            assert other_line[name] == pytest.approx(value, abs=1e-6, rel=1e-5), name
    for name, tensor in weights.items():
        torch.testing.assert_close(other_weights[name], tensor, atol=1e-6, rtol=1e-5, msg=name)


def test_fsdp2_on_one_process_equals_a_replica(tmp_path, monkeypatch):
    monkeypatch.setattr(MLPForRLActionPrediction, "fsdp_wrap_modules", ("Linear",))
    short = ["trainer.max_steps=2", SMOOTH]
    train(config_of(tmp_path / "plain", *short))
    train(config_of(tmp_path / "fsdp2", *short, "trainer.sharding=fsdp2"))
    sharded = weights_of(tmp_path / "fsdp2", "rl_000002")
    for name, tensor in weights_of(tmp_path / "plain", "rl_000002").items():
        torch.testing.assert_close(sharded[name], tensor, atol=1e-6, rtol=0, msg=name)


def test_kl_penalty_refers_to_the_policy_before_rl_also_after_a_resume(tmp_path):
    kl = ["algorithm.kl_coef=0.5", "sft.max_steps=3", "sft.num_demonstrations=8", "sft.batch_size=16",
          "trainer.minibatch_size=64", "model.micro_batch_size=64", "algorithm.critic_warmup_steps=0"]  # fmt: skip

    def divergences(folder: Path) -> list[float]:
        return [line["train/kl_to_reference"] for line in untimed_metrics(folder) if "train/kl_to_reference" in line]

    train(config_of(tmp_path / "whole", *kl))
    train(config_of(tmp_path / "halves", *kl, "trainer.max_steps=2"))
    train(config_of(tmp_path / "halves", *kl, f"resume={tmp_path / 'halves'}"))
    whole = divergences(tmp_path / "whole")
    assert len(whole) == 4 and whole[0] == pytest.approx(0, abs=1e-7) and whole[1] > 1e-6
    assert divergences(tmp_path / "halves") == whole
    # Every resume into another folder takes the reference with it.
    train(
        config_of(
            tmp_path / "second", *kl, "trainer.max_steps=3", f"resume={tmp_path / 'halves/checkpoints/rl_000002'}"
        )
    )
    train(config_of(tmp_path / "third", *kl, f"resume={tmp_path / 'second'}"))
    assert divergences(tmp_path / "second") == whole[2:3] and divergences(tmp_path / "third") == whole[3:]
    (tmp_path / "second" / "reference.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"second/reference\.safetensors is missing.*Copy.*or set algorithm\.kl_coef=0"
    ):
        train(config_of(tmp_path / "fourth", *kl, f"resume={tmp_path / 'second'}"))


def test_what_vllm_shares_is_not_in_the_expandable_segments_of_a_run_before(tmp_path, monkeypatch):
    """A notebook: the first run sets the allocator of its process."""
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    monkeypatch.setattr(run_module, "resolve_device", lambda *_: "cuda")

    class BegunError(Exception):
        """The ranks have started to build the run."""

    def build(config, _reservation):
        raise BegunError(config.rollout.backend)

    monkeypatch.setattr(run_module, "build", build)
    torch_run, vllm_run = (config_of(tmp_path / name, f"rollout.backend={name}") for name in ("torch", "vllm"))
    for run, rejected in ((vllm_run, False), (torch_run, False), (vllm_run, True), (torch_run, False)):
        words = r"PYTORCH_ALLOC_CONF is 'expandable_segments:True' on rank 0.*rollout\.backend=torch"
        with pytest.raises(ConfigError if rejected else BegunError, match=words if rejected else run.rollout.backend):
            train(run)


def test_resume_keeps_the_action_statistics_of_the_checkpoint(tmp_path):
    source = build(config_of(tmp_path / "probe")).parts.worker.model
    halved = {"tabletop": {"action": {**source.config.norm_stats["tabletop"]["action"], "q99": [0.5, 0.5]}}}
    run = build(config_of(tmp_path / "second", "trainer.max_steps=1"))
    run.parts.worker.model.config.norm_stats = halved
    run.execute()
    resumed = build(config_of(tmp_path / "second", "trainer.max_steps=2", f"resume={tmp_path / 'second'}"))
    assert resumed.parts.worker.model.config.norm_stats["tabletop"]["action"]["q99"] == [0.5, 0.5]
    assert list(resumed.parts.worker.model.action_normalizer.high) == [0.5, 0.5]


def test_a_resumed_run_hashes_its_checkpoint_once(tmp_path, monkeypatch, one_step):
    folder = shutil.copytree(one_step, tmp_path / "copy")
    verify_files, hashed = checkpoint_folders.verify_files, []

    def counted(folder, manifest):
        hashed.append(folder.name)
        verify_files(folder, manifest)

    monkeypatch.setattr(checkpoint_folders, "verify_files", counted)
    build(config_of(folder, f"resume={folder}"))
    assert hashed == ["rl_000001"]


def test_resume_refuses_a_checkpoint_of_another_version(tmp_path, monkeypatch, one_step):
    real = conditions.package_versions
    monkeypatch.setattr(conditions, "package_versions", lambda *names: real(*names) | {"mujoco": "2.0.0"})
    with pytest.raises(ManifestMismatchError, match="mujoco"):
        build(config_of(tmp_path, f"resume={one_step}"))


def test_value_head_and_policy_have_their_own_learning_rates(tmp_path):
    rates = ["trainer.learning_rate=1e-3", "trainer.value_learning_rate=1e-5", "trainer.max_steps=1"]
    run = build(config_of(tmp_path, *rates, "algorithm.critic_warmup_steps=0"))
    before = {name: p.detach().clone() for name, p in run.parts.worker.model.named_parameters()}
    run.execute()
    moved = {
        name: (p.detach() - before[name]).abs().max().item() for name, p in run.parts.worker.model.named_parameters()
    }
    value = max(size for name, size in moved.items() if "value_head" in name)
    policy = max(size for name, size in moved.items() if "value_head" not in name)
    # Two AdamW steps move a weight by at most about twice the learning rate.
    assert 0 < value <= 2.1e-5 and 1e-4 < policy <= 2.1e-3


def test_the_learning_rates_decay_over_the_iterations(tmp_path):
    cloning = ["sft.max_steps=4", "sft.lr_decay=linear", "sft.learning_rate=1e-3", "sft.warmup_steps=0"]
    run = build(config_of(tmp_path, *cloning, "trainer.lr_decay=linear", "trainer.learning_rate=1e-2"))
    run.execute()
    lines = untimed_metrics(tmp_path)
    cloning_rates = [line["sft/learning_rate"] for line in lines if "sft/learning_rate" in line]
    assert cloning_rates == pytest.approx([1e-3, 0.25e-3]), "the first and the last of four steps"
    rates = [line["train/learning_rate"] for line in lines if "train/learning_rate" in line]
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])
    assert run.parts.worker.optimizer.param_groups[-1]["lr"] == pytest.approx(0.25e-3), "the value head"


def test_dynamic_sampling_replaces_groups_without_variance(tmp_path):
    grpo = [item for item in SMALL if not item.startswith("algorithm.")]
    grpo += ["algorithm=grpo", "rollout.group_size=4", "env.reward_mode=sparse", "trainer.max_steps=1"]

    def env_steps(folder: Path, *more: str) -> float:
        config = build_config(compose_config([*grpo, *more]))
        config.output_dir = str(folder)
        train(config)
        return next(line for line in untimed_metrics(folder) if "rollout/return_mean" in line)[
            "rollout/env_steps_total"
        ]

    # A random policy never succeeds, so all returns are 0 and every group is replaced as often as is allowed.
    once = env_steps(tmp_path / "once")
    assert env_steps(tmp_path / "thrice", "algorithm.max_resamples=2") == 3 * once


def test_parity_gate_stops_at_step_zero_and_names_the_worst_sample(tmp_path):
    run = build(config_of(tmp_path))
    original = run.parts.worker.model.rollout_logprobs

    def drifted(prediction, temperature=1.0):
        logprobs = original(prediction, temperature)
        logprobs[3] += 0.25
        return logprobs

    run.parts.worker.model.rollout_logprobs = drifted
    with pytest.raises(ParityError, match=r"differ by 0\.25 at step 0.*env (3|7).*EpisodeSpec.*reach the"):
        run.execute()


def test_parity_gate_sees_another_temperature_at_the_start_and_after_a_resume(tmp_path, one_step):
    for step, words in enumerate(([], ["trainer.max_steps=2", f"resume={one_step}"])):
        run = build(config_of(tmp_path / str(step), *words))
        run.parts.worker.temperature = 1.5
        with pytest.raises(ParityError, match=f"differ by.*at step {step}"):
            run.execute()


def test_not_finite_gradient_stops_with_a_report_and_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    run = build(config_of(tmp_path, "trainer.save_every=1"))
    update, calls = run.parts.worker.update, []

    def poisoned(batch, index, algorithm, step):
        calls.append(step)
        return update(batch, index, algorithm, step)

    norm_of = run.parts.worker.train_step.norm_of

    def one_bad_gradient(parameters):
        if calls and calls[-1] == 2 and run.parts.worker.model.log_std in set(parameters):
            run.parts.worker.model.policy[0].weight.grad[0, 0] = float("nan")
        return norm_of(parameters)

    run.parts.worker.update = poisoned
    monkeypatch.setattr(run.parts.worker.train_step, "norm_of", one_bad_gradient)
    with pytest.raises(NonFiniteError, match="rl step 2"):
        run.execute()
    report = json.loads((tmp_path / "failed_batch" / "report.json").read_text())
    assert report["step"] == 2 and report["parameters_with_bad_gradients"] == ["policy.0.weight"]
    assert {"advantages", "action_tokens", "state"} <= report["tensors"].keys()
    assert (tmp_path / "checkpoints" / "rl_000002" / "manifest.json").exists()
    assert all(torch.isfinite(p).all() for p in run.parts.worker.model.parameters())


def test_critic_warmup_moves_the_value_head_and_nothing_else(tmp_path):
    run = build(config_of(tmp_path, "trainer.max_steps=1", "trainer.weight_decay=0.1"))
    before = {name: p.detach().clone() for name, p in run.parts.worker.model.named_parameters()}
    run.execute()
    for name, parameter in run.parts.worker.model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("value_head" not in name), name


def stop_in_evaluation(monkeypatch, number: int, within: bool = True) -> None:
    """Let SIGTERM come in the middle of the evaluation of this number, or when its result is there."""
    place, name = (evaluator, "evaluate_policy") if within else (evaluator.Evaluator, "run")
    evaluate = getattr(place, name)
    calls = []

    def interrupted() -> None:
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("the signal was not heard")

    def stopped(*args, **kwargs):
        calls.append(None)
        if within and len(calls) == number:
            plan, gather = kwargs["plan"], kwargs["plan"].ranks.gather
            ranks = replace(plan.ranks, gather=lambda part: gather(interrupted))
            kwargs["plan"] = replace(plan, ranks=ranks)
        result = evaluate(*args, **kwargs)
        if len(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        return result

    monkeypatch.setattr(place, name, stopped)


def assert_goes_on_as_one_without_a_stop(tmp_path: Path, overrides: list[str], checkpoint: str) -> None:
    """The run in ``run`` was stopped: resumed, it has weights, metrics and summary of one that was not."""
    train(config_of(tmp_path / "run", *overrides, f"resume={tmp_path / 'run'}"))
    train(config_of(tmp_path / "whole", *overrides))
    assert_equal(weights_of(tmp_path / "run", checkpoint), weights_of(tmp_path / "whole", checkpoint))
    assert untimed_metrics(tmp_path / "run") == untimed_metrics(tmp_path / "whole")
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("run", "whole")]
    assert summaries[0] | {"train_wall_s": 0} == summaries[1] | {"train_wall_s": 0}


@pytest.mark.parametrize(
    ("number", "within", "checkpoint"),
    [(1, True, "rl_000000"), (1, False, "rl_000000"), (2, True, "rl_000002"), (3, True, "rl_000004")],
)
def test_a_signal_is_heard_within_an_evaluation(tmp_path, monkeypatch, capsys, number, within, checkpoint):
    """Before RL, every two steps of it, after it: the evaluation is given up, and made when the run continues."""
    steps = ["trainer.eval_every=2"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        stop_in_evaluation(patch, number, within)
        train(config_of(tmp_path / "run", *steps))
    assert ended.value.code == 128 + signal.SIGTERM
    assert f"continue with: rlinf train resume={tmp_path / 'run'}" in capsys.readouterr().err
    newest = max(
        path.name for path in (tmp_path / "run" / "checkpoints").iterdir()
    )  # next to that of the best evaluation
    assert newest == checkpoint
    assert_goes_on_as_one_without_a_stop(tmp_path, steps, "rl_000004")
    assert sum("eval/success_rate" in line for line in untimed_metrics(tmp_path / "run")) == 3


def test_a_signal_between_the_evaluation_before_rl_and_the_first_step_loses_no_line(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(RLTrainer, "_make_reference", lambda trainer: signal.raise_signal(signal.SIGTERM))
        train(config_of(tmp_path / "run"))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["rl_000000"]
    assert_goes_on_as_one_without_a_stop(tmp_path, [], "rl_000004")
    assert "eval/success_rate" in untimed_metrics(tmp_path / "run")[0]


@pytest.mark.parametrize("within", [True, False], ids=["within", "after"])
def test_the_last_evaluation_of_cloning_is_made_once_however_often_it_is_interrupted(tmp_path, monkeypatch, within):
    steps = ["trainer.max_steps=0", "sft.max_steps=2", "sft.num_demonstrations=8", "sft.batch_size=16"]
    for resume in ([], [f"resume={tmp_path / 'run'}"]) if within else ([],):
        # With its result the run is over, and ends as without a signal.
        with monkeypatch.context() as patch, pytest.raises(SystemExit) if within else nullcontext():
            stop_in_evaluation(patch, 1, within)
            train(config_of(tmp_path / "run", *steps, *resume))
    assert_goes_on_as_one_without_a_stop(tmp_path, steps, "sft_000002")
    assert sum("eval/success_rate" in line for line in untimed_metrics(tmp_path / "run")) == 1


def test_an_evaluation_that_is_interrupted_again_is_still_made(tmp_path, monkeypatch):
    steps = ["trainer.eval_every=2"]
    for number, resume in ((2, []), (1, [f"resume={tmp_path / 'run'}"])):
        with monkeypatch.context() as patch, pytest.raises(SystemExit):
            stop_in_evaluation(patch, number)
            train(config_of(tmp_path / "run", *steps, *resume))
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["rl_000002"]
    assert_goes_on_as_one_without_a_stop(tmp_path, steps, "rl_000004")


def test_a_run_that_had_reached_its_target_trains_no_more_when_it_is_resumed(tmp_path, monkeypatch):
    steps = ["trainer.eval_every=2", "trainer.target_success_rate=0.0"]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        stop_in_evaluation(patch, 3)
        train(config_of(tmp_path / "run", *steps))
    assert_goes_on_as_one_without_a_stop(tmp_path, steps, "rl_000002")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["rl_000002"]


@pytest.mark.parametrize("within", [True, False], ids=["within", "after"])
def test_a_stop_at_an_evaluation_of_cloning_neither_loses_nor_repeats_it(tmp_path, monkeypatch, within):
    steps = [
        "trainer.max_steps=0", "sft.max_steps=4", "sft.eval_every=2", "sft.num_demonstrations=8", "sft.batch_size=16",
    ]  # fmt: skip
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        stop_in_evaluation(patch, 1, within)
        train(config_of(tmp_path / "run", *steps))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["sft_000002"]
    assert_goes_on_as_one_without_a_stop(tmp_path, steps, "sft_000004")
    assert sum("eval/success_rate" in line for line in untimed_metrics(tmp_path / "run")) == 2


def test_a_signal_while_demonstrations_are_made_ends_the_run_at_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(cloning_trainer, "collect_demonstrations", lambda *args: signal.raise_signal(signal.SIGINT))
    with pytest.raises(SystemExit) as ended:
        train(config_of(tmp_path, "sft.max_steps=2"))
    assert ended.value.code == 128 + signal.SIGINT
    assert "nothing had been trained yet" in capsys.readouterr().err


def test_a_rank_that_is_done_with_its_demonstrations_stops_with_one_that_heard_the_signal(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(cloning_trainer, "any_rank", lambda _mine: True)
    with pytest.raises(SystemExit):
        train(config_of(tmp_path, "sft.max_steps=2"))
    assert "nothing had been trained yet" in capsys.readouterr().err


def test_a_state_policy_draws_pictures_for_videos_only(tmp_path, monkeypatch):
    drawn = []
    render = StateRenderer.render

    def counted(self, states, camera_ids, shown):
        drawn.append(self.size)
        return render(self, states, camera_ids, shown)

    monkeypatch.setattr(StateRenderer, "render", counted)
    base = [item for item in SMALL if not item.startswith("env.cameras")]
    short = ["trainer.max_steps=1", "evaluation.num_episodes=2", "evaluation.num_videos_per_task=2"]  # a failure too
    for name, more in (("state", []), ("images", ["env.cameras=[front]"])):
        drawn.clear()
        config = build_config(compose_config([*base, *short, *more]))
        config.output_dir = str(tmp_path / name)
        train(config)
        videos = list((tmp_path / name).glob("eval/after_rl/videos/*.mp4"))
        assert videos and drawn.count(config.evaluation.video_size) > 0
        assert (drawn.count(config.env.image_size) > 0) == bool(more)
        assert config.env.image_size != config.evaluation.video_size
