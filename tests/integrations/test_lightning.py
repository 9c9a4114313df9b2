import re
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.utils.data import DataLoader

from autosac.errors import InfeasibleBudgetError
from autosac.verification.measuring import measure_peak
from tests.alive import tensors_alive, tensors_since

lightning = pytest.importorskip("lightning.pytorch")

from lightning.pytorch.callbacks import (  # noqa: E402
    BatchSizeFinder,
    LearningRateFinder,
)
from lightning.pytorch.tuner import Tuner  # noqa: E402

from autosac.integrations.lightning import MemoryBudget  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Lightning's advice about workers, loggers and its own dependencies.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
WIDTH, BATCH = 64, 128


class Peaks(list):
    """In bytes; a copy of the optimizer has none."""

    def __deepcopy__(self, memo):
        return None


class MeasuredAdamW(torch.optim.AdamW):
    """Measures the peak of all that Lightning runs inside `step` but the first time."""

    log = None  # `Peaks`
    before = tuple

    def step(self, closure=None):
        if self.log is None:
            return super().step(closure)
        if not self.log:
            self.log.append(0)
            return super().step(closure)

        def own_step():
            return torch.optim.AdamW.step(self, closure)

        loss, peak_bytes = measure_peak(
            own_step,
            device="cpu",
            held=lambda: tensors_since(self.before()),
            warm_up=self.move_gradients,
        )
        self.log.append(peak_bytes)
        return loss

    def move_gradients(self):
        """Only what is allocated while recording is seen to be freed."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()


class Scaled(lightning.plugins.MixedPrecision):
    """fp16 on the CPU; measures the peak of a step, which is around the optimizer's."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=256))

    def optimizer_step(self, optimizer, model, closure, **known):
        def own_step():
            return lightning.plugins.MixedPrecision.optimizer_step(
                self, optimizer, model, closure, **known
            )

        log, optimizer.log = optimizer.log, None
        if not log:
            log.append(0)
            result = own_step()
        else:
            result, peak_bytes = measure_peak(
                own_step,
                device="cpu",
                held=lambda: tensors_since(optimizer.before()),
                warm_up=optimizer.move_gradients,
            )
            log.append(peak_bytes)
        optimizer.log = log
        return result


class Network(lightning.LightningModule):
    def __init__(self, *, is_called_twice=False):
        super().__init__()
        self.is_called_twice = is_called_twice
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(
                torch.nn.Linear(WIDTH, 4 * WIDTH),
                torch.nn.GELU(),
                torch.nn.Dropout(0.1),
                torch.nn.Linear(4 * WIDTH, WIDTH),
            )
            for _ in range(3)
        )
        self.head = torch.nn.Linear(WIDTH, 10)
        self.losses = []

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self(x)
        if self.is_called_twice:
            output = output + self(2 * x)
        loss = torch.nn.functional.cross_entropy(output, y)
        self.log("loss", loss / self.trainer.max_steps)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"].clone())

    def configure_optimizers(self):
        return MeasuredAdamW(self.parameters(), lr=1e-3)


class Rows(torch.utils.data.Dataset):
    """Made one by one, so that only batches are tensors for long."""

    def __len__(self):
        return 8 * BATCH

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(WIDTH, generator=generator), index % 10


class Measure(lightning.Callback):
    """Switches the measurement on after what comes before it in the list."""

    def __init__(self, before):
        self.before = lambda: before  # which a budget takes for its own otherwise
        self.peaks = Peaks()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        optimizer = trainer.optimizers[0]
        optimizer.log, optimizer.before = self.peaks, self.before


def train(
    callback=None, *, module=None, batches=None, kind=Network, callbacks=(), **options
):
    measure = Measure(tensors_alive())
    torch.manual_seed(0)
    module = kind(**(module or {}))
    known = {
        "max_steps": 3,
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(
        callbacks=[*([] if callback is None else [callback]), *callbacks, measure],
        **{**known, **options},
    )
    loader = DataLoader(Rows(), batch_size=BATCH, shuffle=True)
    if batches is not None:
        loader = DataLoader(Rows(), batch_sampler=batches)
    trainer.fit(module, loader)
    return module, measure.peaks


def silent(memory_budget, **options):
    return MemoryBudget(memory_budget, report=lambda text: None, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "options"),
    [
        ({"is_called_twice": True}, {}),
        ({}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ({}, {"precision": "bf16-mixed"}),
        ({}, {"precision": "bf16-true"}),
        ({}, {"plugins": Scaled, "gradient_clip_val": 0.5}),
    ],
    ids=["called-twice", "accumulated", "bf16", "all-bf16", "fp16"],
)
def test_training_under_a_budget_is_the_same_and_keeps_it(module, options):
    def trained(callback=None):
        own = {name: o() if o is Scaled else o for name, o in options.items()}
        return train(callback, module=module, **own)

    plain, plain_peaks = trained()
    budget = silent(int(0.8 * max(plain_peaks)))
    planned, peaks = trained(budget)

    assert budget.plan.policy
    assert len(planned.losses) == len(plain.losses) >= 3
    assert all(map(torch.equal, planned.losses, plain.losses))
    observed, expected = planned.state_dict(), plain.state_dict()
    assert all(torch.equal(observed[name], expected[name]) for name in expected)
    assert max(peaks) <= budget.memory_budget
    assert abs(max(peaks) - budget.plan.peak_bytes) < 1024  # scalars


@pytest.mark.slow
def test_larger_batches_are_planned_anew_and_keep_the_budget():
    small, large = list(range(BATCH)), list(range(2 * BATCH))
    options = {"batches": [small, small, large, small, large], "max_steps": 5}
    plain, plain_peaks = train(**options)
    ample = silent("1GiB")
    train(ample, batches=[large], max_steps=1)
    budget = silent(int(0.8 * ample.plan.peak_bytes), on_mismatch="replan")
    with pytest.warns(UserWarning, match="larger than all .*planned for anew"):
        planned, peaks = train(budget, **options)

    assert all(map(torch.equal, planned.losses, plain.losses))
    assert max(peaks) <= budget.memory_budget < max(plain_peaks)


class Thaws(Network):
    def __init__(self):
        super().__init__()
        self.blocks.requires_grad_(False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.blocks.requires_grad_(batch_idx > 0)


class ThawsInOwnHook(Network):
    """In the hook that comes last before the step."""

    def __init__(self):
        super().__init__()
        self.blocks.requires_grad_(False)

    def on_train_batch_start(self, batch, batch_idx):
        self.blocks.requires_grad_(batch_idx > 1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Thaws, ThawsInOwnHook])
def test_layers_that_are_thawed_are_planned_anew_and_keep_the_budget(kind):
    def trained(callback=None):
        return train(callback, kind=kind, max_steps=4)

    plain, plain_peaks = trained()
    budget = silent(int(0.8 * max(plain_peaks)))
    with pytest.warns(UserWarning, match="and 11 more, frozen before.* anew"):
        planned, peaks = trained(budget)

    assert all(map(torch.equal, planned.losses, plain.losses))
    assert budget.plan.policy == {}
    assert max(peaks) <= budget.memory_budget < max(plain_peaks)


@pytest.mark.slow
def test_the_largest_batch_is_planned_for_with_the_first_and_logged():
    class Logger(lightning.loggers.logger.DummyLogger):
        logged = ()

        def log_metrics(self, metrics, step=None):
            self.logged += (metrics,)

    small, large = list(range(BATCH)), list(range(2 * BATCH))
    rows, logger = Rows(), Logger()
    worst = next(iter(DataLoader(rows, batch_sampler=[large])))
    largest = silent("1GiB")
    train(largest, batches=[large], max_steps=1)
    budget = silent("1GiB", worst_batch=worst, on_mismatch="raise")
    train(budget, batches=[small, large], max_steps=2, logger=logger)

    assert budget.plan.peak_bytes == largest.plan.peak_bytes
    assert logger.logged[0]["autosac/peak_bytes"] == budget.plan.peak_bytes


@pytest.mark.slow
def test_the_module_is_left_as_it_was_found_and_the_report_says_what_was_done():
    said = []
    module, _ = train(MemoryBudget("1GiB", report=said.append), max_steps=1)

    assert "forward" not in module.__dict__
    assert "log" not in module.__dict__
    assert len(said) == 1
    assert "Nothing has to be recomputed" in said[0]


@pytest.mark.slow
def test_a_training_that_fails_leaves_no_plan_behind():
    class Stops(Exception):
        pass

    class Stop(lightning.Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.forward = module.blocks[0].__dict__.get("forward")
            self.module = module
            raise Stops

    ample = silent("1GiB")
    train(ample, max_steps=1)
    stop = Stop()
    budget = silent(int(0.8 * ample.plan.peak_bytes))
    with pytest.raises(Stops):
        trainer = lightning.Trainer(
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[budget, stop],
        )
        trainer.fit(Network(), DataLoader(Rows(), batch_size=BATCH))

    assert budget.plan.policy
    assert all("forward" not in part.__dict__ for part in stop.module.modules())


class WithManyReturned(Network):
    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx), "x": batch[0]}


class WithOwnStep(Network):
    def optimizer_step(self, *args, **kwargs):
        super().optimizer_step(*args, **kwargs)


class WithManualOptimization(Network):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (WithManyReturned, r"returns `x` \(128, 64\) beside the loss"),
        (WithOwnStep, "its own optimizer_step"),
        (WithManualOptimization, "manual optimization"),
    ],
)
def test_modules_that_cannot_be_planned_are_refused(kind, message):
    trainer = lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[silent("1GiB")],
    )
    with pytest.raises(NotImplementedError, match=message):
        trainer.fit(kind(), DataLoader(Rows(), batch_size=BATCH))


class WithKeywordOnly(Network):
    def training_step(self, batch, *, batch_idx=0):
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_a_step_is_planned_with_the_arguments_that_the_trainer_passes():
    plain, _ = train(kind=WithKeywordOnly, max_steps=2)
    budget = silent("1GiB")
    planned, _ = train(budget, kind=WithKeywordOnly, max_steps=2)

    assert budget.plan is not None
    assert all(map(torch.equal, planned.losses, plain.losses))


def test_several_budgets_of_a_trainer_are_refused():
    with pytest.raises(NotImplementedError, match=r"2 `MemoryBudget` .* one per"):
        train(silent("1GiB"), callbacks=[silent("2GiB")], max_steps=1)


@pytest.mark.slow
def test_the_budget_that_an_error_names_is_feasible():
    with pytest.raises(InfeasibleBudgetError) as caught:
        train(silent(1000), max_steps=1)
    said = re.search(r"least feasible budget is (\d+) bytes", str(caught.value))
    train(silent(int(said[1])), max_steps=1)

    assert "`memory_budget`=1000 (1000 B)" in str(caught.value)
    assert "offload" not in str(caught.value)  # which the callback does not take


def test_hooks_of_the_pytorch_profiler_are_refused():
    # A real one, stopped by an error, leaves another error to Python's collector.
    profiler = Mock(lightning.profilers.PyTorchProfiler, _register=object())
    strategy = lightning.strategies.SingleDeviceStrategy(torch.device("cpu"))
    trainer = SimpleNamespace(strategy=strategy, profiler=profiler, callbacks=[])
    silent("1GiB").setup(trainer, Network(), "fit")
    with pytest.raises(NotImplementedError, match="record_module_names=False"):
        strategy.on_train_start()


class Untrained(Network):
    def configure_optimizers(self):
        return None


def test_without_an_optimizer_gradients_are_never_dropped():
    measured = measure_peak(
        lambda: train(kind=Untrained),
        device="cpu",
        held=lambda: (),
    )[1]
    budget = silent("1GiB")
    train(budget, kind=Untrained)

    assert budget.plan.baseline_peak_bytes == pytest.approx(measured, rel=1e-3)


class Meter:
    def __init__(self):
        self.mean, self.calls = 1.0, 0


METERS = []  # one, of `Metered`


class Metered(Network):
    """Scales its loss by a mean that is kept elsewhere; counts on its trainer."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        meter, self.trainer.counted = METERS[0], getattr(self.trainer, "counted", 0) + 1
        meter.mean, meter.calls = 0.9 * meter.mean + 0.1 * loss.item(), meter.calls + 1
        self.counted = self.trainer.counted
        return loss / meter.mean


@pytest.mark.slow
def test_what_a_step_writes_to_outside_of_its_module_is_as_without_a_plan():
    def trained(callback=None):
        METERS[:] = [Meter()]
        module, _ = train(callback, kind=Metered, max_steps=2)
        return vars(METERS[0]), module.counted, module.losses

    meter, num, losses = trained()
    same_meter, same_num, same_losses = trained(silent("1GiB"))

    assert same_meter == meter
    assert same_num == num == meter["calls"] == 2
    assert all(map(torch.equal, same_losses, losses))


class Averages(lightning.Callback):
    """Begins to keep averaged weights after the first step."""

    def on_train_batch_end(self, trainer, module, *_):
        self.weights = [parameter.detach().clone() for parameter in module.parameters()]


@pytest.mark.slow
def test_what_callbacks_keep_after_the_first_step_is_said():
    with pytest.warns(UserWarning, match=r"Callbacks keep 39\d\.\d KiB more"):
        train(silent("1GiB"), callbacks=[Averages()])


class Sized(Network):
    """Brings its own batches, of a size that a finder may set."""

    batch_size = BATCH  # whose steps take more than a finder that restores its state
    learning_rate = 1e-3

    def train_dataloader(self):
        return DataLoader(Rows(), batch_size=self.batch_size)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


def find(callbacks, tune=None):
    """What a module has become; the peak of training and of all trials before it."""
    modules = []

    def run():
        torch.manual_seed(0)
        modules.append(Sized())
        trainer = lightning.Trainer(
            callbacks=callbacks,
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        (tune or lightning.Trainer.fit)(trainer, *modules)

    _, peak_bytes = measure_peak(run, device="cpu", held=lambda: ())
    return *modules, peak_bytes


def sizes(num):
    return BatchSizeFinder(steps_per_trial=1, init_val=BATCH, max_trials=num)


def tune_sizes(trainer, module):
    options = {"steps_per_trial": 1, "init_val": BATCH, "max_trials": 2}
    Tuner(trainer).scale_batch_size(module, **options)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("finders", "tune"),
    [
        (lambda: [sizes(2)], None),
        (lambda: [LearningRateFinder(num_training_steps=3)], None),
        (list, tune_sizes),
        (list, lambda trainer, module: Tuner(trainer).lr_find(module, num_training=3)),
    ],
    ids=["sizes", "rates", "tuned-sizes", "tuned-rates"],
)
def test_trials_of_finders_keep_the_budget_and_find_the_same(
    finders, tune, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)  # where a finder puts its checkpoint
    plain, plain_bytes = find(finders(), tune)
    budget = silent(int(0.85 * plain_bytes))
    planned, peak_bytes = find([*finders(), budget], tune)

    assert peak_bytes <= budget.memory_budget
    held_bytes = torch.get_rng_state().nbytes  # by a finder of learning rates
    assert abs(peak_bytes - budget.plan.peak_bytes) < 1024 + held_bytes
    assert planned.batch_size == plain.batch_size
    assert planned.learning_rate == plain.learning_rate
    observed, expected = planned.state_dict(), plain.state_dict()
    assert all(torch.equal(observed[name], expected[name]) for name in expected)
    assert "forward" not in vars(planned)
    assert not budget._undo


@pytest.mark.slow
def test_a_finder_goes_back_to_the_largest_size_that_a_plan_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InfeasibleBudgetError) as caught:
        find([sizes(1), silent(1000)])  # of the first trial, as of no smaller batch
    floor_bytes = int(re.search(r"budget is (\d+) bytes", str(caught.value))[1])
    module, _ = find([sizes(4), silent(floor_bytes + 4)])  # of a number that is logged

    assert module.batch_size == BATCH
