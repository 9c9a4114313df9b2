"""What a snapshot of a module's attributes brings back, and what it does not hold."""

import weakref
from collections import Counter, OrderedDict, deque

import pytest
import torch
from torch import nn

from autosac.checkpointing.module_attributes import Snapshots


def module_with(**attributes):
    module = nn.Linear(2, 2)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


class Frozen(OrderedDict):
    """Filled once, as the configurations of diffusers are."""

    def update(self, *args, **kwargs):
        raise TypeError("frozen")

    def __setitem__(self, key, value):
        if key in self or len(self) == 2:
            raise TypeError("frozen")
        super().__setitem__(key, value)


def test_a_container_whose_class_forbids_changes_is_filled_again_past_it():
    module = module_with(config=Frozen([("a", [1, 2]), ("b", 3)]))
    attributes = Snapshots(module).take()
    OrderedDict.clear(module.config)
    config = module.config
    present = attributes.resume()
    assert module.config is config
    assert list(config.items()) == [("a", [1, 2]), ("b", 3)]
    present.restore()
    assert not config


def test_a_container_that_was_replaced_keeps_no_tensor_alive():
    module = module_with(seen={"latest": [torch.ones(3)]})
    gone = weakref.ref(module.seen["latest"][0])

    attributes = Snapshots(module).take()
    module.seen = {**module.seen, "latest": [torch.zeros(3)]}

    assert gone() is None
    present = attributes.resume()
    assert module.seen["latest"][0].sum() == 0  # what is there now
    present.restore()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": [torch.ones(3)]}, {}),
        ([torch.ones(3), [1, 2]], []),
        (deque([torch.ones(3)], maxlen=1), deque([torch.zeros(3)], maxlen=1)),
        ([1, {"a": 2}], [3]),
        (Counter(a=2), Counter(b=1)),
        ({1, 2}, {3}),
    ],
)
@pytest.mark.parametrize("in_place", [False, True])
def test_a_container_is_found_as_it_was_and_left_as_it_is(before, after, in_place):
    expected = before.copy()
    module = module_with(seen=before)
    attributes = Snapshots(module).take()
    if in_place:
        before.clear()
        before.update(after) if hasattr(before, "update") else before.extend(after)
    else:
        module.seen = after
    now, content = module.seen, module.seen.copy()

    present = attributes.resume()

    found = module.seen
    assert type(found) is type(expected) and str(found) == str(expected)
    assert getattr(found, "maxlen", None) == getattr(expected, "maxlen", None)
    present.restore()
    assert module.seen is now and str(now) == str(content)
