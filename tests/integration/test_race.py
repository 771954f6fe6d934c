"""The race of methods (``benchmarks/race.py``): what it reads from runs, what it calls better, and that it continues where it was stopped."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed (scripts/setup.sh --sims)")
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import race

from rlinf.data.stored import DatasetInfo
from rlinf.errors import ConfigError
from rlinf.evaluation.baselines import plane_offsets

TINY = ["sft.num_demonstrations=4", "sft.max_steps=1", "trainer.max_steps=1", "evaluation.num_episodes=2"]
TINY_HEAD = (
    "rollout.num_envs=2",
    "algorithm.learning_starts=4",
    "algorithm.batch_size=4",
    "algorithm.actor.hidden_size=8",
)


def write_run(folder, rates, *, frozen=True, env_steps=1024):
    """Write what ``race`` reads of a run with 50 episodes at 0, 1, ... iterations."""
    folder.mkdir(parents=True)
    lines = []
    for number, rate in enumerate(rates):
        steps = number * env_steps
        if number:
            costs = {"time/cpu_s": 2.0} | ({"rollout/base_policy_queries": steps + 10} if frozen else {})
            lines.append({"step": number - 1, "phase": "rl", "time_s": number, **costs})
        found = {"eval/success_rate": rate, "eval/successes": round(50 * rate), "eval/episodes": 50}
        lines.append({"step": number, "phase": "rl", "time_s": number, **found, "rollout/env_steps_total": steps})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text("{}")


def test_costs_of_an_evaluation_are_those_of_the_training_before_it(tmp_path):
    write_run(tmp_path / "actor", [0.3, 0.92, 0.96])
    write_run(tmp_path / "whole", [0.3, 0.92], frozen=False)
    first, second, last = race.curve(tmp_path / "actor")
    assert (first.env_steps, first.cpu_s, first.passes) == (0, 0.0, 0)
    assert (last.env_steps, last.cpu_s, last.passes, last.successes) == (2048, 4.0, 2058, 48)
    assert race.to_target([first, second, last]) is second
    assert race.curve(tmp_path / "whole")[1].passes == 1024 * 2, "to act, and to be trained on"


def test_a_method_is_above_noise_if_its_interval_is(tmp_path):
    group = tmp_path / "quickstart" / race.OWN_CLONES
    for seed, last in enumerate((0.94, 0.96, 0.92)):
        write_run(group / f"residual_seed{seed}", [0.3, last])
        write_run(group / f"expo_seed{seed}", [0.3, last - 0.2 * (seed == 0)])
        write_run(group / f"ppo_seed{seed}", [0.3, 0.5, 0.5, 0.9], frozen=False)
    write_run(group / "ppo_seed3", [0.3, 0.5], frozen=False)
    (group / "ppo_seed3" / "summary.json").unlink()  # it was stopped
    runs = race.runs_of(group)
    seeds = {method: sorted(by_seed) for method, by_seed in runs.items()}
    assert seeds == dict.fromkeys(("ppo", "residual", "expo"), [0, 1, 2])
    table = race.table("quickstart", {"uniform noise 1": [(39, 50), (41, 50), (40, 50)]}, runs)
    rows = {row.split(" | ")[0]: row for row in table}
    # 94 % and s = 2 points over three seeds: 94 +- 4.303 * 2 / sqrt(3); noise 80 +- the same
    assert "| 94.0 % (89.0 - 99.0) | yes | 1,024 | 2 | 2 |" in rows["| residual"]
    assert "0*, 1*, 2" in rows["| residual"]
    assert "| 87.3 % (" in rows["| expo"] and "| no | 1,024 |" in rows["| expo"], "control: a wide interval"
    assert "80.0 % (75.0 - 85.0)" in rows["| uniform noise 1"]
    wide = {"uniform noise 1": [(40, 50)] * 3, "uniform noise 0.5": [(30, 50), (39, 50), (45, 50)]}  # 76 %, up to 100
    for controls, above in ((wide, "no"), ({"base": [(10, 50)]}, "")):
        (row,) = (row for row in race.table("quickstart", controls, runs) if row.startswith("| residual"))
        assert f"| 94.0 % (89.0 - 99.0) | {above} | 1,024 |" in row
    result = race.summary({"quickstart": ({}, runs)})
    assert (result["ours"], result["peer"], result["ratio"], result["gap"]) == (1024, 3072, 3.0, "quickstart")


def test_half_of_the_seeds_that_do_not_arrive_are_no_median():
    there, not_there = race.Point(5, 90, 100, 1.0, 5), race.Point(5, 89, 100, 1.0, 5)
    assert race.median_to_target([[there], [there], [not_there]], "env_steps") == 5
    assert race.median_to_target([[there], [not_there]], "env_steps") is None
    assert race.summary({"quickstart": ({}, {})})["ratio"] is None


def test_controls_of_several_clones_are_rates_of_clones_and_those_of_one_are_draws(tmp_path):
    own, one = tmp_path / "quickstart" / race.OWN_CLONES, tmp_path / "quickstart" / f"{race.ONE_CLONE}7"
    drawn = {41: [(39, 50), (41, 50)], 42: [(49, 50), (47, 50)]}
    for group, seeds in ((own, (41, 42)), (one, (41,))):
        group.mkdir(parents=True)
        for seed in seeds:
            counts = {"uniform noise 1": drawn[seed], f"best constant (0.{seed}, 0.00)": [(30, 50)]}
            (group / f"controls_seed{seed}.json").write_text(json.dumps({"settings": {}, "counts": counts}))
    assert race.controls_of(own) == {"uniform noise 1": [(80, 100), (96, 100)], "best constant": [(30, 50), (30, 50)]}
    assert race.controls_of(one) == {"uniform noise 1": [[39, 50], [41, 50]], "best constant (0.41, 0.00)": [[30, 50]]}
    assert race.groups(tmp_path) == {"quickstart, own clones": own, "quickstart, one clone (seed 7)": one}


def test_a_seed_makes_its_own_clone_unless_one_clone_is_asked_for(tmp_path, monkeypatch):
    trained = []

    def train(config):
        folder, overrides = config
        told = dict(each.split("=", 1) for each in overrides)
        source = Path(told["init_from"]).relative_to(tmp_path).as_posix() if "init_from" in told else None
        trained.append((folder.relative_to(tmp_path).as_posix(), told["seed"], source))

    monkeypatch.setattr(race, "make_config", lambda folder, overrides: (folder, overrides))
    monkeypatch.setattr(race, "train", train)
    for seed, one_clone in ((3, None), (4, None), (4, 7)):
        race.race(tmp_path, "quickstart_table", "residual", seed, [], one_clone)
    clones, runs = "quickstart_table/clones", "quickstart_table"
    assert trained == [
        (f"{clones}/seed3", "3", None), (f"{runs}/own_clones/residual_seed3", "3", f"{clones}/seed3"),
        (f"{clones}/seed4", "4", None), (f"{runs}/own_clones/residual_seed4", "4", f"{clones}/seed4"),
        (f"{clones}/seed7", "7", None), (f"{runs}/one_clone_7/residual_seed4", "4", f"{clones}/seed7"),
    ]  # fmt: skip


def test_methods_that_learn_from_episodes_get_those_of_the_clone_and_pay_for_them(tmp_path, monkeypatch):
    trained, played = [], []

    def play(config, settings):
        played.append((config.seed, config.checkpoint, config.evaluation.split, config.evaluation.num_episodes))
        Path(settings.record).mkdir(parents=True)

    monkeypatch.setattr(race, "make_config", lambda folder, overrides: overrides)
    monkeypatch.setattr(race, "train", trained.append)
    monkeypatch.setattr(race, "robot", play)
    for method in ("filtered", "hg_dagger", "recap", "rlpd"):
        race.race(tmp_path, "quickstart", method, 4, [], one_clone=7)
    folder = f"{tmp_path}/quickstart/episodes/seed7/dataset"
    assert played == [(7, f"{tmp_path}/quickstart/clones/seed7", "train", race.NUM_PLAYED)], "once"
    trained = [words for words in trained if any(word.startswith("init_from=") for word in words)]  # not the clones
    assert [f"sft.dataset={folder}" in words for words in trained] == [True, True, True, False]
    assert f"algorithm.offline_dataset={folder}" in trained[-1]
    config = race.compose([*trained[-2], "sft.max_steps=9"])
    assert (config.trainer.max_steps, config.sft.max_steps) == (0, 9), "the later override counts"
    group = tmp_path / "quickstart" / f"{race.ONE_CLONE}7"
    write_run(group / "rlpd_seed4", [0.3, 0.9])
    write_run(group / "residual_seed4", [0.3, 0.9])
    done = {"phase": "sft", "step": 200, "time_s": 9.0, "time/total_s": 8.0, "eval/success_rate": 0.7}
    (group / "recap_seed4").mkdir()
    counts = {"eval/successes": 35, "eval/episodes": 50}
    (group / "recap_seed4" / "metrics.jsonl").write_text(json.dumps(done | counts) + "\n")
    (group / "recap_seed4" / "summary.json").write_text("{}")
    monkeypatch.setattr(race, "describe_dataset", lambda path: DatasetInfo(path, "", 60, {}, {}, "", 2, num_rows=456))
    found = race.runs_of(group)
    assert [point.env_steps for point in found["rlpd"][4]] == [456, 456 + 1024]
    assert [point.env_steps for point in found["residual"][4]] == [0, 1024]
    assert found["recap"][4] == [race.Point(456, 35, 50, 8.0, 456 + 200 * 64)]


def test_the_distilled_policy_clones_the_actor_s_episodes_and_pays_for_them(tmp_path, monkeypatch):
    trained, group = [], tmp_path / "quickstart" / race.OWN_CLONES

    def collect(config):
        assert (config.checkpoint, config.collect.num_episodes) == (str(group / "residual_seed4"), race.NUM_IMPROVED)
        (Path(config.dataset) / "meta").mkdir(parents=True)
        episodes = [{"num_env_steps": 7, "success": True}, {"num_env_steps": 16, "success": False}]
        (Path(config.dataset) / "meta" / "rlinf.json").write_text(json.dumps({"episodes": episodes}))

    monkeypatch.setattr(race, "make_config", lambda folder, overrides: overrides)
    monkeypatch.setattr(race, "train", trained.append)
    monkeypatch.setattr(race, "validate", lambda *_: None)
    monkeypatch.setattr(race, "collect", collect)
    race.race(tmp_path, "quickstart", "distilled", 4, [])
    assert f"sft.dataset={group / 'episodes_of_residual_seed4'}" in trained[-1]
    assert not any("{" in word for words in trained for word in words)
    write_run(group / "residual_seed4", [0.3, 0.9])
    done = {"phase": "sft", "step": 200, "time_s": 9.0, "time/total_s": 8.0, "eval/success_rate": 0.7}
    (group / "distilled_seed4").mkdir()
    (group / "distilled_seed4" / "metrics.jsonl").write_text(
        json.dumps(done | {"eval/successes": 35, "eval/episodes": 50}) + "\n"
    )
    (group / "distilled_seed4" / "summary.json").write_text("{}")
    assert race.runs_of(group)["distilled"][4] == [race.Point(1024 + 23, 35, 50, 8.0 + 2.0, 200 * 64 + 1034 + 23)]


def test_the_experiment_of_a_residual_actor_has_the_settings_of_the_race():
    packaged, gap = race.compose(["experiment=quickstart_residual"]), race.compose(["experiment=quickstart"])
    raced = race.compose(["experiment=quickstart", *race.METHODS["residual"].overrides])
    for section in ("model", "env", "rollout", "sft", "algorithm"):
        assert getattr(packaged, section) == getattr(raced, section), section
    assert (packaged.model.features, gap.model.features) == ("pooled", "hidden"), "a control"


def test_a_race_goes_on_where_it_was_stopped(tmp_path, monkeypatch, capsys):
    folder, method = tmp_path, race.METHODS["residual"]
    monkeypatch.setitem(race.METHODS, "residual", replace(method, overrides=(*method.overrides, *TINY_HEAD)))
    command = "race --gaps quickstart_table --methods residual --seeds 0 --output".split()
    monkeypatch.setattr(sys, "argv", [*command, str(folder), *TINY])
    monkeypatch.setattr(race, "plane_offsets", lambda dim: plane_offsets(dim, [0.5], 2))
    monkeypatch.setattr(race, "NOISE_SEEDS", range(2))
    race.main()
    left = folder / "quickstart_table" / race.OWN_CLONES / "residual_seed0"
    controls = left.parent / "controls_seed0.json"
    counts = json.loads(controls.read_text())["counts"]
    assert [len(each) for each in counts.values()] == [1, 2, 2, 1, 1]
    assert (folder / "race.png").read_bytes()[1:4] == b"PNG"
    seeds = json.loads(capsys.readouterr().out.splitlines()[-1])["sizes"]
    assert seeds == {"quickstart_table, own clones": {"residual": 1}}
    assert race.curve(left)[-1].cpu_s > 0
    trained = []
    monkeypatch.setattr(race, "train", lambda config: trained.append(Path(config.output_dir).name))
    race.main()
    assert trained == [], "everything is there"
    present = race.METHODS["residual"]
    with monkeypatch.context() as patch:
        patch.setitem(race.METHODS, "residual", replace(present, overrides=(*present.overrides, "algorithm.gamma=0.9")))
        with pytest.raises(ConfigError, match=r"residual_seed0 was made with other settings: .* -> 0.9\. Delete it"):
            race.race(folder, "quickstart_table", "residual", 0, TINY)
    said = r"controls_seed0.json was made with other settings: env.image_size \d+ -> 40\. Delete"
    with pytest.raises(ConfigError, match=said):
        race.controls(folder, "quickstart_table", 0, [*TINY, "env.image_size=40"])
    controls.write_text(json.dumps(counts))
    said = r"controls_seed0.json does not say with which settings it was made\. Delete it"
    with pytest.raises(ConfigError, match=said):
        race.main()
    (left / "summary.json").unlink()
    race.race(folder, "quickstart_table", "residual", 0, TINY)
    assert trained == ["residual_seed0"] and not left.exists(), "what a stopped run has left is in the way of a new one"
