"""What advice says is what planning for the changed step by hand says."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import autosac
from autosac.advice.sharded_steps import sharded_row
from autosac.advice.step_changes import changes_of

WIDTH, CLASSES, BATCH, LENGTH = 32, 600, 8, 24


class Model(nn.Module):
    def __init__(self, chunk_bytes=None, num_blocks=1):
        super().__init__()
        self.chunk_bytes = chunk_bytes
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.blocks = nn.Sequential(
            *(
                nn.Sequential(
                    nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
                )
                for _ in range(num_blocks)
            )
        )
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids, labels):
        hidden = self.blocks(self.embedding(ids))
        if self.chunk_bytes is None:
            logits = self.head(hidden).float()
            return functional.cross_entropy(
                logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].flatten()
            )
        return autosac.chunked_cross_entropy(
            hidden[:, :-1].reshape(-1, WIDTH),
            self.head.weight,
            labels[:, 1:].flatten(),
            bias=self.head.bias,
            memory_budget=self.chunk_bytes,
            upcast=True,
        )


def batch(size=BATCH):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(CLASSES, (size, LENGTH), generator=generator)
    return ids, ids.clone()


def loss_fn(loss):
    return loss


def profiled(model=None, inputs=None, **options):
    known = {"optimizer": "adamw", "loss_fn": loss_fn, "device": "cpu", **options}
    inputs = batch() if inputs is None else inputs
    return autosac.profile(model or Model(), inputs, **known)


def figures(profile, budget_bytes):
    plan = autosac.plan(profile, memory_budget=budget_bytes)
    floor = autosac.floor(profile)
    return floor, profile.baseline_peak_bytes, plan.peak_bytes, plan.recompute_ms


def of(row):
    """The figures of a row, of one of its micro-steps."""
    name = row.cell["change"]
    times = int(name.split()[0]) if "micro-steps" in name else 1
    peaks = row.floor_bytes, row.baseline_peak_bytes, row.peak_bytes
    return *peaks, row.recompute_ms / times


@pytest.fixture(scope="module")
def advice():
    profile = profiled(keeps_gradients=True)
    budget_bytes = (autosac.floor(profile) + profile.baseline_peak_bytes) // 2
    rows = autosac.advise(profile, memory_budget=budget_bytes)
    return {row.cell["change"]: row for row in rows}, budget_bytes, rows


CHANGED = {
    "as it is": lambda: profiled(keeps_gradients=True),
    "gradients set to None": profiled,
    "optimizer in backward": lambda: profiled(
        keeps_gradients=True,
        optimizer=lambda parameters: autosac.OptimizerInBackward(
            parameters, torch.optim.AdamW
        ),
    ),
    "2 micro-steps of 4": lambda: profiled(
        keeps_gradients=True, accumulate=2, inputs=batch(4)
    ),
    "bf16 parameters and states": lambda: profiled(
        Model().bfloat16(), keeps_gradients=True
    ),
    "bf16 autocast": lambda: profiled(keeps_gradients=True, autocast="bf16"),
}


# Of a change, only what `autosac.advise` hands over is its own.
_FAST = ("optimizer in backward", "2 micro-steps of 4", "bf16 parameters and states")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in _FAST else pytest.mark.slow)
        for name in CHANGED
    ],
)
def test_a_row_has_the_figures_of_the_step_changed_by_hand(name, advice):
    rows, budget_bytes, _ = advice

    assert of(rows[name]) == figures(CHANGED[name](), budget_bytes)


def test_chunked_cross_entropy_has_the_figures_of_a_model_that_calls_it(advice):
    rows, budget_bytes, _ = advice
    row = rows["chunked cross entropy"]
    chunk_bytes = int(row.cell["how"].partition("memory_budget=")[2].rstrip(")"))
    changed = profiled(Model(chunk_bytes), keeps_gradients=True)

    floor, baseline, peak, _ = figures(changed, budget_bytes)
    assert row.baseline_peak_bytes == baseline
    assert row.floor_bytes == floor
    assert row.peak_bytes == peak


def test_every_row_lowers_the_peak_and_the_cheapest_comes_first(advice):
    _, _, rows = advice
    first, *others = rows

    assert first.cell["change"] == "as it is"
    assert others
    for row in others:
        assert (
            row.floor_bytes < first.floor_bytes
            or row.baseline_peak_bytes < first.baseline_peak_bytes
        )
    costs = [
        (
            row.status == "infeasible",
            ("same", "rounded", "other").index(row.cell["results"]),
            row.step_ms or 0.0,
        )
        for row in others
    ]
    assert costs == sorted(costs)


@pytest.mark.slow
def test_offload_has_the_figures_of_plans_with_it():
    class Blocks(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(),
                              nn.Linear(4 * WIDTH, WIDTH))
                for _ in range(4)
            )  # fmt: skip

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return x.square().mean()

    profile = autosac.profile(Blocks(), torch.randn(600, WIDTH), device="cpu")
    low = autosac.floor(profile, offload=True)
    (row,) = (
        row
        for row in autosac.advise(profile, memory_budget=low)
        if row.cell["change"] == "offload"
    )
    plan = autosac.plan(profile, memory_budget=low, offload=True)

    assert row.cell["results"] == "same"
    assert row.floor_bytes == low < autosac.floor(profile)
    assert (row.peak_bytes, row.recompute_ms) == (plan.peak_bytes, plan.recompute_ms)


def row_of_fsdp(advice):
    (row,) = (row for row in advice if row.cell["change"].startswith("FSDP2"))
    return row


@pytest.mark.parametrize("in_groups", [True, False])
def test_bf16_parameters_are_those_of_a_copy(in_groups):
    class WithBuffer(nn.Module):
        def __init__(self):
            super().__init__()
            self.tied = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.also_tied = self.tied
            self.frozen = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x):
            x = torch.tanh(x @ self.tied * self.scale + self.frozen)
            return (x @ self.also_tied).square().mean()

    model, x = WithBuffer(), torch.randn(64, WIDTH)
    adamw = torch.optim.AdamW([{"params": [model.tied], "lr": 0.1}])
    if in_groups:
        adamw.add_param_group({"params": [model.frozen]})
    model(x).backward()
    adamw.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    step = profiled(model, x, optimizer=adamw, device="h100")
    (change,) = (
        change
        for change in changes_of(step, None)
        if change.name == "bf16 parameters and states"
    )
    row = profiled(change.make_model(), change.inputs, device="h100", **change.options)

    assert torch.equal(torch.get_rng_state(), random)
    by_hand = profiled(WithBuffer().bfloat16(), x.bfloat16(), device="h100")
    assert row.baseline_peak_bytes == by_hand.baseline_peak_bytes
    assert [p.dtype for p in row.tape.parameters] == ["bfloat16"] * 2
    assert row.tape.parameters[0].state_itemsizes == (2, 2)
    assert model.tied.grad.dtype == adamw.state[model.tied]["exp_avg"].dtype
    for name, value in model.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])


@pytest.mark.slowest_but_first
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}])
def test_fsdp_has_the_figures_of_the_plan_for_the_fewest_gpus_that_fit(options):
    profile = profiled(device="h100", **options)
    lowest = {}
    for num_gpus in (2, 4, 8):
        with pytest.raises(autosac.InfeasibleBudgetError) as caught:
            autosac.plan_parallel(
                profiled(device="h100", **options),
                cluster="hgx-h100",
                num_gpus=num_gpus,
                degrees=[num_gpus],
                memory_budget=1,
            )
        lowest[num_gpus] = caught.value.lowest_peak_bytes
    assert lowest[8] < lowest[4] < lowest[2] < autosac.floor(profile)

    row = sharded_row(profile, lowest[4])
    plan = autosac.plan_parallel(
        profiled(device="h100", **options),
        cluster="hgx-h100",
        num_gpus=4,
        degrees=[4],
        memory_budget=lowest[4],
    )

    assert row.cell["change"] == "FSDP2 on 4 GPUs"
    assert row.floor_bytes == lowest[4]
    assert (row.peak_bytes, row.step_ms) == (plan.peak_bytes, plan.step_ms)
    assert plan.peak_bytes <= lowest[4] < row.baseline_peak_bytes

    too_low = sharded_row(profile, lowest[8] - 1)
    assert (too_low.status, too_low.mesh_shape) == ("infeasible", "8")
    if not options:
        assert row_of_fsdp(autosac.advise(profile)).floor_bytes == lowest[2]


def test_fsdp_is_not_claimed_where_links_are_not_known(advice):
    _, _, on_cpu = advice

    assert "No node" in on_cpu.not_simulated["FSDP2 on several GPUs"]
    assert not any(row.cell["change"].startswith("FSDP2") for row in on_cpu)


def test_changes_that_keep_results_are_looked_at_together(advice):
    rows, _budget_bytes, _ = advice
    (name,) = (name for name in rows if " + " in name)
    alone = [rows[one] for one in name.split(" + ")]

    assert rows[name].floor_bytes <= min(row.floor_bytes for row in alone)
    assert rows[name].cell["results"] != "other"


@pytest.mark.slow
def test_the_model_is_left_as_it_was_and_the_table_is_text_and_pandas(advice):
    model = Model(num_blocks=1)
    table = autosac.advise(profiled(model))

    assert all("forward" not in module.__dict__ for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    assert "plain peak" in repr(table)
    assert next(iter(table.to_dataframe()["change"])) == "as it is"


@pytest.mark.slow
def test_a_loss_that_needs_logits_is_not_said_to_be_chunked():
    class Model2(Model):
        def forward(self, ids, labels):
            return self.head(self.blocks(self.embedding(ids))).square().mean()

    advice = autosac.advise(profiled(Model2(num_blocks=1)))

    assert "square" in advice.not_simulated["chunked cross entropy"]
    assert any(
        line.startswith("chunked cross entropy") and "square" in line
        for line in repr(advice).partition("not simulated")[2].splitlines()
    )
    assert all("chunked" not in row.cell["change"] for row in advice)


@pytest.mark.slowest
def test_smaller_batches_take_the_loss_of_their_own_targets():
    class Plain(Model):
        def forward(self, ids):
            return self.head(self.blocks(self.embedding(ids)))

    ids, labels = batch()

    def make_loss_fn(inputs):
        own = labels[: len(inputs)].flatten()
        return lambda logits: functional.cross_entropy(logits.flatten(0, 1), own)

    model, options = Plain(num_blocks=1), {"optimizer": "adamw", "device": "h100"}
    with_targets = autosac.advise(model, ids, make_loss_fn=make_loss_fn, **options)
    assert "2 micro-steps of 4" in {row.cell["change"] for row in with_targets}

    without = autosac.advise(model, ids, loss_fn=make_loss_fn(ids), **options)
    assert "2 micro-steps of 4" in without.not_simulated


@pytest.mark.slowest
def test_a_language_model_of_transformers_is_advised_to_chunk_its_loss():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=CLASSES,
        use_cache=False,
    )
    ids, labels = batch()
    inputs = {"input_ids": ids, "labels": labels}
    model = transformers.LlamaForCausalLM(config)
    advice = autosac.advise(autosac.profile(model, inputs, optimizer="adamw"))

    rows = {row.cell["change"]: row for row in advice}
    logits_bytes = BATCH * LENGTH * CLASSES * 4
    saved = (
        rows["as it is"].baseline_peak_bytes
        - rows["chunked cross entropy"].baseline_peak_bytes
    )
    assert saved > logits_bytes


def test_a_step_from_a_plan_cannot_be_advised():
    profile = profiled()
    plan = autosac.plan(profile, memory_budget="1GiB")
    for step in (profile.traced(), plan, plan.traced):
        with pytest.raises(ValueError, match="traces the model anew"):
            autosac.advise(step)


def test_a_loss_is_made_for_the_batch_that_a_loader_yields_first():
    rows, given = torch.arange(12.0).reshape(6, 2), []

    def make_loss_fn(inputs):
        given.append(inputs[0])
        raise InterruptedError  # what is advised is not the question

    with pytest.raises(InterruptedError):
        autosac.advise(
            nn.Linear(2, 2),
            DataLoader(TensorDataset(rows), batch_size=2),
            make_loss_fn=make_loss_fn,
        )
    assert torch.equal(given[0], rows[:2])
