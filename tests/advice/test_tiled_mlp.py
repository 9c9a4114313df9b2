"""Tiled MLPs give what the modules give, and only what provably can be tiled is."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac.advice.step_changes import changes_of
from autosac.advice.token_wise import why_not_token_wise

WIDTH, LENGTH, BATCH = 16, 48, 4


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate_and_up = nn.Linear(WIDTH, 8 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.gate_and_up(self.norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.mlp = Gated()

    def forward(self, x):
        return self.mlp(x + self.attention(x, x, x, need_weights=False)[0])


class Model(nn.Module):
    def __init__(self, num_blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def loss_fn(loss):
    return loss


def made_inputs():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, LENGTH, WIDTH, generator=generator)


def profiled(model, **options):
    return autosac.profile(
        model, made_inputs(), optimizer="adamw", loss_fn=loss_fn, **options
    )


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("num_tiles", [None, 3, 1000])
def test_output_and_gradients_are_those_of_the_module_but_for_rounding(num_tiles):
    plain, tiled = Model().double(), Model().double()
    assert autosac.tile_mlp(tiled, num_tiles=num_tiles).fqns == tuple(
        f"blocks.{i}.mlp" for i in range(2)
    )
    x, y = (made_inputs().double().requires_grad_() for _ in range(2))

    losses = plain(x), tiled(y)
    for loss in losses:
        loss.backward()

    torch.testing.assert_close(*losses)
    torch.testing.assert_close(x.grad, y.grad)
    for p, q in zip(plain.parameters(), tiled.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_with_one_tile_every_bit_is_that_of_the_module():
    plain, tiled = Model(), Model()
    autosac.tile_mlp(tiled, num_tiles=1)
    x, y = made_inputs().requires_grad_(), made_inputs().requires_grad_()
    plain(x).backward()
    tiled(y).backward()

    assert torch.equal(x.grad, y.grad)
    for p, q in zip(plain.parameters(), tiled.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def measured(model):
    return autosac.calibrate(profiled(model))


def made_tiled(num_blocks=1):
    model = Model(num_blocks)
    autosac.tile_mlp(model)
    return model


@pytest.mark.slow
def test_real_steps_of_a_tiled_model_have_the_peaks_of_the_changed_step():
    profile = measured(Model(1))
    (change,) = (c for c in changes_of(profile, None) if c.name == "tiled MLPs")
    with change.around():
        step = measured(profile.step.model)
        low = autosac.floor(step)
    assert low < autosac.floor(profile)

    plan = autosac.plan(measured(made_tiled()), memory_budget=low)
    verification = autosac.verify(
        *(plan, made_tiled, made_inputs),
        make_optimizer="adamw",
        loss_fn=loss_fn,
        timing_rounds=0,
    )

    assert verification.measured_peak_bytes == low == plan.peak_bytes
    assert verification.baseline_peak_bytes == step.baseline_peak_bytes
    assert verification.identical
    assert "forward" not in vars(profile.step.model.blocks[0].mlp)


@pytest.mark.slowest
def test_the_row_has_the_figures_of_a_model_that_is_tiled_by_hand():
    profile = profiled(Model(1), device="h100")
    budget_bytes = autosac.floor(profile)
    advice = autosac.advise(profile, memory_budget=budget_bytes)
    (row,) = (row for row in advice if row.cell["change"] == "tiled MLPs")
    assert row.cell["results"] == "rounded"

    by_hand = profiled(made_tiled(1), device="h100")
    plan = autosac.plan(by_hand, memory_budget=budget_bytes)
    assert row.floor_bytes == autosac.floor(by_hand) < budget_bytes
    assert row.baseline_peak_bytes == by_hand.baseline_peak_bytes
    assert (row.peak_bytes, row.recompute_ms) == (plan.peak_bytes, plan.recompute_ms)


def test_the_handle_removes_the_tiles():
    model = Model()
    with autosac.tile_mlp(model, "blocks.1.mlp") as tiled:
        assert tiled.fqns == ("blocks.1.mlp",)
        with pytest.raises(autosac.UnsupportedError, match="replaced already"):
            autosac.tile_mlp(model)

    assert all("forward" not in module.__dict__ for module in model.modules())

    tiled = autosac.tile_mlp(model)
    plain = model.blocks[0].mlp.forward
    model.blocks[0].mlp.forward = lambda x: plain(x)
    with pytest.raises(autosac.UnsupportedError, match="cannot be removed"):
        tiled.remove()


class Apart(nn.Module):
    """What lies between two linear layers."""

    def __init__(self, between):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.register_buffer("calls", torch.zeros(()))
        self.between = between
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.between(self, self.up(x)))


class Centred(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(1, keepdim=True)


def counting(module, x):
    module.calls += 1
    return x


MIXING = {
    "mean over tokens": lambda _, x: x - x.mean(1, keepdim=True),
    "mean over the batch": lambda _, x: x - x.mean(0),
    "softmax over tokens": lambda _, x: x.softmax(1),
    "the next token": lambda _, x: x.roll(1, 1),
    "flipped": lambda _, x: x.flip(1),
    "sum so far": lambda _, x: x.cumsum(1),
    "attention": lambda _, x: functional.scaled_dot_product_attention(x, x, x),
    "products of tokens": lambda _, x: x @ (x.mT @ x),
    "sizes reinterpreted": lambda _, x: x.mT.reshape(x.shape),
    "numbers of tokens": lambda _, x: x + torch.arange(x.shape[1])[:, None],
    "the first token": lambda _, x: x * x[:, :1],
    "dropout": lambda _, x: functional.dropout(x, 0.1),
    "how many tokens": lambda _, x: x / x.shape[1],
    "how many elements": lambda _, x: x * x.numel() ** -0.5,
    "a tensor of how many": lambda _, x: (
        x * torch.full((), x.shape[0], device=x.device)
    ),
    "backward that mixes": lambda _, x: Centred.apply(x),
    "state": counting,
}
APART = {
    "nothing": lambda _, x: x,
    "activation": lambda _, x: functional.relu_(x),
    "norm": lambda _, x: functional.layer_norm(x, (16,)),
    "norm by hand": lambda _, x: x * (x.square().mean(-1, keepdim=True) + 1).rsqrt(),
    "parts": lambda _, x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "heads": lambda _, x: x.unflatten(-1, (2, 8)).transpose(-1, -2).flatten(-2),
    "other type": lambda _, x: x.float().to(x.dtype),
}


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_not_tiled(name):
    module = Apart(MIXING[name])

    assert why_not_token_wise(module)
    with pytest.raises(autosac.UnsupportedError, match="cannot be tiled"):
        autosac.tile_mlp(nn.Sequential(module), "0")
    with pytest.raises(autosac.ArgumentError, match="no module that can be tiled"):
        autosac.tile_mlp(nn.Sequential(module))
    assert module.calls == 0


@pytest.mark.parametrize("name", APART)
def test_what_keeps_tokens_apart_is_tiled(name):
    module = Apart(APART[name])
    x = torch.randn(3, 10, 8)
    plain = module(x)

    assert why_not_token_wise(module) == ""
    torch.testing.assert_close(module(x[:, 4:7]), plain[:, 4:7])
    torch.testing.assert_close(module(x[1:2]), plain[1:2])


def test_advice_says_why_nothing_can_be_tiled():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU())
    advice = autosac.advise(
        model, torch.randn(2, 4, 8), loss_fn=lambda y: y.sum(), device="h100"
    )

    assert "no module that can be tiled" in advice.not_simulated["tiled MLPs"]


def test_a_call_that_was_not_looked_at_is_refused():
    module = nn.Sequential(Apart(APART["nothing"]))
    autosac.tile_mlp(module, num_tiles=2)

    with pytest.raises(autosac.UnsupportedError, match="takes one tensor"):
        module(torch.randn(2, 3, 4, 8))
