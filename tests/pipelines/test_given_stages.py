"""What `plan_pipeline` and a plan's own functions take, and what they refuse."""

import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class
from torch.nn import functional

import autosac
from autosac._compat_distributed import fake_group
from autosac.errors import ArgumentError
from autosac.pipelines.blocks import only_possible
from autosac.pipelines.given_stages import read_stages
from autosac.pipelines.schedules import Schedule

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 8


def model():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))


def planned(own=None, **options):
    options = {
        "optimizer": torch.optim.AdamW,
        "loss_fn": functional.mse_loss,
        "schedules": ["1F1B"],
        **options,
    }
    return autosac.plan_pipeline(
        own or model(),
        torch.randn(8, WIDTH),
        target=torch.randn(8, WIDTH),
        num_ranks=2,
        num_micro_batches=4,
        memory_budget="1GiB",
        **options,
    )


@pytest.fixture(scope="module")
def plan():
    return planned()


@pytest.fixture(scope="module")
def looped():
    return planned(schedules=["Interleaved1F1B"], stages_per_rank=2)


def made(own, rank=0):
    return own.stages(model(), own.make_mesh("cpu"))


@pytest.mark.parametrize("kind", ["plan", "looped"])
def test_a_schedule_takes_the_stages_of_a_rank(kind, request):
    own = request.getfixturevalue(kind)
    with fake_group(2, rank=1):
        stages = made(own)
        for given in (stages, tuple(stages), *(stages if len(stages) == 1 else ())):
            schedule = own.schedule(given, functional.mse_loss)
            assert isinstance(schedule, get_schedule_class(own.pipeline.name))


def _other(index, number):
    device = torch.device("cpu")
    example = torch.empty(2, WIDTH, device="meta")
    return PipelineStage(
        model(), index, number, device, input_args=example, output_args=example
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda own: [], "has none, and a rank of this plan"),
        (lambda own: None, "is None: pass what `plan.stages"),
        (lambda own: own[0].submod, "is <Stage>: pass what"),
        (lambda own: [own[0].submod], "has <Stage>, which is no PipelineStage"),
        (lambda own: own * 2, "has 0 of 2 and 0 of 2, and a rank"),
        (lambda own: [*own, _other(1, 2)], "has 0 of 2 and 1 of 2, and a rank"),
        (lambda own: [_other(0, 4)], "has 0 of 4, and a rank .* its 2 stages"),
    ],
)
def test_what_are_no_stages_of_a_rank_is_refused_in_a_sentence(plan, change, why):
    with fake_group(2):
        stages = change(made(plan))
        with pytest.raises(ArgumentError, match=why):
            plan.schedule(stages, functional.mse_loss)


def test_the_stages_of_each_rank_are_taken_in_order():
    pipeline = Schedule(
        name="Interleaved1F1B", num_ranks=2, num_micro_batches=4, stages_per_rank=2
    )
    with fake_group(2):
        both = [_other(i, 4) for i in (1, 3)]
        assert read_stages(both, pipeline) == both
        for wrong in (both[::-1], both[:1], [_other(0, 4), both[0]]):
            with pytest.raises(ArgumentError, match="whose are 0 and 2"):
                read_stages(wrong, pipeline)


@pytest.mark.parametrize("loss_fn", [None, nn.MSELoss, 3])
def test_a_pipeline_needs_a_loss_of_output_and_target(plan, loss_fn):
    why = "a pipeline needs a function of output and target"
    with pytest.raises(ArgumentError, match=why):
        planned(loss_fn=loss_fn)
    with fake_group(2), pytest.raises(ArgumentError, match=why):
        plan.schedule(made(plan), loss_fn)


def test_an_optimizer_that_is_made_already_is_refused_with_what_stages_take():
    own = model()
    with pytest.raises(ArgumentError, match=r"made already \(AdamW\), and each stage"):
        planned(own, optimizer=torch.optim.AdamW(own.parameters()))

    def decayed(parameters):
        return torch.optim.AdamW(parameters.decayed)

    with pytest.raises(ArgumentError, match="or, but to `plan_pipeline`, an optimizer"):
        planned(optimizer=decayed)
    make = partial(torch.optim.AdamW, lr=1e-2)
    assert planned(optimizer=make).peak_bytes == planned().peak_bytes


def test_a_mesh_is_made_for_a_device_as_for_its_type(plan):
    with fake_group(2):
        assert plan.make_mesh(torch.device("cpu")) == plan.make_mesh("cpu")
        assert plan.make_mesh("cpu:0").device_type == "cpu"


@pytest.mark.parametrize("device_type", ["gpu", "", "meta", None, 0])
def test_what_is_no_type_of_device_is_refused(plan, device_type):
    why = re.escape(f"`device_type`={device_type!r} is no type of device")
    with fake_group(2), pytest.raises(ArgumentError, match=why):
        plan.make_mesh(device_type)


def test_one_stage_is_possible_and_more_are():
    assert only_possible(1) == "only 1 stage is possible"
    assert only_possible(2) == "only 2 stages are possible"
