import dataclasses

import pytest
import torch
from torch import nn
from torch.nn import functional

import autosac
from autosac.costs import synthetic_inputs, timing
from autosac.costs.timing import OpSizes, measure_ops
from autosac.step.op_signatures import Layout, Signature, signature
from tests.models import CASES

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("one_thread")
aten = torch.ops.aten


@pytest.fixture(scope="module")
def gpt():
    return CASES["gpt"].profile(torch.optim.AdamW)


def _sizes(made_bytes):
    return OpSizes(moved_bytes=2 * made_bytes, made_bytes=made_bytes)


def num_distinct(traced):
    return len({op.signature for op in traced.tape.ops if not op.is_view})


# --- what is measured -----------------------------------------------------------------


def test_a_profile_knows_what_is_modelled(gpt):
    calibration = gpt.calibration

    assert not gpt.calibrated
    assert calibration.modelled.num_ops == num_distinct(gpt)
    assert calibration.modelled.ms == pytest.approx(gpt.baseline_ms)
    assert calibration.measured.num_ops == calibration.cached.num_ops == 0
    assert calibration.measured_fraction == 0.0
    assert {reason for _, reason in calibration.modelled_ops} == {"not calibrated"}


def test_a_calibrated_profile_knows_what_was_measured(gpt):
    traced = autosac.calibrate(gpt, cache=False)
    calibration = traced.calibration

    assert traced.calibrated
    assert calibration.measured.num_ops == num_distinct(gpt)
    assert calibration.measured.ms == pytest.approx(traced.baseline_ms)
    assert calibration.measured.workspace_bytes > 0
    assert calibration.modelled.num_ops == calibration.cached.num_ops == 0
    assert calibration.modelled_ops == ()
    assert calibration.measured_fraction == 1.0
    assert "measured" in str(calibration)


class Doubled(nn.Module):
    """Runs an op that only works on what the step shows it."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return picky(0 * self.linear(x).double() + 2).sum()


@torch.library.custom_op("autosac_tests::picky", mutates_args=())
def picky(x: torch.Tensor) -> torch.Tensor:
    if (x != 2).any():
        raise ValueError("this data was made up\nby someone")
    return x.clone()


picky.register_fake(lambda x: torch.empty_like(x))
picky.register_autograd(lambda ctx, grad: grad)


def test_an_op_that_does_not_run_keeps_its_model_and_is_named():
    traced = autosac.profile(Doubled(), torch.randn(3, 4))
    calibrated = autosac.calibrate(traced)
    calibration = calibrated.calibration

    ((name, reason),) = calibration.modelled_ops
    assert name == "autosac_tests.picky.default"
    assert reason == "it fails on made-up data: ValueError: this data was made up"
    assert name in str(calibration) and reason in str(calibration)
    assert calibration.modelled.num_ops == 1
    assert 0.0 < calibration.measured_fraction < 1.0
    index = [op.name for op in calibrated.tape.ops].index(name)
    assert calibrated.op_ms[index] == traced.op_ms[index]


def test_the_report_of_a_plan_says_how_much_was_measured(gpt):
    budget = gpt.baseline_peak_bytes
    modelled = autosac.plan(gpt, memory_budget=budget)
    measured = autosac.plan(autosac.calibrate(gpt), memory_budget=2 * budget)

    assert modelled.measured_fraction == 0.0
    assert measured.measured_fraction == 1.0
    assert "measured  0.0% of the step's time" in str(modelled)
    assert "measured  100.0% of the step's time" in str(measured)
    assert "leave a margin, or `autosac.calibrate`" in str(modelled)
    assert "leave a margin" not in str(measured)
    assert measured.reserved_bytes is None
    assert "reserved" not in str(measured)
    on_gpu = dataclasses.replace(measured, reserved_bytes=3 * 2**20)
    assert "reserved  3.0 MiB predicted" in str(on_gpu)


@pytest.mark.parametrize(
    ("times", "least_ms", "spread", "runs"),
    [
        # A slow first run is not the last one, however slow it was.
        ([900.0, 10.0, 11.0, 10.5, 10.0, 10.0, 10.0], 10.0, 0.0, 6),
        ([300.0, 290.0, 1.0], 290.0, 300 / 290 - 1, 2),
        # A busy machine: it goes on until two runs agree,
        ([8.0, 90.0, 70.0, 80.0, 60.0, 50.0, 9.0, 1.0], 8.0, 0.125, 7),
        # or long enough.
        ([8.0, 90.0, 200.0, 400.0, 1.0], 8.0, 90 / 8 - 1, 4),
        ([0.1] + [9.0] * 17 + [0.1], 0.1, 89.0, 18),
    ],
)
def test_an_op_runs_until_two_times_agree(times, least_ms, spread, runs, monkeypatch):
    left = iter(times[1:])
    monkeypatch.setattr(timing, "_run_ms", lambda *_: next(left))

    observed = timing._timing(lambda: None, torch.device("cpu"), times[0])

    assert observed == (least_ms, pytest.approx(spread))
    assert len(list(left)) == len(times) - runs


def test_a_plan_says_that_the_machine_was_busy(gpt, monkeypatch):
    monkeypatch.setattr(timing, "STEADY", -1.0)  # no two runs are as equal as that
    busy = autosac.calibrate(gpt, cache=False)

    assert busy.calibration.unsteady_fraction == 1.0
    assert "unsteady  100%" in str(autosac.plan(busy, memory_budget="1GiB"))
    assert "unsteady" not in str(autosac.plan(gpt, memory_budget="1GiB"))


def test_an_op_larger_than_memory_is_not_run(monkeypatch):
    monkeypatch.setattr(timing, "available_bytes", lambda device: 1000)
    small, large = (signature(aten.neg.default, [torch.ones(n)], {}) for n in (9, 999))

    measurements = measure_ops({small: _sizes(36), large: _sizes(3996)}, device=CPU)

    assert list(measurements.costs) == [small]
    assert measurements.failures == {large: "it needs 7.8 KiB, 1000 B are free"}


def test_memory_that_is_free_is_known_here():
    free = timing.available_bytes(CPU)

    assert free is None or 2**20 < free < 2**50


@torch.library.custom_op("autosac_tests::roomy", mutates_args=())
def roomy(x: torch.Tensor) -> torch.Tensor:
    torch.ones(1000)
    return x.clone()


def test_a_workspace_is_what_a_kernel_allocates_and_frees():
    x = torch.ones(100)
    neg = signature(aten.neg.default, [x], {})
    wide = signature(torch.ops.autosac_tests.roomy.default, [x], {})

    costs = measure_ops({neg: _sizes(400), wide: _sizes(400)}, device=CPU).costs

    # 4000 bytes are gone before 400 are returned.
    assert costs[neg].workspace_bytes == 0
    assert costs[wide].workspace_bytes == 4000 - 400
    assert costs[neg].runtime_ms > 0.0


@torch.library.custom_op("autosac_tests::generous", mutates_args=())
def generous(x: torch.Tensor) -> list[torch.Tensor]:
    return [x.clone(), x.clone()]


def test_what_a_kernel_returns_beyond_its_fake_one_is_workspace():
    x = torch.ones(100)
    call = signature(torch.ops.autosac_tests.generous.default, [x], {})

    costs = measure_ops({call: _sizes(400)}, device=CPU).costs

    assert costs[call].workspace_bytes == 400


# --- made-up data ---------------------------------------------------------------------


class Embeddings(nn.Module):
    def __init__(self, mode):
        super().__init__()
        self.bag = nn.EmbeddingBag(50, 8, mode=mode)

    def forward(self, indices, offsets):
        return self.bag(indices, offsets).sum()


class Recurrent(nn.Module):
    def __init__(self, cls, **options):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.layers = cls(8, 8, num_layers=2, batch_first=True, **options)
        self.head = nn.LazyLinear(50)

    def forward(self, tokens):
        out, _ = self.layers(self.embed(tokens))
        return functional.cross_entropy(self.head(out).flatten(0, 1), tokens.flatten())


class Indexing(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(50, 16))
        self.linear = nn.Linear(16, 16)

    def forward(self, x, index, mask):
        h, num = self.linear(x), index.numel()
        wide, head = index[:, None].expand(-1, 16), h[:num]
        z = x.new_zeros(50, 16)
        parts = [
            z.index_add(0, index, head),
            z.scatter(0, wide, head),
            z.scatter_add(0, wide, head),
            z.scatter_reduce(0, wide, head, "amax"),
            z.index_copy(0, index[:5], head[:5]).index_fill(0, index[:3], 0.0),
            self.table[index],
            self.table.gather(0, wide),
            self.table.index_select(0, index),
            h.masked_fill(mask[:, None], 0.0),
            h.masked_scatter(mask[:, None].expand_as(h), h[:10].reshape(-1)),
            torch.linalg.solve(h.T @ h + torch.eye(16), h.T),
        ]
        h = h.clone()
        h[index % 40] = self.table[:num]
        return sum(part.sum() for part in parts) + h.sum()


def _tokens():
    return torch.randint(50, (4, 6))


HARD = {
    "bags sum": (
        lambda: Embeddings("sum"),
        lambda: (_tokens()[0], torch.arange(0, 6, 2)),
    ),
    "bags mean": (
        lambda: Embeddings("mean"),
        lambda: (_tokens()[0], torch.arange(0, 6, 2)),
    ),
    "bags max": (
        lambda: Embeddings("max"),
        lambda: (_tokens()[0], torch.arange(0, 6, 2)),
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), _tokens),
    "lstm both ways": (lambda: Recurrent(nn.LSTM, bidirectional=True), _tokens),
    "gru": (lambda: Recurrent(nn.GRU), _tokens),
    "rnn": (lambda: Recurrent(nn.RNN), _tokens),
    "indexing": (
        Indexing,
        lambda: (
            torch.randn(40, 16),
            torch.randint(40, (20,)),
            torch.arange(40) % 4 == 0,
        ),
    ),
}


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("name", HARD)
def test_ops_with_arguments_that_must_fit_each_other_run(name):
    make_model, make_inputs = HARD[name]
    inputs = make_inputs()
    model = make_model()
    model(*(inputs if isinstance(inputs, tuple) else (inputs,)))  # lazy modules

    calibration = autosac.calibrate(
        autosac.profile(model, inputs), cache=False
    ).calibration

    assert calibration.modelled_ops == ()


def test_indices_are_spread_and_valid():
    weight, indices = (
        Layout((7, 2), (2, 1), torch.float32),
        Layout((90,), (1,), torch.int64),
    )
    call = Signature(aten.embedding.default, (weight, indices), ())

    args, _ = synthetic_inputs.arguments(call, CPU)

    assert sorted(set(args[1].tolist())) == list(range(7))


def test_bytes_of_a_forward_kernel_are_not_made_up():
    nothing = Layout((0,), (1,), torch.uint8)
    call = Signature(aten.neg.default, (nothing,), ())

    measurements = measure_ops({call: _sizes(0)}, device=CPU)

    assert "forward kernel" in measurements.failures[call]


@pytest.mark.parametrize("size", [0, 1, 65_521, 200_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_random_data_fills_everything(size, dtype):
    layout = Layout((size,), (1,), dtype)
    call = Signature(aten.neg.default, (layout,), ())

    (x,), _ = synthetic_inputs.arguments(call, CPU)

    assert x.shape == (size,) and x.dtype == dtype
    assert bool((x.abs() <= 2).all())
    assert size < 2 or x.abs().float().mean() > 0.01  # one number may be small


def test_seeds_that_kernels_read_on_the_host_lie_there():
    x = torch.empty(1, 2, 8, 16, device="meta")
    sums, seed = torch.empty(1, 2, 32, device="meta"), torch.empty((), device="meta")
    seed = seed.long()
    backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default
    args = (*[x] * 4, x[..., :8], x, sums, seed, seed, 0.1, [True] * 4)
    names = [argument.name for argument in backward._schema.arguments]

    drawn, _ = synthetic_inputs.arguments(signature(backward, args, {}), x.device)

    given = dict(zip(names, drawn, strict=False))
    on_host = {name for name, v in given.items() if getattr(v, "is_cpu", False)}
    assert on_host == {"philox_seed", "philox_offset"}
