"""Flow policies of lerobot: their noise, their densities, and the embodiments of X-VLA and GR00T."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from lerobot_folders import ACTIONS, make, theirs, theirs_of
from lerobot_policies import HERE, MARKS, PYTHON, Folders, observation, section

from rlinf.errors import CheckpointError, ConfigError
from rlinf.models import build_policy
from rlinf.models.embodiment.lerobot import check
from rlinf.models.embodiment.lerobot.chunks import xvla_chunk
from rlinf.models.embodiment.lerobot.policy import LerobotPolicy
from rlinf.models.embodiment.lerobot.runner import greedy_noise
from rlinf.models.embodiment.lerobot.smolvla import SmolVLAConfig, SmolVLAPolicy
from rlinf.models.embodiment.lerobot.worker import runs_here

pytestmark = MARKS
LAST = {"smolvla": "model.action_out_proj", "groot": "_groot_model.action_head.action_decoder.layer2"}
"""The layer that predicts the velocity."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """Folders of all types."""
    return Folders(tmp_path_factory.mktemp("folders"))


@pytest.mark.parametrize("kind", ["xvla", "groot"])
def test_types_with_embodiments_act_in_an_own_interpreter(kind: str, folders: Folders) -> None:
    """As in this process where lerobot imports; elsewhere by their noise, which gives other chunks."""
    found = build_policy({"model": section(folders[kind], interpreter=PYTHON)})
    inputs = found.preprocess(observation())
    proposed = found.propose(inputs, 2)
    assert proposed.chunks.shape == (3, 2, 4, ACTIONS) and bool(torch.isfinite(proposed.chunks).all())
    assert float((proposed.chunks[:, 0] - proposed.chunks[:, 1]).abs().max()) > 1e-4
    if runs_here():
        here = build_policy({"model": section(folders[kind])}).propose(inputs)
        torch.testing.assert_close(proposed.chunks[:, :1], here.chunks, rtol=0, atol=1e-6)
        torch.testing.assert_close(proposed.features, here.features, rtol=0, atol=1e-6)


@HERE
@pytest.mark.parametrize("kind", ["smolvla", "xvla", "groot"])
def test_a_flow_is_steered_by_its_noise(kind: str, folders: Folders) -> None:
    """``sample`` and ``propose`` agree; other noise gives other chunks, and the greedy chunk comes first."""
    model = build_policy({"model": section(folders[kind])})
    inputs = model.preprocess(observation())
    uniforms = torch.rand(3, 2, model.num_candidate_uniforms, generator=torch.Generator().manual_seed(3)).clamp_min(
        1e-6
    )
    found = model.propose(inputs, 3, uniforms, resumable=True)
    torch.testing.assert_close(found.sample(uniforms), found.chunks[:, 1:], rtol=0, atol=1e-6)
    assert float((found.chunks[:, 1] - found.chunks[:, 2]).abs().max()) > 1e-4
    assert float((found.features[0] - found.features[1]).abs().max()) > 1e-5


@HERE
@pytest.mark.parametrize("kind", ["smolvla", "xvla", "groot"])
def test_features_of_an_actor_contain_the_robots_state(kind: str, folders: Folders) -> None:
    model, rows = build_policy({"model": section(folders[kind])}), observation()
    before = model.propose(model.preprocess(rows)).features
    assert torch.equal(model.propose(model.preprocess(rows)).features, before)
    rows.state[:] += 0.3
    assert float((model.propose(model.preprocess(rows)).features - before).abs().max()) > 0.02


@HERE
@pytest.mark.parametrize("kind", ["smolvla", "groot"])
def test_threads_of_a_rollout_do_not_mix_their_rows(kind: str, folders: Folders) -> None:
    """GR00T's backbone stores values of the rows being processed; without a lock, some prefixes differ."""
    model = build_policy({"model": section(folders[kind], model_type=kind)})
    rows = observation()
    rows.instruction[1:] = ["push the green cube in the zone", "stand still"]
    inputs = [model.preprocess(part) for part in (rows, rows.select([2]))]
    with torch.no_grad():
        expected = [model.encode_prefix(**part).states for part in inputs]
        with ThreadPoolExecutor(2) as pool:
            prefixes = list(pool.map(lambda number: model.encode_prefix(**inputs[number % 2]).states, range(60)))
    assert expected[0].shape != expected[1].shape
    for number, states in enumerate(prefixes):
        assert torch.equal(states, expected[number % 2])


@HERE
@pytest.mark.parametrize("kind", ["xvla", "groot"])
def test_a_row_does_not_depend_on_longer_prompts_in_its_batch(kind: str, folders: Folders) -> None:
    """A row acts alone as among others; lerobot's own GR00T attends to the padding of its prompt (the control)."""
    model = build_policy({"model": section(folders[kind])})
    rows = observation()
    rows.instruction[1:] = ["push the green cube in the zone", "stand still"]
    together = model.propose(model.preprocess(rows))
    alone = model.propose(model.preprocess(rows.select([2])))
    torch.testing.assert_close(together.chunks[2:], alone.chunks, rtol=0, atol=1e-6)
    torch.testing.assert_close(together.features[2:], alone.features, rtol=0, atol=1e-6)
    assert float((together.features[2] - together.features[1]).abs().max()) > 1e-4
    if kind == "groot":
        policy, before, _ = theirs(folders[kind])
        states = []
        for given in (rows, rows.select([2])):
            inputs = policy._filter_groot_inputs(before(theirs_of(given)), include_action=False)
            observed, acting = policy._groot_model.prepare_input(inputs)
            with torch.no_grad():
                encoded = policy._groot_model.action_head._encode_features(
                    policy._groot_model.backbone(observed), acting
                )
            states.append(encoded.backbone_features[-1, -1])
        assert float((states[0] - states[1]).abs().max()) > 1e-4


@HERE
def test_the_domain_of_the_folder_chooses_the_soft_prompt(folders: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    shutil.copytree(folders["xvla"], folder)
    file = folder / "policy_preprocessor.json"
    file.write_text(file.read_text().replace('"domain_id": 0', '"domain_id": 2'))
    found = [build_policy({"model": section(each)}) for each in (folders["xvla"], folder)]
    first, second = (
        each.predict_action_batch(do_sample=False, **each.preprocess(observation())).actions for each in found
    )
    assert float((first - second).abs().max()) > 1e-3


@HERE
def test_groups_of_actions_have_their_own_statistics(folders: Folders, tmp_path: Path) -> None:
    """The flat statistics, written as one group, give the same actions and range; others do not."""
    shutil.copytree(folders["groot"], tmp_path / "groups")
    plain = build_policy({"model": section(folders["groot"])})
    learnt = plain.config.norm_stats["lerobot"]["action"]
    expected = plain.predict_action_batch(do_sample=False, **plain.preprocess(observation())).actions
    file = tmp_path / "groups" / "policy_postprocessor.json"
    for low, equal in ((learnt["min"], True), ([each - 1 for each in learnt["min"]], False)):
        action = {"modality_keys": ["arm"], "action_configs": [{}]}
        settings = {"env_action_dim": ACTIONS, "modality_config": {"action": action}}
        settings["raw_stats"] = {"action": {"arm": {"min": low, "max": learnt["max"]}}}
        step = {"registry_name": "groot_n1_7_action_decode_v1", "config": settings}
        file.write_text(json.dumps({"name": "policy_postprocessor", "steps": [step]}))
        if not equal:  # both files would have to agree
            with pytest.raises(CheckpointError, match="units"):
                build_policy({"model": section(tmp_path / "groups")})
            continue
        model = build_policy({"model": section(tmp_path / "groups")})
        found = model.predict_action_batch(do_sample=False, **model.preprocess(observation())).actions
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(model.action_range.half, plain.action_range.half, rtol=1e-6)


@HERE
def test_actions_of_a_wrong_width_and_images_that_are_absent(tmp_path: Path) -> None:
    """An action space of 20 numbers is refused for 2 actions; an image without a camera is padded by X-VLA itself."""
    identity = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "IDENTITY")
    folder = make("xvla", tmp_path / "wide", action_mode="ee6d", max_state_dim=32, normalization_mapping=identity)
    with pytest.raises(CheckpointError, match="2 dimensions in config.json, but 20"):
        build_policy({"model": section(folder)})
    folder = make("xvla", tmp_path / "two", cameras=("front", "wrist"))
    model = build_policy({"model": section(folder, override_config={"cameras": {"wrist": None}})})
    policy, before, after = theirs(folder)
    noise = greedy_noise(model.config.noise_shape).repeat(3, 1, 1)
    expected = after(xvla_chunk(policy, before(theirs_of(observation())), noise, 1)[:, 0])
    found = model.predict_action_batch(do_sample=False, **model.preprocess(observation())).actions[:, 0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="'observation.images.wrist' from a camera"):
        build_policy({"model": section(folder)}).preprocess(observation())


@HERE
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("kind", ["smolvla", "groot"])
def test_a_flow_is_scored_as_it_was_sampled_and_without_noise_is_lerobots(
    kind: str, joint: bool, folders: Folders, tmp_path: Path
) -> None:
    """Log-probabilities are the Gaussians of lerobot's own velocities, written out; a row does not depend on the others."""
    settings = {"joint_logprob": joint, "noise_level": 0.3}
    own = section(folders[kind], model_type=kind)
    model = build_policy({"model": own}, settings)
    inputs = model.preprocess(observation())
    uniforms = torch.rand(3, model.num_uniforms, generator=torch.Generator().manual_seed(3))
    acted = model.predict_action_batch(uniforms=uniforms, **inputs)
    scored = model.evaluate_actions(inputs, acted.sequences)
    torch.testing.assert_close(scored.logprobs, model.rollout_logprobs(acted), rtol=0, atol=1e-6)
    torch.testing.assert_close(scored.values, acted.values, rtol=0, atol=1e-6)
    alone = model.evaluate_actions({name: each[1:2] for name, each in inputs.items()}, acted.sequences[1:2])
    torch.testing.assert_close(alone.logprobs, scored.logprobs[1:2], rtol=0, atol=1e-5)

    horizon, width, num_steps = *model.flow_shape, model.config.num_steps
    chain = acted.sequences[:, :-1].unflatten(1, (num_steps + 1, horizon, width))
    step, terms = acted.sequences[:, -1].long(), []
    prefix = model.encode_prefix(**inputs)
    for index in range(num_steps):
        t, d = 1 - index / num_steps, 1 / num_steps
        x, velocity = chain[:, index], model.velocity(prefix, None, chain[:, index], torch.full((3,), t))[0]
        s = 0.3 * (t / (1 - min(t, 1 - d))) ** 0.5
        mean = x - velocity * d - s**2 * d / (2 * t) * (x + (1 - t) * velocity)
        terms.append(torch.distributions.Normal(mean, s * d**0.5).log_prob(chain[:, index + 1]))
    if joint:
        first = torch.distributions.Normal(0.0, 1.0).log_prob(chain[:, 0])
        expected = torch.stack([first, *terms], 1).mean(1)
    else:
        expected = torch.stack(terms, 1)[torch.arange(3), step]
    expected = expected[:, : model.action_chunks_len, :ACTIONS].flatten(1)
    torch.testing.assert_close(scored.logprobs, expected, rtol=1e-4, atol=1e-4)
    weight = next(model.policy.get_submodule(LAST[kind]).parameters())
    gradients = [torch.autograd.grad(each.sum(), weight, retain_graph=True)[0] for each in (scored.logprobs, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    assert float(gradients[0].abs().max()) > 1e-2

    frozen = build_policy({"model": section(folders[kind])})
    greedy = [each.predict_action_batch(do_sample=False, **inputs).actions for each in (model, frozen)]
    torch.testing.assert_close(*greedy, rtol=0, atol=1e-6)

    scored.logprobs.sum().backward()
    learns = {name for name, each in model.named_parameters() if each.grad is not None and float(each.grad.abs().max())}
    last, vlm = LAST[kind], model.vlm_name
    assert any(last in name for name in learns) and not any(vlm in name for name in learns)
    with torch.no_grad():
        for module in (model.value_head, model.policy.get_submodule(last)):
            next(module.parameters()).add_(0.1)
    changed = model.predict_action_batch(uniforms=uniforms, **inputs)
    model.save_pretrained(tmp_path / "out")
    again = build_policy({"model": own | {"model_path": str(tmp_path / "out")}}, settings)
    found = again.predict_action_batch(uniforms=uniforms, **inputs)
    assert torch.equal(found.actions, changed.actions) and torch.equal(found.values, changed.values)
    assert not torch.equal(found.actions, acted.actions) and check.report(tmp_path / "out")[1] == []


def test_a_flow_that_cannot_be_trained_is_refused(folders: Folders) -> None:
    with pytest.raises(ConfigError, match="type act.*model=lerobot"):
        build_policy({"model": section(folders["act"], model_type="smolvla")})
    config = build_policy({"model": section(folders["smolvla"], interpreter=PYTHON)}).config
    with pytest.raises(ConfigError, match="model=smolvla"):
        LerobotPolicy.check_rl(config)
    given = SmolVLAConfig(noise_method="flow_ode")
    with pytest.raises(ConfigError, match="flow_sde"):
        SmolVLAPolicy.check_rl(given)
    with pytest.raises(ConfigError, match="noise_method"):
        SmolVLAConfig(noise_method="flow_noise")
