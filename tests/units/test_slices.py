import copy
import itertools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

import autosac
from autosac import Plan
from autosac.storages import storage_bytes
from autosac.units.matching import chosen_by
from autosac.verification.measuring import measure_peak

WIDTH, BATCH = 64, 512


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(
        *(layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    )


def rows():
    return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0))


class Vgg(nn.Module):
    """Layers that mutate in place, draw random numbers and count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layers = []
        for fan_in, width in ((3, 16), (16, 32), (32, 32)):
            layers += [
                nn.Conv2d(fan_in, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
                nn.Dropout(0.1),
                nn.MaxPool2d(2),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)))


def images():
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


MODELS = {"perceptron": (perceptron, rows), "vgg": (Vgg, images)}


@pytest.fixture(scope="module", params=["perceptron", "vgg"])
def case(request):
    make_model, make_inputs = MODELS[request.param]
    traced = autosac.profile(make_model(), make_inputs())
    low, high = autosac.floor(traced), traced.baseline_peak_bytes
    # Each is dry-run: it peaks where the simulation says.
    plans = [autosac.plan(traced, memory_budget=b) for b in (low, (low + high) // 2)]
    return traced, plans, make_model, make_inputs


def slices_of(plan):
    return [one for one in plan.op_policies if one.until]


@pytest.mark.slow_but_first
def test_slices_train_bit_identically(case, one_thread):
    _, plans, make_model, make_inputs = case

    assert any(map(slices_of, plans))
    for plan in plans:
        verification = autosac.verify(plan, make_model, make_inputs, timing_rounds=0)
        assert verification.identical
        assert abs(verification.prediction_error) < 0.01  # uncalibrated: no workspaces


def test_a_plan_with_slices_can_be_saved_told_and_taken_back(case, tmp_path):
    built, plans, make_model, _ = case
    plan = next(plan for plan in plans if slices_of(plan))
    plan.save(tmp_path / "plan.json")

    loaded = Plan.load(tmp_path / "plan.json")
    model = loaded.apply(make_model())

    assert loaded == plan
    assert {
        u.label for u in chosen_by(built.tape, built.candidates, plan.op_policies)
    } == {one.label for one in plan.op_policies}
    assert f"{slices_of(plan)[0].label} " in str(plan)
    with pytest.raises(ValueError, match="has a plan already"):
        plan.apply(model)
    plan.unapply(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_names_that_a_policy_has_are_names_of_ac_units(case):
    traced, plans, _, _ = case
    plan = next(plan for plan in plans if slices_of(plan))

    again = autosac.plan(
        traced, memory_budget=plan.budget_bytes, ac_units=list(plan.policy)
    )

    assert any("-" in name for name in plan.policy)
    assert again.policy == plan.policy
    assert again.recompute_ms == plan.recompute_ms
    with pytest.raises(autosac.ArgumentError, match="stands for no module"):
        autosac.plan(traced, memory_budget=1, ac_units=["features.3-features.1"])


def test_a_copy_of_a_sliced_model_is_sliced_and_has_its_own_layers(one_thread):
    traced = autosac.profile(perceptron(), rows())
    plan = autosac.plan(traced, memory_budget=autosac.floor(traced))
    model = plan.apply(perceptron())

    copied = copy.deepcopy(model)
    copied(rows()).sum().backward()

    assert all(p.grad is None for p in model.parameters())
    plain = perceptron()
    plain(rows()).sum().backward()
    for ours, theirs in zip(copied.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_in_another_mode_a_sliced_model_runs_plainly():
    traced = autosac.profile(perceptron(), rows())
    model = autosac.plan(traced, memory_budget=autosac.floor(traced)).apply(
        perceptron()
    )
    events = []

    model.eval()
    with (
        torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: events.append(1) or tensor, lambda tensor: tensor
        ),
        pytest.warns(UserWarning, match="called in eval mode with gradients"),
    ):
        model(rows())

    assert len(events) >= 16  # each layer saves for itself


def real_peak(model, run):
    """Peak of a forward and a backward pass, by the allocator's events."""
    held = storage_bytes([*model.parameters(), x := rows()])
    _, peak_bytes = measure_peak(
        lambda: run(model, x).sum().backward(), device="cpu", persistent_bytes=held
    )
    return peak_bytes


def test_the_floor_is_not_above_that_of_checkpointed_segments(one_thread):
    traced = autosac.profile(perceptron(), rows())
    plan = autosac.plan(traced, memory_budget=autosac.floor(traced))

    ours = real_peak(plan.apply(perceptron()), lambda model, x: model(x))

    for segments in (2, 3, 4, 8):
        theirs = real_peak(
            perceptron(),
            lambda model, x, n=segments: checkpoint_sequential(
                model, n, x, use_reentrant=False
            ),
        )
        assert ours <= theirs


def labels(model, x, **options):
    return [unit.label for unit in autosac.profile(model, x, **options).slices]


def test_slices_nest_and_leave_out_the_whole_sequence():
    traced = autosac.profile(perceptron(), rows())
    calls = [unit.call for unit in traced.slices]

    assert {"0-7", "0-3", "8-15"} <= {unit.label for unit in traced.slices}
    assert "0-15" not in {unit.label for unit in traced.slices}
    for one, other in itertools.combinations(calls, 2):
        apart = one.exit < other.enter or other.exit < one.enter
        assert apart or lies_in(one, other) or lies_in(other, one)


def lies_in(one, other):
    return other.enter <= one.enter and one.exit <= other.exit


def test_layers_that_may_not_be_sliced_are_left_alone():
    class Reversed(nn.Sequential):
        def forward(self, x):
            for layer in reversed(self):
                x = layer(x)
            return x

    act = nn.Tanh()
    shared = [layer for _ in range(8) for layer in (nn.Linear(WIDTH, WIDTH), act)]
    twice = nn.Sequential(perceptron(), nn.Flatten())
    twice.append(twice[0])

    assert labels(nn.Sequential(*perceptron()[:5]), rows()) == []  # short
    assert labels(Reversed(*perceptron()), rows()) == []
    assert labels(nn.Sequential(*shared), rows()) == []
    assert labels(twice, rows()) == []
    assert (
        labels(nn.Sequential(perceptron(), nn.Flatten()), rows(), exclude=("0",)) == []
    )
    around = labels(perceptron(), rows(), exclude=("7",))
    assert around and all(not name.endswith("-7") for name in around)
    assert "8-15" in around and "0-7" not in around
