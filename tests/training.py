"""Planned models in training, and what is left of it."""

import bisect
import gc

import torch
from torch import nn
from torch.profiler import record_function

from autosac.checkpointing import installing
from autosac.devices.allocator_events import cpu_events, recorded_events
from autosac.planning.spelling import spell_out
from autosac.step.training_step import normalize_inputs, training_step
from autosac.verification.measuring import capture_state, differences
from tests.models import BATCH, WIDTH, random_choice, shared_profile


def random_policies(case, seed=0, **options):
    traced = shared_profile(case)
    return spell_out(traced, random_choice(traced, seed, **options))


def planned(case, seed=0, **options):
    model = case.model()
    installing.install(model, random_policies(case, seed, **options))
    assert installing.installed(model)
    return model


def train(case, model, steps=2):
    """The states after each step, random generators and gradients included."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    args, kwargs = normalize_inputs(case.inputs())
    states = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        for _ in range(steps):
            model.zero_grad()
            loss = training_step(
                model, args, kwargs, loss_fn=case.loss_fn, optimizer=optimizer
            )
            states.append(capture_state(model, optimizer, loss))
    return states


def assert_equal(expected, actual):
    for before, after in zip(expected, actual, strict=True):
        assert differences(before, after) == ()


def peaks_of_training(make_step, num_steps):
    """Peaks of real steps, of all that is made in ``make_step`` and since."""
    with cpu_events() as recording:
        step = make_step()
        for _ in range(num_steps):
            gc.collect()
            with record_function("autosac::step"):
                step()
    starts, ends, changes = [], [], []
    for event in recorded_events(recording):
        kind, fields = event.typed
        if kind.name == "Allocation":
            changes.append((event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name == "autosac::step":
            starts.append(event.start_time_ns)
            ends.append(event.end_time_ns)
    sizes, live, times = {}, [0], []
    for time, address, num_bytes in sorted(changes, key=lambda change: change[0]):
        change = num_bytes if num_bytes > 0 else -sizes.pop(address, 0)
        sizes |= {address: num_bytes} if num_bytes > 0 else {}
        times.append(time)
        live.append(live[-1] + change)
    return [
        max(live[bisect.bisect(times, start) : bisect.bisect(times, end) + 1])
        for start, end in zip(starts, ends, strict=True)
    ]


class Branching(nn.Module):
    """Takes another branch when ``branch`` is set."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.branch = "usual"

    def forward(self, x):
        hidden = self.linear(x)
        gate = torch.sigmoid(hidden)
        hidden = torch.tanh(hidden)
        if self.branch == "random":
            gate = nn.functional.dropout(gate, 0.5)
        elif self.branch == "longer":
            gate = torch.sin(gate) * torch.cos(hidden)
        elif self.branch == "wide" and x.shape[0] > BATCH:
            gate = gate.reshape(-1).exp().view_as(gate)
        elif self.branch == "shorter":
            return gate
        return torch.exp(hidden * gate)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([Branching(), Branching()])

    def forward(self, x):
        return self.parts[1](self.parts[0](x)).square()


def rows():
    return torch.randn(BATCH, WIDTH)
