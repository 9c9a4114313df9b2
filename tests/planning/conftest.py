"""A step and a plan for tests of what plans show and write."""

import pytest
import torch

import autosac
from tests.models import SMALL_GPT


@pytest.fixture(scope="module")
def traced():
    return SMALL_GPT.profile(torch.optim.AdamW)


@pytest.fixture(scope="module")
def plan(traced):
    lowest = autosac.floor(traced)
    budget = (2 * lowest + traced.baseline_peak_bytes) // 3
    return autosac.plan(traced, memory_budget=budget)
