"""Two policies on one list of episodes, of which nobody is told which one acts."""

import json
import logging

import pytest
import torch
from run_results import run_config

from rlinf.commands.open_checkpoint import policy_for
from rlinf.errors import ConfigError, RLinfError
from rlinf.evaluation.result import EvaluationResult
from rlinf.evaluation.sequential import decided_at
from rlinf.evaluation.stopping import UntilDecided
from rlinf.robot import cli
from rlinf.robot.blind import BlindPairs, _anonymous, blind
from rlinf.robot.command import robot
from rlinf.robot.config import RobotConfig
from rlinf.robot.loop import RobotEpisodes
from rlinf.types import EpisodeResult, EpisodeSpec

WORDS = (
    "model=mlp", "env=tabletop", "env.tasks=[reach]", "evaluation.num_episodes=6", "evaluation.probe=false", "tracking.progress=false",
    "cluster.num_threads=1", "evaluation.num_videos_per_task=0",
)  # fmt: skip
CLOCKLESS = RobotConfig(real_time=False)


def policies(folder):
    """Two policies, which the length of their chunks tells apart."""
    return [run_config(folder, *WORDS, f"model.action_chunks_len={length}", "seed=3") for length in (4, 2)]


def played(folder):
    """Episodes of both, as a folder has them."""
    found = [EvaluationResult.from_json(folder / side / "result.json").results for side in ("a", "b")]
    return [[(one.spec, one.success, one.num_env_steps, one.episode_return) for one in results] for results in found]


def kept_file(folder):
    return (folder / "result.partial.jsonl").read_text()


@pytest.fixture
def calls(monkeypatch):
    """Length of the chunks of the policy of each call, and ``-length`` of an episode that it plays."""
    found, act, episode = [], RobotEpisodes._act, RobotEpisodes._episode

    def noted_act(self, row):
        chunk = act(self, row)
        found.append(len(chunk))
        return chunk

    def noted_episode(self, spec):
        found.append(-self.policy.model.action_chunks_len)
        if found.count(-2) + found.count(-4) == getattr(noted_episode, "fails_at", 0):
            raise RLinfError("ws://host:2 has gone")
        return episode(self, spec)

    def seeded(config, env):  # there is no checkpoint
        torch.manual_seed(config.model.action_chunks_len)
        return policy_for(config, env)

    monkeypatch.setattr("rlinf.commands.open_evaluation.policy_for", seeded)
    monkeypatch.setattr(RobotEpisodes, "_act", noted_act)
    monkeypatch.setattr(RobotEpisodes, "_episode", noted_episode)
    return found, noted_episode


def test_each_plays_what_it_plays_alone_and_a_list_that_broke_off_goes_on_in_its_order(tmp_path, calls):
    found, episode = calls
    second, first = policies(tmp_path / "whole")
    comparison = blind(second, first, CLOCKLESS)
    order = [call for call in found if call < 0]
    pairs = [tuple(order[at : at + 2]) for at in range(0, 12, 2)]
    assert {*pairs} == {(-4, -2), (-2, -4)}, "each episode is played by both, in both orders"
    starts = [at for at, call in enumerate(found) if call < 0]
    asked = [found[at + 1 : at + 3] for at in starts[1:]]
    assert asked == [[2, 4]] * 11 and found[1:5] == [2, 2, 4, 4], "both think before an episode, in one order"
    assert comparison.total.episodes == 6 and (tmp_path / "whole" / "b" / "compare.json").is_file()

    for number, config in enumerate(policies(tmp_path / "alone")[::-1]):
        config.output_dir = str(tmp_path / str(number))
        alone = robot(config, CLOCKLESS).results
        assert played(tmp_path / "whole")[number] == [
            (one.spec, one.success, one.num_env_steps, one.episode_return) for one in alone
        ]
    assert played(tmp_path / "whole")[0] != played(tmp_path / "whole")[1], "control"

    found.clear()
    episode.fails_at = 6  # in the middle of a pair
    second, first = policies(tmp_path / "broken")
    with pytest.raises(RLinfError):
        blind(second, first, CLOCKLESS)
    lines = [json.loads(line) for line in kept_file(tmp_path / "broken").splitlines()]
    assert len(lines) == 6 and {key for line in lines[1:] for key in line} == {key for key in lines[1]}
    assert not [path for side in "ab" for path in (tmp_path / "broken" / side).glob("*")], "nothing lies in a folder"
    episode.fails_at = 0
    with pytest.raises(ConfigError, match=r"a\.model\.settings.*b\.model\.settings"):  # the other order
        blind(*policies(tmp_path / "broken")[::-1], CLOCKLESS)
    before = [call for call in found if call < 0]
    found.clear()
    blind(*policies(tmp_path / "broken"), CLOCKLESS)
    assert before[:5] + [call for call in found if call < 0] == order and played(tmp_path / "broken") == played(
        tmp_path / "whole"
    )
    with pytest.raises(ConfigError, match="finished evaluation"):
        blind(*policies(tmp_path / "whole"), CLOCKLESS)


class Always:
    """Episodes of a policy that always succeeds, or never."""

    num_restarts = 0

    def __init__(self, success):
        self.success = success

    def run(self, specs, on_result):
        results = [EpisodeResult(spec, "reach", self.success, 0.0, 5) for spec in specs]
        for result in results:
            on_result(result)
        return results


SPECS = [EpisodeSpec("table", 0, number, 0) for number in range(200)]


def test_the_order_is_a_fair_coin_that_the_seed_throws():
    pairs = BlindPairs([Always(False), Always(True)], [], lambda result: None, seed=1)
    firsts = [pairs.order(spec)[0] for spec in SPECS]
    assert 80 < sum(firsts) < 120 and {pairs.order(spec) for spec in SPECS} == {(0, 1), (1, 0)}
    other = BlindPairs([Always(False), Always(True)], [], lambda result: None, seed=2)
    assert firsts != [other.order(spec)[0] for spec in SPECS]


def test_the_sequential_test_sees_each_pair():
    kept = []
    pairs = BlindPairs([Always(False), Always(True)], [], kept.append, seed=1)
    results = pairs.run(SPECS[:20], lambda result: None)
    assert UntilDecided(pairs.baseline, 200).stop_at(results) == decided_at([1] * 20, 200)
    again = BlindPairs([Always(False), Always(True)], kept[:25], kept.append, seed=1)
    assert {*again.results[0]} | {*again.results[1]} == {*SPECS[:13]} and sum(map(len, again.results)) == 25
    assert {one.success for one in again.results[0].values()} == {False}, "known results go back to their policies"
    assert {one.success for one in again.results[1].values()} == {True}


def test_names_of_policies_are_left_out_of_messages(caplog):
    configs = policies("unused")
    configs[0].checkpoint, configs[1].checkpoint = "/runs/a", "/runs/a/latest"
    with pytest.raises(RLinfError, match="^one of the two policies has gone$"), _anonymous(configs):
        logging.getLogger("rlinf").warning("The connection to %s is lost (%s)", "/runs/a/latest", 7)
        raise ConfigError("/runs/a has gone")
    assert caplog.messages == ["The connection to one of the two policies is lost (7)"]
    logging.getLogger("rlinf").warning("/runs/a")
    assert caplog.messages[1:] == ["/runs/a"], "control"


def test_the_words_name_both_policies(monkeypatch):
    found = []
    monkeypatch.setattr("rlinf.robot.command.robot", lambda *arguments: found.extend(arguments))
    words = ["model=remote", "model.url=ws://b:1", "env=tabletop", "evaluation.stop_when=decided", "blind=ws://a:1"]
    cli.robot(words)
    config, settings, other = found
    assert (config.model.url, other.model.url, settings.blind) == ("ws://b:1", "ws://a:1", "ws://a:1")
    with pytest.raises(ConfigError, match=r"evaluation\.compare=x with blind"):
        cli.robot([*words, "evaluation.compare=x"])
    with pytest.raises(ConfigError, match="Set record=null"):
        robot(config, RobotConfig(blind="ws://a:1", record="r"), other)
