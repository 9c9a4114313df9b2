"""Logits that stay divided over the vocabulary: plans, and what they refuse."""

from functools import partial

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import autosac
from autosac._compat_distributed import fake_group, is_loss_parallel
from autosac.parallel.tp_finding import find_styles, with_divided_loss
from autosac.parallel.tp_styles import apply
from tests.parallel.test_meshes import LENGTH, VOCABULARY, Titan, plan_of, tokens

pytestmark = pytest.mark.usefixtures("one_thread")


def cross_entropy(target, output, **options):
    return functional.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def ignoring(target, output, weight):
    target = target.flatten().clone()
    target[::4] = -100
    return functional.cross_entropy(output.flatten(0, 1), target, weight=weight)


def by_rows(target, output):
    return functional.cross_entropy(output.transpose(1, 2), target, ignore_index=3)


def with_mean(target, output):
    logs = functional.log_softmax(output.flatten(0, 1), -1)
    return functional.nll_loss(logs, target.flatten()) + logs.mean()


def plan(loss_fn=cross_entropy, **options):
    options = {"mesh": {"tp": 2}, "tp_plan": "tensor", **options}
    return plan_of(
        Titan(),
        tokens(),
        loss_fn=partial(loss_fn, tokens()),
        **{"loss_parallel": True, **options},
    )


@pytest.mark.slow
def test_a_rank_holds_its_part_of_logits(tmp_path):
    whole, divided = (plan(loss_parallel=is_divided) for is_divided in (False, True))
    part_bytes = 2 * LENGTH * VOCABULARY // 2 * 4  # of two rows
    # In backward whole logits, their logarithms and gradients; or their parts, and
    # besides what PyTorch's `loss_parallel` makes of logarithms, twice.
    assert whole.peak_bytes - divided.peak_bytes == (3 * 2 - 5) * part_bytes
    assert "train under `loss_parallel()`" in str(divided)
    divided.save(tmp_path / "plan.json")
    assert autosac.ParallelPlan.load(tmp_path / "plan.json") == divided


@pytest.mark.slow
def test_a_loss_of_rows_takes_less_too():
    assert plan(by_rows).peak_bytes < plan(by_rows, loss_parallel=False).peak_bytes


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        (
            {"loss_fn": partial(cross_entropy, label_smoothing=0.1)},
            autosac.TraceError,
            "without label smoothing",
        ),
        (
            {"loss_fn": partial(ignoring, weight=torch.ones(VOCABULARY))},
            autosac.UnsupportedError,
            "`ignore_index`=-100, which is none of",
        ),
        ({"loss_fn": with_mean}, autosac.UnsupportedError, "wrong gradients"),
        (
            {"tp_plan": {"layers.*.feed_forward.w2": "rowwise"}},
            autosac.ArgumentError,
            "none is known",
        ),
        (
            {"mesh": None, "tp_plan": None},
            autosac.ArgumentError,
            "`loss_parallel` is given",
        ),
    ],
)
def test_what_pytorch_would_get_wrong_is_refused(options, error, why):
    with pytest.raises(error, match=why):
        plan(**options)
    assert not is_loss_parallel()


def test_logits_are_not_gathered_without_a_word():
    model = Titan()
    with fake_group(2):
        styles = with_divided_loss(find_styles(model))
        apply(model, init_device_mesh("cpu", (2,)), styles)
        with torch.no_grad():
            assert model(tokens()).to_local().shape[-1] == VOCABULARY // 2
        with pytest.raises(autosac.ArgumentError, match="loss_parallel"):
            model(tokens())
