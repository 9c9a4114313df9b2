"""Functions that reach what is copied, and what else they write to."""

import types

import pytest
import torch
from torch import nn

import autosac

WIDTH = 32


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Activates(Block):
    """Its activation is a lambda that closes over it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4 * WIDTH))
        self.act = lambda x: torch.tanh(x) * self.scale

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Wrapped(Block):
    """Its ``forward`` is replaced by a function around it."""

    def __init__(self):
        super().__init__()
        own = self.forward
        self.forward = lambda x: own(x) * 0.5


class Rebound(Block):
    """Its ``forward`` is replaced by a function that is bound to it."""

    def __init__(self):
        super().__init__()
        self.forward = types.MethodType(
            lambda self, x, own=self.forward: own(x) * 0.5, self
        )


class Blocks(nn.Sequential):
    """Blocks whose results hooks collect in a dict of the model, for its loss."""

    def __init__(self, block=Block):
        super().__init__(*(block() for _ in range(3)))
        self.features = {}
        for index, module in enumerate(self):
            module.register_forward_hook(
                lambda _module, _inputs, output, index=index: self.features.update(
                    {index: output}
                )
            )


class Trainer:
    """What a loss may be a method of."""

    def __init__(self, model):
        self.model = model
        self.num_losses = 0

    def loss(self, output):
        self.num_losses += 1
        features = self.model.features.values()
        return output.square().mean() + sum(f.abs().mean() for f in features)


def rows():
    return torch.randn(64, WIDTH)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("block", [Block, Activates, Wrapped, Rebound])
def test_functions_that_close_over_the_model_are_traced_with_it(block):
    trainers = []

    def make_model():
        trainers[:] = [Trainer(Blocks(block))]
        return trainers[0].model

    model = make_model()
    profile = autosac.profile(
        model, rows(), loss_fn=lambda output: trainers[0].loss(output)
    )
    profile = autosac.calibrate(profile, progress=False)
    plan = autosac.plan(profile, memory_budget=autosac.floor(profile))

    assert trainers[0].model is model
    assert not model.features
    assert trainers[0].num_losses == 0
    done = autosac.verify(
        *(plan, make_model, rows),
        loss_fn=lambda output: trainers[0].loss(output),
        timing_rounds=0,
    )
    assert plan.peak_bytes < plan.baseline_peak_bytes
    assert not done.differences
    # Numbers in the code count twice over, 8 bytes each.
    assert 0 <= plan.peak_bytes - done.measured_peak_bytes <= 64


class Tally:
    """A global object that a loss writes to."""

    num_losses = 0


TALLY = Tally()


class Centred(nn.Module):
    """A loss with state, as DINO's."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))
        self.register_buffer("sums", torch.zeros(WIDTH))
        self.num_losses = 0

    def forward(self, output):
        loss = (output - self.center).square().mean()
        self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
        self.sums.add_(output.detach().sum(0))
        self.num_losses += 1
        return loss


def test_a_forward_that_is_bound_anew_runs_the_modules_that_are_traced():
    model = nn.Sequential(*(Block() for _ in range(3)))
    options = {"loss_fn": lambda y: y.square().mean(), "device": "cpu"}
    plain = autosac.profile(model, torch.randn(4, WIDTH), **options)
    model.forward = types.MethodType(type(model).forward, model)
    bound = autosac.profile(model, torch.randn(4, WIDTH), **options)
    fqns = [[unit.fqn for unit in own.candidates] for own in (plain, bound)]
    assert fqns[0] == fqns[1] != []


@pytest.mark.slow
def test_planning_leaves_what_functions_write_to_as_it_was():
    model, losses, latest, loss_module = Blocks(), [], None, Centred()
    center = loss_module.center

    def hook(_module, _inputs, output):
        nonlocal latest
        latest = output

    def loss_fn(output):
        TALLY.num_losses += 1
        losses.append(loss_module(output) + latest.mean())
        return losses[-1]

    model[1].register_forward_hook(hook)
    autosac.plan(model, rows(), memory_budget="1GiB", loss_fn=loss_fn)

    assert latest is None
    assert losses == []
    assert TALLY.num_losses == 0
    assert loss_module.num_losses == 0
    assert loss_module.center is center
    assert not center.any()
    assert not loss_module.sums.any()


class Momentum(torch.optim.Optimizer):
    """Keeps its options as attributes, and looks at states before they are there."""

    def __init__(self, parameters, beta):
        super().__init__(parameters, {"lr": 0.1})
        self.beta = beta
        self.sums = [torch.zeros_like(p) for p in self.param_groups[0]["params"]]
        for parameter in self.param_groups[0]["params"]:
            assert not self.state[parameter]  # it is a `defaultdict`

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        for parameter, total in zip(group["params"], self.sums, strict=True):
            state = self.state[parameter]
            if not state:
                state["mean"] = torch.zeros_like(parameter)
            state["mean"].lerp_(parameter.grad, 1 - self.beta)
            total.add_(parameter.grad)
            parameter.add_(state["mean"], alpha=-group["lr"])


@pytest.mark.slow
class Centers(nn.Module):
    """A loss that learns."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.ones(4, WIDTH))

    def forward(self, output):
        return torch.cdist(output, self.centers).mean()


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("has_gradient", [False, True])
def test_planning_leaves_gradients_of_what_a_loss_learns_alone(has_gradient):
    centers, offset = Centers(), torch.ones(WIDTH, requires_grad=True)
    gradients = (
        [torch.ones(4, WIDTH), torch.ones(WIDTH)] if has_gradient else [None] * 2
    )
    leaves = [centers.centers, offset]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        leaf.grad = gradient

    autosac.plan(
        Blocks(),
        torch.ones(16, WIDTH),
        memory_budget="1GiB",
        loss_fn=lambda output: centers(output + offset),
    )

    for leaf, gradient in zip(leaves, gradients, strict=True):
        assert leaf.grad is gradient
        assert gradient is None or gradient.eq(1).all()


@pytest.mark.slow
def test_what_an_optimizer_keeps_in_attributes_is_there_all_the_time():
    def peak(make_optimizer):
        model = Blocks()
        profile = autosac.profile(
            model,
            rows(),
            loss_fn=lambda output: output.square().mean(),
            optimizer=make_optimizer(model.parameters()),
        )
        autosac.floor(profile)  # a dry run confirms it
        return profile.baseline_peak_bytes

    parameter_bytes = sum(p.nbytes for p in Blocks().parameters())
    plain = peak(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    own = peak(lambda parameters: Momentum(parameters, 0.9))
    assert own == plain + 2 * parameter_bytes

    rate = torch.tensor(0.1)
    with_rate = peak(lambda parameters: torch.optim.SGD(parameters, lr=rate))
    assert with_rate == plain + rate.nbytes


def test_hooks_of_an_optimizer_are_traced():
    model = Blocks()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    many = 64 * sum(p.nbytes for p in model.parameters())
    optimizer.register_step_post_hook(
        lambda *_: (
            [p.detach().repeat(64, *[1] * (p.dim() - 1)) for p in parameters] and None
        )
    )
    parameters = list(model.parameters())

    profile = autosac.profile(
        model, rows(), loss_fn=lambda output: output.sum(), optimizer=optimizer
    )

    assert profile.baseline_peak_bytes > many
