"""Labels of rows by their advantages (RECAP), and the prompts in which a policy reads them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from run_results import clone, run_config

from rlinf import load_policy
from rlinf.checkpoints.folders import read_loop_state, resolve_checkpoint
from rlinf.data import recap as module
from rlinf.data.config import BAD, GOOD, SFTConfig
from rlinf.data.filters import filtered_rows
from rlinf.data.recap import advantages, cross_fitted_values, label_rows, largest, steps_to_success
from rlinf.data.stored import DatasetInfo, Outcomes, StoredDemonstrations
from rlinf.errors import ConfigError, ManifestMismatchError
from rlinf.models import build_policy
from rlinf.models.building import check_prompt_suffix
from rlinf.models.config import ModelConfig
from rlinf.models.embodiment.openvla.policy import OpenVLAForRLActionPrediction
from rlinf.preflight.conditions import build_manifest
from rlinf.preflight.validation import check_sft
from rlinf.robot.command import robot
from rlinf.robot.config import RobotConfig
from rlinf.training.cloning_trainer import check_labels_are_read
from rlinf.types import Observation

LAST_ROWS = np.array([3, 3, 3, 3, 6, 6, 6, 8, 8])  # episodes of 4, 3 and 2 rows
SUCCESS = np.array([0, 1, 0, 1, 0, 0, 0, 0, 1], bool)


def test_returns_by_hand():
    """Two actions to the first success, of 4 at most; the failure; two actions."""
    returns, longest = steps_to_success(SUCCESS, LAST_ROWS)
    assert longest == 4 and returns.tolist() == [-0.5, -0.25, 0, 0, -1, -1, -1, -0.5, -0.25]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (None, [-0.5, 0.25, -0.5]),
        (3, [-0.5, 0.25, -0.5]),  # the episode ends before
        (1, [-0.25 - 1.25 + 0.5, -0.25 - 0.5 + 1.25, -1 + 0.5]),
    ],
)
def test_advantages_of_a_failure_by_hand(steps, expected):
    """Values -0.5, -1.25 and -0.5 of the failure's rows. After one row: -1/4 + V' - V."""
    values = np.array([0, 0, 0, 0, -0.5, -1.25, -0.5, 0, 0])
    found = advantages(steps_to_success(SUCCESS, LAST_ROWS)[0], values, LAST_ROWS, 4, steps)
    assert found[4:7].tolist() == expected


def test_a_success_within_the_steps_ends_the_count():
    values = np.full(9, -0.5)
    found = advantages(steps_to_success(SUCCESS, LAST_ROWS)[0], values, LAST_ROWS, 4, 2)
    assert found[:4].tolist() == [0, 0.25, 0.5, 0.5]
    assert advantages(steps_to_success(SUCCESS, LAST_ROWS)[0], values, LAST_ROWS, 4, 1)[7:].tolist() == [-0.25, 0.25]


def test_the_largest_share_of_each_group():
    found = largest(np.array([5, 1, 4, 2, -9, -8, -7, -6.0]), np.array([0, 0, 0, 0, 7, 7, 7, 7]), 0.5)
    assert found.tolist() == [1, 0, 1, 0, 0, 0, 1, 1]
    assert not largest(np.arange(3.0), np.zeros(3), 0.0).any() and largest(np.arange(3.0), np.zeros(3), 1.0).all()


# -- a value model ---------------------------------------------------------------------------------------------------------


def walks(num_episodes=12, intervention=None):
    """Episodes that walk to the right edge, 2 pixels an action; in odd ones, the third action walks back."""
    generator, places, actions, ids, success = np.random.default_rng(0), [], [], [], []
    for episode in range(num_episodes):
        place, step = int(generator.integers(0, 3)), 0
        while place < 13:
            move = -2 if episode % 2 and step == 2 else 2
            places, actions, ids = [*places, place], [*actions, [float(move)]], [*ids, episode]
            place, step = max(0, place + move), step + 1
            success.append(place >= 13)
    zeros, success = np.zeros(len(ids), bool), np.array(success)
    info = DatasetInfo("data/walks", "LeRobotDataset v3.0", num_episodes, {}, {}, "observation.state", 1)
    outcomes = Outcomes(
        np.array(actions, np.float32), None, success, success, zeros if intervention is None else intervention
    )
    state, ids = np.array(places, np.float32)[:, None], np.array(ids)
    return StoredDemonstrations(info, {}, state, outcomes.executed, np.zeros(len(ids), int), ["go"], ids, 1, outcomes)


def labels(dataset, seed=0, **settings):
    """The features are the place, twice."""
    return label_rows(dataset, torch.from_numpy(dataset.state).repeat(1, 2), SFTConfig(**settings), seed)


def test_a_step_back_is_labelled_as_bad(monkeypatch):
    dataset = walks()
    is_good, is_back = labels(dataset, advantage_top_fraction=0.8, advantage_steps=1), dataset.actions[:, 0] < 0
    assert not is_good[is_back].any() and is_good.sum() == round(0.8 * len(dataset))
    returns, _ = steps_to_success(dataset.outcomes.success, dataset.last_rows)
    values = cross_fitted_values(torch.from_numpy(dataset.state), returns, dataset.last_rows, 0)
    assert np.corrcoef(values, returns)[0, 1] > 0.7
    # A person's rows are good whatever their values are.
    dataset.outcomes = replace(dataset.outcomes, intervention=is_back)
    monkeypatch.setattr(module, "cross_fitted_values", lambda features, returns, *rest: returns)
    assert labels(dataset, advantage_top_fraction=0.0).tolist() == is_back.tolist()


def test_an_episode_is_valued_by_a_network_that_has_not_seen_it():
    """Eight episodes of two rows at the same place: one of them fails, which the others cannot foretell."""
    last_rows, returns = np.repeat(np.arange(1, 16, 2), 2), np.full(16, -0.25, np.float32)
    returns[:2] = -1
    torch.manual_seed(3)
    values = cross_fitted_values(torch.zeros(16, 2), returns, last_rows, 0)
    assert values[:2].max() > -0.35 and values[2:].min() < -0.27, "and the others have seen it"
    drawn = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(1)), "the process's random numbers are not used"


def test_four_episodes_are_valued_by_three_others_each():
    """Nothing tells the episodes apart, so a value is the mean return of the other three: -0.25, or (-1 - 2 * 0.25) / 3 = -0.5."""
    last_rows, returns = np.repeat(np.arange(1, 8, 2), 2), np.full(8, -0.25, np.float32)
    returns[:2] = -1
    values = cross_fitted_values(torch.zeros(8, 2), returns, last_rows, 0)
    assert values.tolist() == pytest.approx([-0.25] * 2 + [-0.5] * 6, abs=0.03), "with the own episode: -0.44"


def test_each_instruction_has_its_share_of_good_rows(monkeypatch):
    """All advantages of one instruction are above those of the other, whose own best half is good all the same."""
    dataset = walks()
    dataset.task_ids = (dataset.episode_ids >= 6).astype(int)
    monkeypatch.setattr(
        module, "cross_fitted_values", lambda features, returns, *rest: np.where(dataset.task_ids == 0, -9.0, 9.0)
    )
    is_good = labels(dataset, advantage_top_fraction=0.5)
    counts = [
        (int(is_good[own].sum()), round(0.5 * own.sum())) for own in (dataset.task_ids == 0, dataset.task_ids == 1)
    ]
    assert all(good == wanted > 0 for good, wanted in counts)


def test_no_success_and_few_episodes_and_no_good_row_are_refused(monkeypatch):
    monkeypatch.setattr(module, "cross_fitted_values", lambda features, returns, *rest: returns)
    with pytest.raises(ConfigError, match="has 3 episodes, 3 of them successful"):
        labels(walks(3), advantage_top_fraction=0.3)
    dataset = walks(5)
    with pytest.raises(ConfigError, match="no row"):
        labels(dataset, advantage_top_fraction=0.0)
    dataset.outcomes = replace(dataset.outcomes, success=np.zeros(len(dataset), bool))
    with pytest.raises(ConfigError, match="0 of them successful"):
        labels(dataset, advantage_top_fraction=0.3)


def test_rows_have_their_labels_two_times_of_three():
    dataset = walks(4)
    is_good = dataset.actions[:, 0] > 0
    source = filtered_rows(dataset, SFTConfig(advantage_top_fraction=0.3), is_good)
    observation, actions = source.rows(np.arange(len(source)))
    found = [
        (suffix, action > 0) for suffix, action in zip(observation.suffixes, actions[:, 0, 0].tolist(), strict=True)
    ]
    good, bad = int(is_good.sum()), int((~is_good).sum())
    assert {each: found.count(each) for each in found} == {
        (GOOD, True): 2 * good, (BAD, False): 2 * bad, ("", True): good, ("", False): bad
    }  # fmt: skip


# -- prompts -----------------------------------------------------------------------------------------------------------------


def seen(**more):
    return Observation({"front": np.zeros((2, 64, 64, 3), np.uint8)}, None, ["reach the red block"] * 2, **more)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    words = ("env=tabletop", "env.tasks=[reach]", "model=openvla_tiny", f"model.prompt_suffix={GOOD}", "env.state=none")
    config = run_config(tmp_path_factory.mktemp("run"), *words)
    return config, build_policy(config)


def test_a_policy_acts_by_its_suffix_and_learns_by_those_of_the_rows(policy):
    config, model = policy
    ids = model.preprocess(seen())["input_ids"]
    assert torch.equal(ids, model.preprocess(seen(suffixes=[GOOD, GOOD]))["input_ids"])
    assert model.instructions(seen()) == ["reach the red block. good"] * 2
    assert model.instructions(seen(suffixes=["", BAD]).select([1, 0])) == [
        "reach the red block. bad", "reach the red block"
    ]  # fmt: skip
    mixed = model.preprocess(seen(suffixes=["", BAD]))["input_ids"]
    assert not torch.equal(mixed[0], mixed[1])
    assert model.prompt_lengths(seen())[0] > model.prompt_lengths(seen(suffixes=["", ""]))[0]
    assert build_manifest(config, model, policy_version=0).preprocessing["prompt_suffix"] == GOOD
    model.prompt_suffix = ""
    assert torch.equal(model.preprocess(seen())["input_ids"], model.preprocess(seen(suffixes=["", ""]))["input_ids"])
    model.prompt_suffix = GOOD


def test_words_that_a_tokenizer_does_not_tell_apart_are_refused(policy, monkeypatch):
    model = policy[1]
    check_labels_are_read(model, seen())
    monkeypatch.setattr(model.processor, "_prompt_ids", {})
    own = model.processor.tokenizer

    class Vocabulary:
        """Knows the words of an instruction; any other is one token."""

        bos_token_id, pad_token_id = own.bos_token_id, own.pad_token_id

        def __call__(self, prompt, **_):
            known = ["reach", "the", "red", "block", "advantage"]
            return {"input_ids": [2 + known.index(word) if word in known else 9 for word in prompt.split()]}

    monkeypatch.setattr(model.processor, "tokenizer", Vocabulary())
    with pytest.raises(ConfigError, match="sft.advantage_top_fraction"):
        check_labels_are_read(model, seen())


def test_a_policy_that_reads_no_prompt_is_refused(tmp_path):
    words = ("env=tabletop", "env.tasks=[reach]", "model=mlp", "env.state=full")
    config = run_config(tmp_path / "run", *words)
    model = build_policy(config)
    state = np.zeros((2, model.config.state_dim), np.float32)
    with pytest.raises(ConfigError, match="sft.advantage_top_fraction"):
        check_labels_are_read(model, replace(seen(), state=state))


def test_cloning_with_labels_sets_the_words_by_which_the_policy_acts(tmp_path):
    words = ("model=openvla_tiny", "env=tabletop", "sft.max_steps=1", "sft.advantage_top_fraction=0.3")
    assert run_config(tmp_path, *words).model.prompt_suffix == GOOD
    assert run_config(tmp_path, *words, "sft.max_steps=0").model.prompt_suffix is None
    for typed in (BAD, ""):
        assert run_config(tmp_path, *words, f"model.prompt_suffix='{typed}'").model.prompt_suffix == typed


@pytest.mark.parametrize("text", ["[]", "{}", "no JSON", '{"preprocessing": 3}'])
def test_manifests_of_other_projects_are_no_obstacle(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    check_prompt_suffix(ModelConfig(model_path=str(tmp_path)))
    (tmp_path / "manifest.json").write_text('{"preprocessing": {"prompt_suffix": "good"}}')
    check_prompt_suffix(ModelConfig(model_path=str(tmp_path / "any")))  # not a folder of a checkpoint
    for folder in (tmp_path, tmp_path / "model"):
        with pytest.raises(ConfigError, match="prompt suffix 'good'"):
            check_prompt_suffix(ModelConfig(model_path=str(folder)))


def test_players_are_refused(tmp_path):
    words = ("experiment=quickstart_recap", "sft.dataset=x")
    policy = (OpenVLAForRLActionPrediction, None)
    with pytest.raises(ConfigError, match="cluster.placement=colocated"):
        check_sft(run_config(tmp_path, *words, "trainer.max_steps=1", "cluster.placement=disaggregated"), policy)
    with pytest.raises(ConfigError, match="not a folder"):  # the control gets further
        check_sft(run_config(tmp_path, *words), policy)


def test_a_run_keeps_its_labels_and_its_policy_acts_by_the_good_one(tmp_path, monkeypatch):
    words = (
        "model=openvla_tiny", "env=tabletop", "env.tasks=[reach]", "env.state=none", "env.reward_mode=sparse", "trainer.max_steps=0",
        "evaluation.num_episodes=4", "evaluation.num_envs=2", "evaluation.num_videos_per_task=0", "evaluation.probe=false",
        "tracking.progress=false", "cluster.num_threads=1",
    )  # fmt: skip
    settings = RobotConfig(
        real_time=False, teleoperator="scripted", record=str(tmp_path / "made"), expert_threshold=0.1
    )
    robot(run_config(tmp_path / "eval", *words), settings)
    labelled = (*words, "sft.advantage_top_fraction=0.5", "model.features=pooled", "sft.batch_size=4")
    clone(tmp_path / "run", tmp_path / "made", *labelled, "sft.max_steps=1")
    kept = read_loop_state(resolve_checkpoint(tmp_path / "run"))["trainer"]["labels"]
    assert kept is not None and load_policy(tmp_path / "run", device="cpu").model.prompt_suffix == GOOD

    folder = resolve_checkpoint(tmp_path / "run") / "model"
    with pytest.raises(ConfigError, match="prompt suffix 'good'.*model.prompt_suffix=good"):
        build_policy(run_config(tmp_path / "used", *words, f"model.model_path={folder}", "~model.init_config"))
    for typed in (GOOD, ""):
        used = run_config(
            tmp_path / "used",
            *words,
            f"model.model_path={folder}",
            "~model.init_config",
            f"model.prompt_suffix='{typed}'",
        )
        assert build_policy(used).prompt_suffix == typed

    def label_again(*args):
        raise AssertionError("a resumed run has its labels")

    monkeypatch.setattr("rlinf.training.cloning_trainer.label_rows", label_again)
    clone(tmp_path / "run", tmp_path / "made", *labelled, "sft.max_steps=2", f"resume={tmp_path / 'run'}")
    assert read_loop_state(resolve_checkpoint(tmp_path / "run"))["trainer"]["labels"] == kept
    with pytest.raises(AssertionError, match="has its labels"):
        clone(tmp_path / "new", tmp_path / "made", *labelled, "sft.max_steps=1")
    begun = (*words, "sft.max_steps=1", f"init_from={tmp_path / 'run'}")
    with pytest.raises(ConfigError, match="model.prompt_suffix=good"):
        clone(tmp_path / "other", tmp_path / "made", *begun)
    with pytest.raises(ManifestMismatchError, match="prompt_suffix"):
        clone(tmp_path / "other", tmp_path / "made", *begun, "model.prompt_suffix=''")
