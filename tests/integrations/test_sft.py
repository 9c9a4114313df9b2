"""TRL's trainer with adapters, on whole and on 4-bit layers, under a budget."""

import pytest
import torch

from autosac.verification.measuring import measure_peak
from tests.alive import tensors_alive, tensors_since

pytest.importorskip("trl")
pytest.importorskip("peft")

from trl import SFTTrainer

from autosac.integrations.huggingface import MemoryBudget
from examples.finetune_sft import BATCH, LENGTH, make_trainer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of the libraries, about themselves
]
_HELD_BYTES = 3 * BATCH * LENGTH * 8  # a batch that is fetched ahead
_NUMBERS_BYTES = 4096  # losses and metrics; tables of 4-bit types


class Measured(SFTTrainer):
    """Measures the peak of forward and backward of all steps but the first."""

    before = ()

    def training_step(self, *args, **kwargs):
        def run():
            return SFTTrainer.training_step(self, *args, **kwargs)

        if self.state.global_step == 0:
            self.peaks, loss = [], run()
        else:
            loss, peak_bytes = measure_peak(
                run, device="cpu", held=lambda: tensors_since(self.before)
            )
            self.peaks.append(peak_bytes)
        return loss


def train(folder, budget, *, quantized):
    before = tensors_alive()
    trainer = make_trainer(folder, budget, quantized=quantized, kind=Measured)
    trainer.before = before
    trainer.train()
    return trainer


@pytest.mark.parametrize("quantized", [False, True], ids=["whole", "4-bit"])
def test_a_budget_is_kept_and_the_weights_are_the_same(tmp_path, quantized):
    if quantized:
        pytest.importorskip("bitsandbytes")

    def silent(memory_budget):
        return MemoryBudget(memory_budget, report=lambda text: None)

    plain = train(str(tmp_path), None, quantized=quantized)
    ample = silent("1GiB")
    unplanned = train(str(tmp_path), ample, quantized=quantized)
    budget = silent(int(0.85 * ample.plan.peak_bytes))
    planned = train(str(tmp_path), budget, quantized=quantized)

    assert not ample.plan.policy
    assert budget.plan.policy
    observed, expected = planned.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(observed[name], expected[name]) for name in expected)
    assert max(planned.peaks) <= budget.memory_budget < max(plain.peaks)
    for trainer, plan in ((unplanned, ample.plan), (planned, budget.plan)):
        excess = max(trainer.peaks) - plan.peak_bytes - _HELD_BYTES
        assert abs(excess) <= _NUMBERS_BYTES
