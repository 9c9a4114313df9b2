import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

import autosac
from autosac.errors import ArgumentError
from autosac.step.batches import first_batch


class Pictures(Dataset):
    """Rows with augmentation from every source of randomness."""

    def __init__(self):
        self.torch_stream = torch.Generator().manual_seed(1)
        self.numpy_stream = np.random.default_rng(2)
        self.old_numpy_stream = np.random.RandomState(3)
        self.python_stream = random.Random(4)

    def __len__(self):
        return 12

    def __getitem__(self, index):
        noise = torch.rand((), generator=self.torch_stream) + torch.rand(())
        noise += self.numpy_stream.random() + self.old_numpy_stream.rand()
        noise += self.python_stream.random() + random.random() + np.random.rand()
        return torch.full((8,), float(index)) + noise


class Stream(IterableDataset):
    def __init__(self, num_rows=5):
        self.num_rows = num_rows

    def __iter__(self):
        return (torch.full((8,), float(i)) for i in range(self.num_rows))


class OneWay(IterableDataset):
    def __iter__(self):
        return self

    def __next__(self):
        return torch.zeros(8)


def seed_all():
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def loader_of(kind):
    generator = torch.Generator().manual_seed(7)
    if kind == "sampler":
        sampler = RandomSampler(Pictures(), generator=generator)
        return DataLoader(Pictures(), batch_size=4, sampler=sampler)
    if kind == "global":
        return DataLoader(Pictures(), batch_size=4, shuffle=True)
    if kind == "no batches":
        return DataLoader(Pictures(), batch_size=None, shuffle=True)
    if kind == "stream":
        return DataLoader(Stream(), batch_size=3)
    return DataLoader(Pictures(), batch_size=4, shuffle=True, generator=generator)


KINDS = ["generator", "sampler", "global", "no batches", "stream"]


@pytest.mark.slow_but_fifth
@pytest.mark.parametrize("kind", KINDS)
def test_batches_after_planning_are_those_without_it(kind):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    seed_all()
    expected = list(loader_of(kind))
    seed_all()
    loader = loader_of(kind)
    autosac.profile(model, loader)
    batches = list(loader)

    assert len(batches) == len(expected) > 1
    assert all(map(torch.equal, batches, expected))


def test_an_iterator_that_is_in_use_goes_on_where_it_was():
    loader = loader_of("generator")
    seed_all()
    expected = list(loader_of("generator"))
    seed_all()
    batches = iter(loader)
    observed = [next(batches)]
    first_batch(loader)
    observed += list(batches)

    assert all(map(torch.equal, observed, expected))


def test_of_a_loader_with_its_own_generator_it_is_the_first_batch():
    rows = TensorDataset(torch.arange(20.0))
    loader = DataLoader(
        rows, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3)
    )
    given = first_batch(DataLoader(rows, batch_size=4, sampler=[5, 3, 1, 0, 2, 4]))

    assert torch.equal(given[0], torch.tensor([5.0, 3.0, 1.0, 0.0]))
    assert first_batch(loader)[0].shape == (4,)
    assert torch.equal(first_batch(loader)[0], first_batch(loader)[0])


def test_a_profile_of_a_loader_is_that_of_its_batch():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    loader = loader_of("stream")
    expected = autosac.profile(model, torch.zeros(3, 8))

    assert autosac.profile(model, loader).tape == expected.tape
    assert autosac.estimate(model, loader).peak_bytes == (
        autosac.estimate(model, torch.zeros(3, 8)).peak_bytes
    )


def test_planning_takes_no_sample_from_workers():
    loader = DataLoader(
        Pictures(), batch_size=4, num_workers=2, persistent_workers=True
    )
    first_batch(loader)

    assert loader._iterator is None


def test_a_dataset_that_is_its_own_iterator_is_refused():
    with pytest.raises(ArgumentError, match="OneWay, which is its own iterator"):
        first_batch(DataLoader(OneWay(), batch_size=2))


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(Stream(0), batch_size=2),
        DataLoader(Stream(2), batch_size=3, drop_last=True),
        DataLoader(TensorDataset(torch.zeros(2)), batch_size=3, drop_last=True),
    ],
)
def test_a_loader_without_a_batch_is_refused(loader):
    with pytest.raises(ArgumentError, match="without a batch"):
        first_batch(loader)


def test_a_batch_with_targets_says_how_to_pass_them():
    rows = TensorDataset(torch.zeros(6, 8), torch.zeros(6, dtype=torch.long))
    model = torch.nn.Linear(8, 8)
    with pytest.raises(TypeError, match=r"do not fit Linear.forward.*loss_fn=lambda"):
        autosac.profile(model, DataLoader(rows, batch_size=2))
