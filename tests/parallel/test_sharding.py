import pytest
import torch
from torch import nn

from autosac.parallel.sharding import (
    FsdpUnit,
    Sharding,
    chunk_numel,
    fsdp_units,
    is_uneven,
    local_numel,
    owned_parameters,
)
from autosac.profiles.profile import profile
from autosac.step.tape import Parameter
from tests.models import CASES

ROOT = FsdpUnit(fqn="", reshard_after_forward=False)


def parameter(*shape, fqns=("weight",), dtype="float32"):
    return Parameter(
        fqns=fqns,
        shape=shape,
        dtype=dtype,
        itemsize=4,
        traced_itemsize=4,
        trained=True,
        storage=0,
        gradient=1,
        states=(),
        state_itemsizes=(),
        other_states=(),
    )


@pytest.mark.parametrize("rows", [1, 2, 5, 8, 10, 13])
@pytest.mark.parametrize("degree", [1, 2, 3, 4, 8, 16])
def test_chunks_are_those_of_torch(rows, degree):
    chunks = torch.ones(rows, 3).chunk(degree)
    numels = [chunk.numel() for chunk in chunks] + [0] * (degree - len(chunks))

    one = parameter(rows, 3)

    assert [local_numel(one, degree, rank) for rank in range(degree)] == numels
    assert chunk_numel(one, degree) == numels[0]
    assert is_uneven(one, degree) == (rows % degree != 0)


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"units": (FsdpUnit(fqn="0"),)}, "lacks the model itself"),
        ({"units": (ROOT, ROOT)}, "twice"),
        ({"shard_degree": 0}, "`shard_degree` must be at least 1, got 0"),
        ({"replicate_degree": -1}, "`replicate_degree` must be at least 1"),
        (
            {"units": fsdp_units(["0"], reshard_after_forward=3)},
            "`reshard_after_forward`=3 of unit `0` must divide",
        ),
        ({"param_dtype": "bfloat16"}, "give both or none"),
        ({"param_dtype": "int8", "reduce_dtype": "int8"}, "'int8' is no type"),
    ],
)
def test_what_fsdp2_would_refuse_is_refused_at_once(settings, words):
    with pytest.raises(ValueError, match=words):
        Sharding(**{"units": (ROOT,), "shard_degree": 4, **settings})


def test_gradients_are_not_reduced_in_a_narrower_type():
    with pytest.raises(NotImplementedError, match="narrower"):
        Sharding(
            units=(ROOT,),
            shard_degree=2,
            param_dtype="float32",
            reduce_dtype="bfloat16",
        )


def test_a_parameter_belongs_to_the_innermost_unit_around_it():
    tape = CASES["mlp"].profile().tape
    sharding = Sharding(units=fsdp_units(["0", "0.3", "2"]), shard_degree=2)

    owned = owned_parameters(tape, sharding)

    names = {fqn: [p.fqns[0] for p in observed] for fqn, observed in owned.items()}
    assert names == {
        "0": ["0.0.weight", "0.0.bias"],
        "0.3": ["0.3.weight", "0.3.bias"],
        "2": ["2.0.weight", "2.0.bias", "2.3.weight", "2.3.bias"],
        "": ["1.0.weight", "1.0.bias", "1.3.weight", "1.3.bias"],
    }


def test_a_shared_parameter_must_be_in_one_unit():
    tape = CASES["tied weights"].profile().tape

    with pytest.raises(ValueError, match=r"`embedding\.weight` is shared with `head"):
        owned_parameters(
            tape, Sharding(units=fsdp_units(["embedding"]), shard_degree=2)
        )
    owned_parameters(tape, Sharding(units=fsdp_units(["body"]), shard_degree=2))


def test_an_unknown_unit_is_named():
    tape = CASES["mlp"].profile().tape

    with pytest.raises(ValueError, match="`nowhere`, which is no module"):
        owned_parameters(tape, Sharding(units=fsdp_units(["nowhere"]), shard_degree=2))


def test_a_unit_holds_parameters_of_one_type():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    model[1].register_forward_pre_hook(lambda _, args: (args[0].double(),))
    tape = profile(model, torch.ones(2, 4)).tape

    with pytest.raises(ValueError, match="types float32 and float64"):
        owned_parameters(tape, Sharding(units=(ROOT,), shard_degree=2))
    owned_parameters(tape, Sharding(units=fsdp_units(["0"]), shard_degree=2))


def test_a_scalar_parameter_cannot_be_sharded():
    model = nn.Linear(4, 4)
    model.scale = nn.Parameter(torch.ones(()))
    tape = profile(model, torch.ones(2, 4)).tape

    with pytest.raises(ValueError, match="`scale` is a scalar"):
        owned_parameters(tape, Sharding(units=(ROOT,), shard_degree=2))
