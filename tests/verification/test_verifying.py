import math
import random
import warnings
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from autosac import calibrate, floor, plan, profile
from autosac.checkpointing import held_memory
from autosac.errors import ArgumentError
from autosac.step.random_streams import seed_streams
from autosac.storages import storage_bytes
from autosac.verification import verifying
from autosac.verification.verifying import Verification, verify

WIDTH, BATCH = 32, 128


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.norm = torch.nn.BatchNorm1d(4 * WIDTH, track_running_stats=False)
        self.dropout = torch.nn.Dropout(0.1)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.dropout(torch.nn.functional.gelu(self.norm(self.up(x)))))


@dataclass(frozen=True)
class Checkpointed:
    """Recomputes every block, with or without the random state it had."""

    peak_bytes: int = 2**20
    budget_bytes: int = 2**40
    preserve_rng_state: bool = True

    def apply(self, model):
        for block in model:
            self._wrap(block)

    def _wrap(self, block):
        forward = block.forward
        options = {"preserve_rng_state": self.preserve_rng_state}
        block.forward = lambda x: checkpoint(forward, x, use_reentrant=False, **options)


def make_model():
    return torch.nn.Sequential(*(Block() for _ in range(4)))


def make_inputs():
    return torch.randn(BATCH, WIDTH)


def make_optimizer(model):
    return torch.optim.AdamW(model.parameters())


def check(plan, **options):
    options = {"make_optimizer": make_optimizer, "timing_rounds": 1} | options
    return verify(plan, make_model, make_inputs, **options)


def test_checkpointing_is_identical_and_lowers_the_peak():
    found = check(Checkpointed(), timing_rounds=2)

    assert found.identical, found.differences
    assert found.measured_peak_bytes < 0.7 * found.baseline_peak_bytes
    assert found.within_budget
    assert found.step_ms > 0 < found.baseline_step_ms


def test_other_gradients_are_caught():
    found = check(Checkpointed(preserve_rng_state=False))

    assert not found.identical
    assert any(line.startswith("gradient of 0.up.weight") for line in found.differences)
    assert "DIFFERS" in str(found)


def test_other_buffers_are_caught():
    def with_statistics():
        return torch.nn.Sequential(torch.nn.BatchNorm1d(WIDTH))

    # Plain checkpointing updates the running statistics twice.
    found = verify(Checkpointed(), with_statistics, make_inputs, timing_rounds=1)

    assert "buffer 0.running_mean" in " ".join(found.differences)


def test_another_stream_of_random_numbers_is_caught():
    class Draws(Checkpointed):
        def apply(self, model):
            model.register_forward_hook(lambda *_: torch.rand(1) and None)

    found = check(Draws(), steps=1)

    assert found.differences[-1].startswith("random state of cpu")


@pytest.mark.parametrize(
    ("name", "draw"), [("Python", random.random), ("NumPy", np.random.rand)]
)
def test_another_stream_of_python_or_numpy_is_caught(name, draw):
    class Draws(Checkpointed):
        def apply(self, model):
            model.register_forward_hook(lambda *_: draw() and None)

    found = check(Draws(), steps=1)

    assert found.differences[-1].startswith(f"random state of {name}: ")


class Masked(torch.nn.Module):
    """Masks a row that NumPy draws, as SpecAugment does, and scales as Python says."""

    def __init__(self):
        super().__init__()
        self.inner = Block()
        self.scale = random.random()

    def forward(self, x):
        mask = torch.ones(BATCH, 1)
        mask[np.random.randint(BATCH)] = 0
        return self.inner(x) * mask * (self.scale + random.random())


@pytest.mark.parametrize("seed", [0, -1, np.int64(3)])
def test_draws_of_python_and_numpy_are_those_of_a_seed(seed):
    class Nothing(Checkpointed):
        def apply(self, model):
            pass

    def masked_inputs():
        return make_inputs() * np.random.rand()

    recipe = {"make_optimizer": make_optimizer, "timing_rounds": 0, "seed": seed}
    found = verify(Nothing(), Masked, masked_inputs, **recipe)

    assert found.identical, found.differences


def test_peak_of_a_linear_layer_is_counted_by_hand():
    class Nothing(Checkpointed):
        def apply(self, model):
            pass

    found = verify(
        Nothing(peak_bytes=1, budget_bytes=1),
        lambda: torch.nn.Linear(WIDTH, WIDTH, bias=False),
        lambda: torch.ones(WIDTH, WIDTH),
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), momentum=0.9),
        loss_fn=lambda output: output.sum(),
        timing_rounds=1,
        extra_bytes=1000,
    )

    # Weight, input, momentum; output, its gradient (the loss's, expanded: matmul
    # makes it contiguous), the weight's; the loss and its gradient, 4 bytes each.
    matrix_bytes = 4 * WIDTH * WIDTH
    assert found.baseline_peak_bytes == 1000 + 6 * matrix_bytes + 8
    assert found.measured_peak_bytes == found.baseline_peak_bytes
    assert not found.within_budget


def test_without_an_optimizer_parameters_stay():
    assert check(Checkpointed(), make_optimizer=None, steps=1).identical


def test_keyword_inputs_and_their_own_loss():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(WIDTH, 1)

        def forward(self, x, target):
            return {"loss": (self.layer(x) - target).square().mean()}

        def __iter__(self):
            return iter(())

    inputs = {"x": torch.ones(4, WIDTH), "target": torch.zeros(4, 1)}

    assert verify(Checkpointed(), Model, lambda: inputs, timing_rounds=1).identical


def test_random_states_are_left_alone():
    def drawn():
        return torch.rand(3).tolist(), random.random(), np.random.rand()

    seed_streams(7)
    expected = drawn()
    seed_streams(7)

    verify(Checkpointed(), lambda: torch.nn.Sequential(Masked()), make_inputs, steps=1)

    assert drawn() == expected


def test_only_one_model_is_alive_at_a_time():
    alive = []

    def counted():
        model = make_model()
        alive.append(torch.utils.weak.WeakIdRef(model))
        assert sum(ref() is not None for ref in alive) == 1
        return model

    verify(Checkpointed(), counted, make_inputs, steps=1, timing_rounds=2)

    assert len(alive) == 4


def test_no_step_is_timed_if_none_is_asked_for():
    found = check(Checkpointed(), timing_rounds=0)

    assert math.isnan(found.step_ms) and math.isnan(found.baseline_step_ms)
    assert found.identical and "step   " not in str(found)


class Counted(torch.nn.Sequential):
    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        return super().forward(x)


def test_the_timed_step_comes_behind_those_in_which_plans_learn(monkeypatch):
    before = []

    def timed(run):
        before.append(run.model.num_calls)
        return 1.0

    monkeypatch.setattr(verifying._Run, "timed_step_ms", timed)
    verify(
        *(Checkpointed(), lambda: Counted(Block(), Block()), make_inputs),
        steps=1,
        timing_rounds=2,
    )

    assert len(before) == 4 and min(before) >= held_memory._MOST_STEPS


@pytest.mark.parametrize(("option", "least"), [("steps", 1), ("timing_rounds", 0)])
def test_refuses_to_run_nothing(option, least):
    message = f"`{option}` must be a whole number of at least {least}, got {least - 1}"
    with pytest.raises(ValueError, match=message):
        check(Checkpointed(), **{option: least - 1})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("extra_bytes", value) for value in ("1MiB", -5)),
        *(("seed", value) for value in ("a", 0.5)),
        ("accumulate", 0),
        ("clip_grad_norm", -1),
    ],
)
def test_numbers_that_cannot_be_meant_are_refused(option, value):
    with pytest.raises(ArgumentError, match=rf"^`{option}` must .*, got {value!r}"):
        check(Checkpointed(), **{option: value})


def test_a_model_that_is_handed_out_again_is_refused_and_left_alone():
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    for hand_out in (lambda: model, cache(make_model)):
        with pytest.raises(ArgumentError, match="the same model each time: let it bui"):
            verify(Checkpointed(), hand_out, make_inputs, make_optimizer=make_optimizer)

    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    profile(model, make_inputs(), loss_fn=torch.sum)  # nothing is applied to it


def test_a_model_whose_parts_hold_it_is_built_anew():
    def cyclic():
        model = make_model()
        model[0].__dict__["parent"] = model
        return model

    assert verify(
        Checkpointed(), cyclic, make_inputs, steps=1, timing_rounds=0
    ).identical


def test_makers_that_take_something_or_make_nothing_are_refused():
    with pytest.raises(ArgumentError, match=r"`make_model` must .* returns None"):
        verify(Checkpointed(), lambda: None, make_inputs)
    with pytest.raises(ArgumentError, match=r"`make_inputs` must .* takes \(size\)"):
        verify(Checkpointed(), make_model, lambda size: torch.randn(size, WIDTH))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_are_dropped_after_forward_count_in_it(accumulate):
    how = {"gradients_in_forward": True, "accumulate": accumulate}
    calibrated = calibrate(
        profile(make_model(), make_inputs(), optimizer=torch.optim.AdamW, **how)
    )
    planned = plan(
        calibrated,
        memory_budget=(floor(calibrated) + calibrated.baseline_peak_bytes) // 2,
    )

    found = check(planned, steps=3, **how)

    assert found.identical
    # Numbers that autograd keeps, as of `loss / accumulate`, count twice.
    assert 0 <= planned.peak_bytes - found.measured_peak_bytes <= 16 * (accumulate - 1)
    dropped_before = check(planned, steps=3, accumulate=accumulate)
    assert dropped_before.measured_peak_bytes <= planned.peak_bytes


def test_units_whose_ops_are_known_run_again_at_the_first_read_as_before():
    how = {"gradients_in_forward": True}
    traced = profile(make_model(), make_inputs(), optimizer=torch.optim.AdamW, **how)
    calibrated = calibrate(traced)
    cheap = ("aten.addmm.default", "aten.native_batch_norm.default")
    op_ms = tuple(0.1 if op.name in cheap else 9.0 for op in calibrated.tape.ops)
    costs = replace(calibrated.costs, op_ms=op_ms)
    least, most = floor(calibrated), calibrated.baseline_peak_bytes
    planned = plan(
        replace(calibrated, costs=costs), memory_budget=least + (most - least) * 2 // 5
    )
    assert 0.0 < planned.policy["3"] < 1.0  # what its last ops read is saved

    for steps in (1, 3):  # the first one finds out which ops run
        found = check(planned, steps=steps, timing_rounds=0, **how)
        assert found.identical
    assert planned.peak_bytes == found.measured_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("gradients_in_forward", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_are_never_dropped_count_all_the_time(
    gradients_in_forward, accumulate
):
    how = {"keeps_gradients": True, "gradients_in_forward": gradients_in_forward}
    how["accumulate"] = accumulate
    traced = calibrate(
        profile(make_model(), make_inputs(), optimizer=torch.optim.AdamW, **how)
    )
    planned = plan(
        traced, memory_budget=(floor(traced) + traced.baseline_peak_bytes) // 2
    )

    found = check(planned, steps=3, **how)

    assert found.identical
    assert 0 <= planned.peak_bytes - found.measured_peak_bytes <= 16 * (accumulate - 1)
    dropped = check(planned, steps=3, accumulate=accumulate)
    assert dropped.measured_peak_bytes < planned.peak_bytes


def test_refuses_models_without_data():
    def meta_model():
        return torch.nn.Linear(2, 2, device="meta")

    with pytest.raises(ValueError, match="it has a meta tensor"):
        verify(Checkpointed(), meta_model, make_inputs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_verifies_on_a_gpu():
    found = verify(
        Checkpointed(),
        lambda: make_model().cuda(),
        lambda: make_inputs().cuda().repeat(256, 1),  # beside cuBLAS's workspaces
        make_optimizer=make_optimizer,
    )

    assert found.identical, found.differences
    assert storage_bytes(make_model().parameters()) < found.measured_peak_bytes
    assert found.measured_peak_bytes < found.baseline_peak_bytes


def test_reads_as_a_short_table():
    found = Verification(
        baseline_peak_bytes=4 * 2**20,
        measured_peak_bytes=2 * 2**20,
        predicted_peak_bytes=3 * 2**19,
        budget_bytes=2 * 2**20,
        baseline_step_ms=10.0,
        step_ms=12.5,
        differences=(),
    )

    assert found.prediction_error == -0.25
    assert str(found).splitlines() == [
        "budget    2.0 MiB kept",
        "peak      2.0 MiB measured, 1.5 MiB predicted (-25.00 %),"
        " 4.0 MiB without the plan",
        "step      12.5 ms measured, 10.0 ms without the plan (+25.0 %)",
        "state     bit-identical after the last step",
    ]


class Remembering(torch.nn.Module):
    """Keeps a tensor that is neither parameter nor buffer from step to step."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.before = torch.nn.Linear(64, 64)
        self.after = torch.nn.Linear(64, 64)
        self.kept = [torch.randn(64, 64)] if how == "from the start" else []

    def forward(self, x):
        if self.how == "from the first step" and not self.kept:
            self.kept.append(torch.randn(64, 64))
        if self.how == "of the last step":
            self.kept = [torch.tanh(x).detach()]
        x = x + (self.kept[0] if len(self.kept[0]) == len(x) else x @ self.kept[0])
        return self.after(torch.relu(self.before(x)).sigmoid())


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    "how", ["from the start", "from the first step", "of the last step"]
)
def test_tensors_that_modules_keep_count_in_the_peak(how):
    inputs = torch.randn(512, 64)
    step = {"loss_fn": lambda out: out.square().mean()}
    traced = calibrate(profile(Remembering(how), inputs, **step), progress=False)
    lowest = plan(traced, memory_budget=floor(traced))

    found = verify(lowest, lambda: Remembering(how), lambda: inputs, **step)

    assert found.prediction_error == 0.0 and found.identical


@pytest.mark.slow
def test_gradients_of_inputs_are_those_of_one_step():
    def make_inputs():
        return torch.randn(BATCH, WIDTH, requires_grad=True)

    step = calibrate(profile(make_model(), make_inputs(), loss_fn=torch.sum))
    lowest = plan(step, memory_budget=floor(step))

    verification = verify(lowest, make_model, make_inputs, loss_fn=torch.sum)

    assert verification.measured_peak_bytes == lowest.peak_bytes
    assert verification.baseline_peak_bytes == step.baseline_peak_bytes


@dataclass
class Batch:
    """A batch as an object, with a part that no op reads."""

    x: torch.Tensor
    unread: list[torch.Tensor]


class TakesObject(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = make_model()

    def forward(self, batch):
        return self.layers(batch.x)


class KeepsBeside(torch.optim.SGD):
    """Keeps a tensor of each parameter, but not in its state."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        trained = self.param_groups[0]["params"]
        self.kept = SimpleNamespace(sums=deque(torch.zeros_like(p) for p in trained))

    def step(self):
        for parameter, total in zip(
            self.param_groups[0]["params"], self.kept.sums, strict=True
        ):
            total.add_(parameter.grad)
        super().step()


@pytest.mark.slow
def test_what_objects_hold_counts_in_batches_and_optimizers():
    unread = torch.randn(64, WIDTH)

    def make_batch():
        return (Batch(make_inputs(), [unread.clone()]),)

    model, step = TakesObject(), {"loss_fn": torch.sum}
    traced = profile(
        model, make_batch(), optimizer=KeepsBeside(model.parameters()), **step
    )
    traced = calibrate(traced, progress=False)
    lowest = plan(traced, memory_budget=floor(traced))
    bare = profile(TakesObject(), (Batch(make_inputs(), []),), **step)

    found = verify(lowest, TakesObject, make_batch, make_optimizer=KeepsBeside, **step)

    beside_bytes = unread.nbytes + sum(p.nbytes for p in model.parameters())
    bare = calibrate(bare, progress=False)
    assert traced.baseline_peak_bytes == bare.baseline_peak_bytes + beside_bytes
    assert found.measured_peak_bytes == lowest.peak_bytes
    assert found.identical


def averaging(model):
    """An optimizer whose hook keeps averages of the weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages = [p.detach().clone() for p in model.parameters()]

    def average(*_):
        for mean, parameter in zip(averages, model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 0.1)

    optimizer.register_step_post_hook(average)
    return optimizer


@pytest.mark.slow
def test_what_hooks_of_an_optimizer_keep_counts():
    model, step = make_model(), {"loss_fn": torch.sum}
    traced = profile(model, make_inputs(), optimizer=averaging(model), **step)
    traced = calibrate(traced, progress=False)
    lowest = plan(traced, memory_budget=floor(traced))

    found = verify(lowest, make_model, make_inputs, make_optimizer=averaging, **step)

    assert found.measured_peak_bytes == lowest.peak_bytes


def test_targets_that_the_loss_reaches_count_unless_bytes_are_given():
    targets = torch.zeros(BATCH, WIDTH)

    def loss_fn(output):
        return (output - targets).square().mean()

    traced = profile(make_model(), make_inputs(), loss_fn=loss_fn)
    whole = plan(calibrate(traced, progress=False), memory_budget="1GiB")
    step = {"loss_fn": loss_fn, "timing_rounds": 0}

    found = verify(whole, make_model, make_inputs, **step)
    given = verify(whole, make_model, make_inputs, **step, extra_bytes=0)

    assert found.measured_peak_bytes == whole.peak_bytes
    assert given.measured_peak_bytes == whole.peak_bytes - targets.nbytes


def test_a_loss_that_is_missing_is_said():
    def squares(output):
        return output.square().mean()

    def make_model():
        return torch.nn.Sequential(Block(), Block())

    def make_inputs():
        return torch.randn(BATCH, WIDTH)

    with_loss = plan(make_model(), make_inputs(), memory_budget="1GiB", loss_fn=squares)
    with pytest.warns(UserWarning, match="with a `loss_fn`, and `verify` got none"):
        verify(with_loss, make_model, make_inputs, timing_rounds=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify(with_loss, make_model, make_inputs, loss_fn=squares, timing_rounds=0)
