import copy
import gc
import re
import weakref

import pytest
import torch
from torch.utils.data import Dataset

from autosac import OffloadedOptimizer
from autosac.errors import ArgumentError, InfeasibleBudgetError
from autosac.verification.measuring import measure_peak
from tests.alive import tensors_alive, tensors_since

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from autosac.integrations.huggingface import MemoryBudget  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Of accelerate and transformers, about what they call themselves.
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::UserWarning:accelerate"
    ),
]
NUM_TOKENS = 96


class Texts(Dataset):
    """Random tokens as lists, so that only batches are tensors."""

    def __init__(self, num_tokens=(NUM_TOKENS,) * 24):
        generator = torch.Generator().manual_seed(1)
        self.rows = [
            torch.randint(200, (n,), generator=generator).tolist() for n in num_tokens
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        row = self.rows[index]
        return {"input_ids": row, "labels": row, "attention_mask": [1] * len(row)}


class ScalingTrainer(transformers.Trainer):
    """Scales losses in fp16 on the CPU, where Accelerate takes no notice of that."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        if self.args.fp16:
            self.accelerator.native_amp = True
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)


class MeasuredTrainer(ScalingTrainer):
    """Measures the peak of forward and backward of all steps but the first."""

    def __init__(self, *args, before, **kwargs):
        super().__init__(*args, **kwargs)
        self.before, self.peaks, self.losses = before, [], []

    def training_step(self, *args, **kwargs):
        def run():
            return transformers.Trainer.training_step(self, *args, **kwargs)

        if self.state.global_step == 0:
            loss, peak_bytes = run(), 0
        else:
            loss, peak_bytes = measure_peak(
                run, device="cpu", held=lambda: tensors_since(self.before)
            )
        self.losses.append(loss)
        self.peaks.append(peak_bytes)
        return loss


def gpt2():
    config = transformers.GPT2Config(
        n_layer=2, n_embd=48, n_head=4, vocab_size=200, n_positions=128
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=48,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
    )
    return transformers.LlamaForCausalLM(config)


def train(
    folder,
    callback=None,
    make_model=gpt2,
    dataset=None,
    kind=MeasuredTrainer,
    compute_loss_func=None,
    others=(),
    **options,
):
    before = tensors_alive()
    torch.manual_seed(0)
    model = make_model()
    known = {
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_strategy": "no",
    }
    trainer = kind(
        model,
        transformers.TrainingArguments(folder, **{**known, **options}),
        compute_loss_func=compute_loss_func,
        train_dataset=Texts() if dataset is None else dataset,
        callbacks=[*others, *([] if callback is None else [callback])],
        before=before,
    )
    trainer.train()
    return trainer


def silent(memory_budget, **options):
    return MemoryBudget(memory_budget, report=lambda text: None, **options)


@pytest.mark.slowest_but_first
@pytest.mark.parametrize(
    ("make_model", "options"),
    [
        (gpt2, {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1}),
        (llama, {"bf16": True, "max_grad_norm": 0.0}),
        (llama, {"fp16": True}),
    ],
    ids=["gpt2-accumulated", "llama-bf16", "llama-fp16"],
)
def test_training_under_a_budget_is_the_same_and_keeps_it(
    tmp_path, make_model, options
):
    plain = train(tmp_path, make_model=make_model, **options)
    budget = silent(int(0.75 * max(plain.peaks)))
    planned = train(tmp_path, budget, make_model, **options)

    assert budget.plan.policy
    assert len(planned.losses) == len(plain.losses) >= 3
    assert all(map(torch.equal, planned.losses, plain.losses))
    observed, expected = planned.model.state_dict(), plain.model.state_dict()
    assert all(torch.equal(observed[name], expected[name]) for name in expected)
    assert max(planned.peaks) <= budget.memory_budget
    check_prediction(budget, planned, options.get("gradient_accumulation_steps", 1))


def check_prediction(budget, trainer, num_ahead=1):
    """Beside what is planned: the batches that are fetched ahead, and some scalars."""
    held_bytes = num_ahead * 3 * 4 * NUM_TOKENS * 8
    assert abs(max(trainer.peaks) - budget.plan.peak_bytes - held_bytes) < 1024


@pytest.mark.slow
def test_the_model_is_left_as_it_was_found_and_the_report_says_what_was_done(tmp_path):
    said = []
    budget = MemoryBudget("1GiB", report=said.append)
    trainer = train(tmp_path, budget, max_steps=1)

    model, left = trainer.model, weakref.ref(trainer)
    assert "forward" not in model.__dict__
    assert not model._forward_pre_hooks
    assert len(said) == 1
    assert "Nothing has to be recomputed" in said[0]
    del trainer
    gc.collect()
    assert left() is None
    assert budget.plan is not None


@pytest.mark.slow
def test_evaluation_before_training_is_not_what_is_planned(tmp_path):
    budget = silent("1GiB")
    callback = transformers.TrainerCallback()
    seen = []
    callback.on_evaluate = lambda *args, **known: seen.append(budget.plan)
    before = tensors_alive()
    trainer = MeasuredTrainer(
        gpt2(),
        transformers.TrainingArguments(
            tmp_path,
            max_steps=1,
            use_cpu=True,
            eval_on_start=True,
            eval_strategy="no",
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        ),
        train_dataset=Texts(),
        eval_dataset=Texts(),
        callbacks=[budget, callback],
        before=before,
    )
    trainer.train()

    assert seen[0] is None
    assert budget.plan is not None


@pytest.mark.slow
def test_a_larger_batch_than_the_first_is_warned_about_once(tmp_path):
    texts = Texts((64,) * 4 + (96,) * 8)
    with pytest.warns(UserWarning, match=r"\[4, 96\].* is larger") as caught:
        train(
            tmp_path,
            silent("1GiB"),
            dataset=texts,
            train_sampling_strategy="sequential",
        )
    assert sum("larger than all" in str(one.message) for one in caught) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:A profiler is active")  # that of `measure_peak`
def test_a_larger_batch_is_planned_anew_and_keeps_the_budget(tmp_path):
    def sequential(callback, **options):
        texts = Texts((64,) * 8 + (96,) * 8)
        options |= {"dataset": texts, "train_sampling_strategy": "sequential"}
        return train(tmp_path, callback, max_steps=4, **options)

    plain = sequential(None)
    longest = silent("1GiB")
    train(tmp_path, longest)  # batches of 96
    budget_bytes = longest.plan.baseline_peak_bytes * 3 // 4
    with pytest.warns(UserWarning, match=r"\[4, 96\].* is larger.*planned for anew"):
        planned = sequential(silent(budget_bytes, on_mismatch="replan"))

    assert all(map(torch.equal, plain.losses, planned.losses))
    assert max(plain.peaks) > budget_bytes >= planned.peaks[-1] > planned.peaks[1]


@pytest.mark.slow
def test_a_budget_below_the_least_says_what_the_loop_keeps_besides(tmp_path):
    with pytest.raises(InfeasibleBudgetError, match="keeps besides") as caught:
        train(tmp_path, silent("1MiB"))

    assert caught.value.budget_bytes == 2**20 < caught.value.lowest_peak_bytes


@pytest.mark.slow
def test_the_budget_that_an_error_names_is_feasible(tmp_path):
    with pytest.raises(InfeasibleBudgetError) as caught:
        train(tmp_path, silent(1000), max_steps=1)
    said = re.fullmatch(
        r"No plan fits `memory_budget`=1000 \(1000 B\): the least feasible budget is"
        r" (\d+) bytes .* of the training loop\. .* Raise the budget to that, .*",
        str(caught.value),
    )
    train(tmp_path, silent(int(said[1])), max_steps=1)

    assert "offload" not in str(caught.value)  # which the callback does not take
    assert sum(caught.value.composition.values()) == int(said[1])


@pytest.mark.slowest
def test_a_budget_below_the_least_says_what_the_largest_batch_needs(tmp_path):
    def longest(memory_budget):
        budget = silent(memory_budget, max_length=96)
        texts = Texts((64,) * 4)
        train(tmp_path, budget, max_steps=1, dataset=texts)
        return budget.plan

    with pytest.raises(InfeasibleBudgetError) as caught:
        longest("1MiB")
    plan = longest(caught.value.lowest_peak_bytes)

    with pytest.raises(InfeasibleBudgetError):
        longest(caught.value.lowest_peak_bytes - 1)
    assert plan.peak_bytes < caught.value.lowest_peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("how", ["max_length", "worst_batch"])
def test_batches_up_to_the_largest_are_planned_for_with_the_first(tmp_path, how):
    rows = torch.ones(4, 96, dtype=torch.int64)
    worst = dict.fromkeys(("input_ids", "labels", "attention_mask"), rows)
    options = {"max_length": 96} if how == "max_length" else {"worst_batch": worst}
    budget = silent("1GiB", on_mismatch="raise", **options)
    longest = silent("1GiB")
    train(tmp_path, longest, max_steps=1)
    lengths = {"dataset": Texts((64,) * 4 + (96,) * 4)}
    train(
        tmp_path, budget, max_steps=2, train_sampling_strategy="sequential", **lengths
    )

    # `on_mismatch`="raise" raises nothing: the second batch was planned for.
    assert budget.plan.peak_bytes == longest.plan.peak_bytes
    assert [len(plan.signatures) for plan in budget.plan.each] == [1, 1]


@pytest.mark.slow
def test_what_was_planned_is_in_the_log_of_the_trainer(tmp_path):
    budget = silent("1GiB")
    trainer = train(tmp_path, budget, max_steps=1)

    (entry,) = (e for e in trainer.state.log_history if "autosac/peak_bytes" in e)
    assert entry["autosac/peak_bytes"] == budget.plan.peak_bytes
    assert entry["step"] == 0


class StepsAlone(MeasuredTrainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = model(**inputs).loss
        loss.backward()
        return loss.detach()


def test_a_training_step_that_makes_its_loss_otherwise_is_refused(tmp_path):
    with pytest.raises(NotImplementedError, match="does not call its `compute_loss`"):
        train(tmp_path, silent("1GiB"), kind=StepsAlone, max_steps=1)


def test_two_largest_batches_and_unknown_ways_are_refused_when_they_are_passed():
    with pytest.raises(ValueError, match="pass one of them"):
        MemoryBudget("1GiB", worst_batch={}, max_length=3)
    with pytest.raises(ValueError, match="'recompute', 'replan', 'raise'"):
        MemoryBudget("1GiB", on_mismatch="stop")


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"memory_budget": "x"}, "`memory_budget`='x' must be a positive int .*'80%'"),
        ({"memory_budget": 0}, "`memory_budget`=0 must be"),
        ({"memory_budget": None}, "`memory_budget`=None must be"),
        ({"memory_budget": 6.5}, "`memory_budget`=6.5 must be"),
        ({"max_length": "64"}, "`max_length` must be a whole number .*, got '64'"),
        ({"max_length": 0}, "`max_length` must be a whole number .*, got 0"),
        ({"worst_batch": 3}, "`worst_batch`=3 has no tensors"),
        ({"report": None}, "`report` must be a function of a text, got None"),
        ({"memory_buget": 1}, "`MemoryBudget` takes no .* do you mean `memory_budget`"),
        ({"offload": True}, "`MemoryBudget` takes no `offload`: leave it out"),
    ],
    ids=str,
)
def test_arguments_are_checked_when_they_are_passed(mistake, message):
    MemoryBudget("80%")  # of a device that comes with the model
    with pytest.raises(ArgumentError, match=message):
        MemoryBudget(**{"memory_budget": "1GiB", **mistake})


@pytest.mark.parametrize(
    ("worst", "message"),
    [
        (
            {"foo": torch.ones(3)},
            "`worst_batch` has 'foo', and the first batch has not",
        ),
        ((torch.ones(3),), "`worst_batch` must be a dict of 'input_ids'.*, got tuple"),
    ],
    ids=["other names", "no names"],
)
def test_a_largest_batch_has_names_of_the_first(tmp_path, worst, message):
    with pytest.raises(ArgumentError, match=message):
        train(tmp_path, silent("1GiB", worst_batch=worst), max_steps=1)


def test_several_budgets_of_a_trainer_are_refused(tmp_path):
    with pytest.raises(NotImplementedError, match=r"2 `MemoryBudget` .* one per"):
        train(tmp_path, silent("1GiB"), others=(silent("2GiB"),), max_steps=1)


def test_a_compiled_model_is_refused_before_the_trainer_finds_its_batches_empty(
    tmp_path,
):
    def compiled():
        return torch.compile(gpt2(), backend="aot_eager")

    with pytest.raises(NotImplementedError, match="the model is compiled"):
        train(tmp_path, silent("1GiB"), compiled, max_steps=1)


@pytest.mark.parametrize("name", ["gradient_checkpointing", "activation_checkpointing"])
def test_checkpointing_by_the_trainer_is_refused_by_its_name(tmp_path, name):
    if not hasattr(transformers.TrainingArguments, name):
        pytest.skip("of Transformers 5.24 and later")
    with pytest.raises(NotImplementedError, match=f"{name}=True .*recomputes already"):
        train(tmp_path, silent("1GiB"), **{name: True})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("torch_compile", True),
        ("fsdp", "full_shard"),
        ("n_gpu", 2),
        ("deepspeed", "config.json"),
    ],
)
def test_settings_of_other_machines_are_refused_by_name(tmp_path, name, value):
    class Arguments:
        gradient_checkpointing = torch_compile = False
        world_size = n_gpu = 1
        deepspeed = fsdp = None

    arguments = Arguments()
    setattr(arguments, name, value)
    with pytest.raises(NotImplementedError, match=name):
        silent("1GiB").on_train_begin(
            arguments, None, None, model=gpt2(), optimizer=None
        )


class CalledTwice(MeasuredTrainer):
    """R-Drop: the model's two answers shall be alike."""

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        one, other = model(**inputs), model(**inputs)
        apart = (one.logits - other.logits).square().mean()
        return one.loss + other.loss + apart


def squares(outputs, labels, num_items_in_batch=None):
    return outputs.logits.square().sum() / num_items_in_batch


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (CalledTwice, {}),
        (MeasuredTrainer, {"compute_loss_func": squares}),
    ],
    ids=["own", "function"],
)
def test_losses_of_a_trainer_are_planned_as_they_are(tmp_path, kind, options):
    plain = train(tmp_path, kind=kind, **options)
    budget = silent(int(0.75 * max(plain.peaks)))
    planned = train(tmp_path, budget, kind=kind, **options)

    assert budget.plan.policy
    assert all(map(torch.equal, planned.losses, plain.losses))
    assert max(planned.peaks) <= budget.memory_budget
    check_prediction(budget, planned)


class Averages(transformers.TrainerCallback):
    def on_train_begin(self, args, state, control, model, **_):
        self.averaged = torch.optim.swa_utils.AveragedModel(model)


@pytest.mark.slow
def test_what_other_callbacks_keep_is_paid_for(tmp_path):
    lowest = []
    for callbacks in ((), (Averages(),)):
        with pytest.raises(InfeasibleBudgetError, match="callbacks") as caught:
            train(tmp_path, silent("1KiB"), others=callbacks, max_steps=1)
        lowest.append(caught.value.lowest_peak_bytes)

    averaged = torch.optim.swa_utils.AveragedModel(gpt2()).state_dict().values()
    storages = {t.untyped_storage().data_ptr(): t.nbytes for t in averaged}
    assert lowest[1] - lowest[0] == sum(storages.values())


class CountingTrainer(MeasuredTrainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.metrics = {"train": [0]}

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        loss = super().compute_loss(model, inputs, num_items_in_batch=None)
        number = self.accelerator.gather_for_metrics(loss.detach()).mean()
        self.metrics["train"].append(number.item() if number > 0 else 0.0)
        self.log({"counted": len(self.metrics["train"])})
        return loss


@pytest.mark.slow
def test_planning_counts_and_logs_nothing_of_the_trainer(tmp_path):
    trainer = train(tmp_path, silent("1GiB"), kind=CountingTrainer, max_steps=1)

    assert trainer.metrics["train"] == [0, float(trainer.losses[0])]
    counted = [e["counted"] for e in trainer.state.log_history if "counted" in e]
    assert counted == [2]
    assert "compute_loss" not in trainer.__dict__


class Meter:
    """Running mean of what it is told, as a number or a tensor."""

    def __init__(self, mean):
        self.mean, self.calls, self.history = mean, 0, []

    def update(self, loss):
        is_number = isinstance(self.mean, float)
        self.mean = 0.9 * self.mean + 0.1 * (loss.item() if is_number else loss)
        self.calls += 1
        self.history.append(self.mean)
        return self.mean


METERS = []  # one, of `metered`


def metered(outputs, labels, num_items_in_batch=None):
    logits = outputs.logits[:, :-1].flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())
    return loss / METERS[0].update(loss.detach())


class TeachingTrainer(MeasuredTrainer):
    """Learns from a running mean of the weights, scaled by a running mean."""

    mean = 1.0

    def __init__(self, model, *args, **kwargs):
        super().__init__(model, *args, **kwargs)
        self.meters = {"train": [Meter(self.mean)]}
        self.teacher = copy.deepcopy(model).requires_grad_(False).eval()

    def compute_loss(
        self, model, inputs, return_outputs=False, num_items_in_batch=None
    ):
        with torch.no_grad():
            for own, other in zip(
                self.teacher.parameters(), model.parameters(), strict=True
            ):
                own.mul_(0.9).add_(other.detach(), alpha=0.1)
            expected = self.teacher(input_ids=inputs["input_ids"]).logits
        outputs = model(**inputs)
        loss = outputs.loss + (outputs.logits - expected).square().mean()
        return loss / self.meters["train"][0].update(loss.detach())


class TensorTeachingTrainer(TeachingTrainer):
    mean = torch.ones(())


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (TeachingTrainer, {}),
        (TensorTeachingTrainer, {}),
        (MeasuredTrainer, {"compute_loss_func": metered}),
    ],
    ids=["number", "tensor", "function"],
)
def test_what_losses_of_a_trainer_write_to_is_as_without_a_plan(
    tmp_path, kind, options
):
    def trained(callback=None):
        METERS[:] = [Meter(torch.ones(()))]
        trainer = train(tmp_path, callback, kind=kind, max_steps=2, **options)
        own = getattr(trainer, "meters", {"train": METERS})["train"][0]
        teacher = getattr(trainer, "teacher", trainer.model)
        return own, [*trainer.model.parameters(), *teacher.parameters()]

    plain, weights = trained()
    planned, same_weights = trained(silent("1GiB"))

    assert planned.calls == plain.calls == 2
    assert planned.history == plain.history
    assert all(map(torch.equal, same_weights, weights))


@pytest.mark.slow
def test_checkpoints_of_optimizers_with_far_state_resume_either_way(tmp_path):
    def trained(wrap, folder, resume=None):
        torch.manual_seed(0)
        model = gpt2()
        optimizer = wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        arguments = transformers.TrainingArguments(
            str(tmp_path / folder),
            max_steps=4,
            save_steps=2,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=Texts(), optimizers=(optimizer, scheduler)
        )
        trainer.train(resume_from_checkpoint=resume)
        return list(model.parameters())

    def resident(optimizer):
        return optimizer

    own, far = trained(resident, "own"), trained(OffloadedOptimizer, "far")
    others = (
        trained(OffloadedOptimizer, "third", str(tmp_path / "own" / "checkpoint-2")),
        trained(resident, "fourth", str(tmp_path / "far" / "checkpoint-2")),
    )
    for parameters in (far, *others):
        assert all(map(torch.equal, own, parameters))
