"""What products hide of collectives, by hand and on a traced rank."""

from types import SimpleNamespace

import pytest
import torch

import autosac
from autosac.parallel.async_tp import exposed_ms
from autosac.parallel.clusters import cluster_spec
from autosac.parallel.formulating import Setting
from autosac.parallel.tp_finding import find_styles
from autosac.parallel.tp_styles import TensorParallel
from autosac.parallel.tp_tracing import collective_of, exchange_ms, rank_profile
from benchmarks.stage_models import GPT

MM, ADD, CAT = "aten.mm.default", "aten.add.Tensor", "aten.cat.default"


def op(name, reads, creates, phase="forward"):
    return SimpleNamespace(
        name=name, phase=phase, reads=reads, writes=(), creates=creates
    )


def test_all_but_the_first_chunk_of_what_is_beside_a_product_is_hidden():
    ops = [
        op("gather", (0,), (1,)),
        op(CAT, (1,), (2,)),
        op(MM, (2, 10), (3,)),
        op(MM, (2, 11), (4,)),
        op(ADD, (3, 4), (5,)),
        op(MM, (5, 12), (6,)),
        op("scatter", (6,), (7,)),
        op(MM, (2, 6), (8,), "backward"),  # of another pass
        op(ADD, (8, 8), (9,)),
        op("scatter", (9,), (13,)),  # not of a product
        op("reduce", (13,), (14,)),
    ]
    times = [10.0, 0, 4, 4, 0, 8, 5, 100, 0, 7, 3]
    kinds = {0: "all_gather", 6: "reduce_scatter", 9: "reduce_scatter"}
    kinds[10] = "all_reduce"
    # Three quarters of products of 8 ms each hide 6 ms.
    assert exposed_ms(ops, times, kinds, 4) == {0: 4.0, 6: 0.0, 9: 7, 10: 3}
    # Of one rank's only chunk nothing is hidden.
    assert exposed_ms(ops, times, kinds, 1) == {0: 10, 6: 5, 9: 7, 10: 3}


def test_a_product_hides_one_collective_only():
    ops = [
        op("gather", (0,), (1,)),
        op(MM, (1, 9), (2,)),
        op("scatter", (2,), (3,)),
    ]
    kinds = {0: "all_gather", 2: "reduce_scatter"}
    assert exposed_ms(ops, [4.0, 8, 4], kinds, 2) == {0: 0.0, 2: 4.0}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_traced_rank_waits_less_and_has_the_same_memory():
    with torch.device("meta"):
        model = GPT()
    tokens = torch.zeros(2, 64, dtype=torch.int64)
    profile = autosac.profile(model, tokens, device="h100")
    styles = find_styles(model, sequence=True)
    spec = cluster_spec("hgx-h100", num_gpus=2)
    plain, hidden = (
        rank_profile(
            profile,
            TensorParallel(degree=2, styles=styles, asynchronous=asynchronous),
            spec,
            Setting(),
        )
        for asynchronous in (False, True)
    )
    assert 0 < exchange_ms(hidden, 2) < exchange_ms(plain, 2)
    for own, less, more in zip(plain.tape.ops, hidden.op_ms, plain.op_ms, strict=True):
        assert less <= more if collective_of(own, 2) else less == more
    assert plain.simulator.peak_bytes({}) == hidden.simulator.peak_bytes({})
