"""The token from which the states of a prefix are said again."""

import torch

from rlinf.models.embodiment.modules.readout_token import KEYFRAME_SCALE, TOKEN_WIDTH, KeyframeReadout, ReadoutToken

HIDDEN, POSITIONS = 16, 6


def states_of(rows: int, seed: int = 0) -> torch.Tensor:
    """States that two numbers of each row decide: ``[rows, POSITIONS, HIDDEN]``."""
    draw = torch.Generator().manual_seed(seed)
    maps = torch.randn(POSITIONS, 2, HIDDEN, generator=torch.Generator().manual_seed(9))
    return torch.einsum("bk,pkh->bph", torch.randn(rows, 2, generator=draw), maps)


def test_a_token_learns_to_say_what_the_states_say():
    torch.manual_seed(0)
    module, held_out = ReadoutToken(HIDDEN), states_of(64, seed=1)
    optimizer, first = torch.optim.Adam(module.parameters(), lr=3e-3), module.loss(held_out, None).mean().item()
    for step in range(80):
        optimizer.zero_grad()
        module.loss(states_of(32, seed=2 + step), None).mean().backward()
        optimizer.step()
    with torch.no_grad():
        last = module.loss(held_out, None).mean().item()
        module.token.zero_()
        module.read.weight.zero_()
        nothing = module.loss(held_out, None).mean().item()
    assert first > 0.8 and last < 0.4 and nothing > 0.8, (first, last, nothing)  # the control: the token says nothing


def test_the_loss_by_hand():
    torch.manual_seed(0)
    module, states = ReadoutToken(HIDDEN), 3 * torch.randn(2, POSITIONS, HIDDEN) + 1
    mask = torch.ones(2, POSITIONS, dtype=torch.bool)
    mask[1, 2] = False
    found, token = module.loss(states, mask), module(states, mask)
    assert token.shape == (2, TOKEN_WIDTH)
    for row, places in enumerate(([0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5])):
        errors = []
        for number, place in enumerate(places):
            rates = 10_000.0 ** (-torch.arange(TOKEN_WIDTH // 2) * 2 / TOKEN_WIDTH)
            code = torch.cat([(number * rates).sin(), (number * rates).cos()])
            state = states[row, place]
            standard = (state - state.mean()) / (state.var(unbiased=False) + 1e-5).sqrt()
            errors.append((module.decoder(token[row] + code) - standard).square().mean())
        torch.testing.assert_close(found[row], torch.stack(errors).mean(), atol=1e-5, rtol=1e-4)


def test_padding_says_nothing_and_no_gradient_reaches_the_states():
    torch.manual_seed(0)
    module, states = ReadoutToken(HIDDEN).eval(), torch.randn(1, POSITIONS, HIDDEN)
    mask = torch.tensor([[True, False, True, True, False, True]])
    short = states[:, mask[0]]
    torch.testing.assert_close(module(states, mask), module(short, None), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(module.loss(states, mask), module.loss(short, None), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(module(states, None), module(short, None), atol=1e-3)  # the control
    states.requires_grad_()
    assert module.loss(states, mask).requires_grad
    module.loss(states, mask).sum().backward()
    assert states.grad is None


def test_the_keyframe_loss_by_hand():
    torch.manual_seed(0)
    module, states, state = KeyframeReadout(HIDDEN, 3, 2), torch.randn(3, POSITIONS, HIDDEN), torch.randn(3, 2)
    actions = torch.randn(3, module.num_actions, 3)
    # The gripper changes before action 2, before action 1, and never.
    actions[..., 2] = torch.tensor([-1.0, 1.0, -1.0])[:, None]
    actions[0, 2:5, 2], actions[1, 1:, 2] = 1.0, -1.0
    losses = module.loss(states.requires_grad_(), None, actions, state)
    expected = []
    for row, count in ((0, 2), (1, 1)):
        error = module.head(torch.cat([states[row].mean(0), state[row]])) - KEYFRAME_SCALE * actions[
            row, :count, :2
        ].sum(0)
        expected.append(torch.where(error.abs() < 1, error.square() / 2, error.abs() - 0.5).mean())
    torch.testing.assert_close(losses, torch.stack([*expected, torch.tensor(0.0)]))
    losses.sum().backward()
    assert states.grad[:2].any(2).all() and not states.grad[2].any(), "it trains the policy where there is a keyframe"
