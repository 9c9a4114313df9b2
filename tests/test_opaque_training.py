"""Opaque modules under trainers: what they do is done once a step."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import autosac
from autosac.errors import InfeasibleBudgetError

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Lightning's advice about workers, loggers and its own dependencies.
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
WIDTH, BATCH, NUM_BLOCKS, NUM_STEPS = 8, 512, 3, 2  # more than a random state
runs = []  # of models and gates, for real or traced


@torch.library.custom_op("autosac_tests::opened", mutates_args=())
def opened(x: torch.Tensor) -> torch.Tensor:
    runs.append("gate")
    return torch.sigmoid(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(output)


def _backward(ctx, grad):
    (output,) = ctx.saved_tensors
    return grad * output * (1 - output)


opened.register_fake(torch.empty_like)
opened.register_autograd(_backward, setup_context=_keep)


class Gate(nn.Linear):
    def forward(self, x):
        return opened(super().forward(x))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = Gate(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        return x + self.mlp(x * self.gate(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))

    def forward(self, x, labels):
        runs.append("model")
        return {"loss": nn.functional.cross_entropy(self.blocks(x), labels)}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return BATCH * NUM_STEPS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return {"x": torch.randn(WIDTH, generator=generator), "labels": index % WIDTH}


# --- training loops: the trained model ---------------------------------------------


def by_transformers(folder, memory_budget, **options):
    transformers = pytest.importorskip("transformers")
    from autosac.integrations.huggingface import MemoryBudget

    budget = MemoryBudget(memory_budget, report=lambda text: None, **options)
    model = profile_of_step()
    transformers.Trainer(
        model,
        transformers.TrainingArguments(
            folder,
            max_steps=NUM_STEPS,
            per_device_train_batch_size=BATCH,
            train_sampling_strategy="sequential",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            logging_strategy="no",
        ),
        train_dataset=Rows(),
        callbacks=[budget],
    ).train()
    return model


def by_lightning(folder, memory_budget, **options):
    lightning = pytest.importorskip("lightning")
    from autosac.integrations.lightning import MemoryBudget

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = profile_of_step()

        def training_step(self, batch):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    budget = MemoryBudget(memory_budget, report=lambda text: None, **options)
    module = Module()
    lightning.Trainer(
        callbacks=[budget],
        max_steps=NUM_STEPS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(Rows(), batch_size=BATCH))
    return module.model


def by_accelerate(folder, memory_budget, **options):
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = profile_of_step()
    planned, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.AdamW(model.parameters()),
        DataLoader(Rows(), batch_size=BATCH),
    )
    batch = next(iter(loader))
    plan = autosac.plan(
        planned, batch, memory_budget=memory_budget, optimizer="adamw", **options
    )
    plan.apply(planned)
    for batch in loader:
        accelerator.backward(planned(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()
    return model


def profile_of_step():
    torch.manual_seed(0)
    return Model()


@pytest.mark.parametrize(
    ("train", "marks"),
    [
        pytest.param(by_transformers, "*.gate", marks=pytest.mark.slow),
        pytest.param(by_lightning, Gate, marks=pytest.mark.slow),
        (by_accelerate, ["blocks.0.gate", "*[12].gate"]),
    ],
)
def test_an_opaque_module_runs_once_a_step_however_small_the_budget(
    train, marks, tmp_path
):
    with pytest.raises(InfeasibleBudgetError) as caught:
        train(tmp_path, 1, opaque=marks)
    train(tmp_path, caught.value.lowest_peak_bytes, opaque=marks)

    assert runs_of_last_step() == NUM_BLOCKS


@pytest.mark.slow
def test_without_a_mark_it_runs_again_and_either_way_the_bits_are_the_same(tmp_path):
    models = {}
    for marks in ((), Gate):
        with pytest.raises(InfeasibleBudgetError) as caught:
            by_accelerate(tmp_path, 1, opaque=marks)
        lowest_bytes = caught.value.lowest_peak_bytes
        models[marks] = by_accelerate(tmp_path, lowest_bytes, opaque=marks)
        assert (runs_of_last_step() > NUM_BLOCKS) == (marks == ())
    plain = by_accelerate(tmp_path, "1GiB")

    for name, parameter in plain.named_parameters():
        for model in models.values():
            assert torch.equal(parameter, model.get_parameter(name))


def runs_of_last_step():
    """How often a gate ran since the model did for the last time."""
    return runs[::-1].index("model")
