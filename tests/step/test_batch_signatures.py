import pytest
import torch
from torch import nn

from autosac.step.batch_signatures import positional_names, signature_of


class Model(nn.Module):
    def forward(self, tokens, *rest, mask=None, **options):
        return tokens


def signature(*args, **kwargs):
    return signature_of(args, kwargs, positional_names(Model()))


ROWS = torch.zeros(4, 8)


@pytest.mark.parametrize(
    "other",
    [
        signature(torch.ones(4, 8)),
        signature(ROWS.t().contiguous().t()),
        signature(tokens=ROWS),
        signature(ROWS, mask=None),
        signature(torch.zeros(4, 8, device="meta")),
    ],
    ids=["values", "strides", "name", "none", "device"],
)
def test_what_does_not_tell_batches_apart(other):
    assert signature(ROWS) == other


@pytest.mark.parametrize(
    "other",
    [
        signature(ROWS.double()),
        signature(torch.zeros(4, 9)),
        signature(torch.zeros(4, 8, 1)),
        signature([ROWS]),
        signature({"x": ROWS}),
        signature(ROWS, ROWS),
        signature(ROWS, mask=ROWS),
        signature(ROWS, flag=True),
    ],
    ids=["type", "size", "dimensions", "list", "dict", "more", "named", "flag"],
)
def test_what_tells_batches_apart(other):
    assert signature(ROWS) != other
    assert hash(signature(ROWS)) != hash(other)


def test_flags_and_texts_count_and_numbers_do_not():
    assert signature(ROWS, flag=True) != signature(ROWS, flag=False)
    assert signature(ROWS, kind="long") != signature(ROWS, kind="short")
    assert signature(ROWS, number=1) == signature(ROWS, number=2)


def test_a_batch_covers_what_is_nowhere_larger():
    nested = signature({"x": [ROWS, torch.zeros(3)]}, mask=ROWS)
    smaller = signature({"x": [ROWS[:1], torch.zeros(3)]}, mask=ROWS[:, :2])
    crossed = signature({"x": [ROWS[:1], torch.zeros(5)]}, mask=ROWS)

    assert nested.covers(nested)
    assert nested.covers(smaller)
    assert not smaller.covers(nested)
    assert not nested.covers(crossed)
    assert not nested.covers(signature({"x": [ROWS]}, mask=ROWS))
    assert nested.num_elements == 67


def test_it_reads_as_names_and_shapes():
    its_signature = signature(ROWS, mask=ROWS[0], flag=True)
    assert str(its_signature) == "flag=True, mask [8], tokens [4, 8]"


def test_batches_that_differ_in_their_type_alone_are_told_apart():
    rows = torch.zeros(4, 8)
    texts = [str(signature_of((x,), {}, ("x",))) for x in (rows, rows.double())]

    assert texts == ["x [4, 8]", "x float64 [4, 8]"]
