import threading

import pytest
import torch

from autosac.step.optimizer_state import optimizer_tensors
from autosac.storages import storage_bytes
from autosac.verification.measuring import capture_state, differences, measure_peak

MATRIX_BYTES = 4 * 64 * 64


def peak_of(run, persistent_bytes=0, **options):
    return measure_peak(run, device="cpu", persistent_bytes=persistent_bytes, **options)


def test_peak_counts_what_is_alive_together():
    matrix = torch.ones(64, 64)

    def run():
        # x, then x and y; x is freed before z: never more than two matrices.
        x = matrix @ matrix
        y = x @ matrix
        del x
        z = y @ matrix
        return z.sum().item()

    # The sum's four bytes come on top of y and z.
    assert peak_of(run, persistent_bytes=1000) == (64.0**5, 1000 + 2 * MATRIX_BYTES + 4)


def test_peak_of_a_linear_layer_is_counted_by_hand():
    layer = torch.nn.Linear(64, 64, bias=False)
    inputs = torch.ones(64, 64)

    def run():
        layer(inputs).backward(inputs)  # the output, then the weight's gradient

    assert peak_of(run)[1] == 2 * MATRIX_BYTES


def test_a_small_run_adds_nothing_to_the_persistent_bytes():
    assert peak_of(lambda: None, persistent_bytes=123) == (None, 123)


def test_frees_of_what_the_warm_up_left_lower_the_sum():
    kept = []

    def replace():
        kept.clear()
        kept.append(torch.ones(64, 64))

    assert peak_of(replace, warm_up=replace)[1] == MATRIX_BYTES


def test_what_is_held_counts_once_and_what_the_warm_up_left_counts_unasked():
    older, kept = torch.ones(64, 64), []

    def warm_up():
        kept.append(torch.ones(64, 64))
        kept.append(torch.ones(64, 64, requires_grad=True).exp())  # and its graph

    _, peak_bytes = peak_of(
        older.clone, warm_up=warm_up, held=lambda: [older, older[0], kept[0]]
    )

    assert peak_bytes == (1 + 3 + 1) * MATRIX_BYTES


def test_frees_of_anything_older_do_not():
    kept = [torch.ones(64, 64)]

    def replace():
        kept.clear()
        kept.append(torch.ones(64, 64))

    assert peak_of(replace, storage_bytes(kept))[1] == 2 * MATRIX_BYTES


def test_a_stale_size_of_an_earlier_recording_is_not_believed():
    # The allocator's table keeps the first tensor's size for its address; whatever
    # lies there later must not count as a free of that size.
    kept = []
    peak_of(lambda: kept.append(torch.ones(1 << 20)))
    kept.clear()
    kept += [torch.ones((1 << 20) - 8) for _ in range(4)]

    def run():
        kept.clear()
        return torch.ones(16)

    assert peak_of(run)[1] == 64


def test_events_keep_their_order_when_there_are_many():
    def run():
        for _ in range(5000):
            torch.empty(100)

    assert peak_of(run)[1] == 400


def test_other_threads_are_not_recorded():
    # A fact about the profiler, on which the module's docstring reports.
    def run():
        thread = threading.Thread(target=lambda: torch.ones(64, 64))
        thread.start()
        thread.join()

    assert peak_of(run)[1] == 0


def test_a_failing_run_raises_its_own_error():
    with pytest.raises(ZeroDivisionError):
        peak_of(lambda: 1 / 0)


def test_refuses_devices_without_statistics():
    with pytest.raises(NotImplementedError, match="not on 'meta'"):
        measure_peak(lambda: None, device="meta", persistent_bytes=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_peak_holds_the_whole_process():
    held = torch.ones(64, 64, device="cuda")
    before = torch.cuda.memory_allocated()

    _, peak_bytes = measure_peak(
        lambda: (held + 1).sum().item(), device="cuda", persistent_bytes=0
    )

    assert peak_bytes >= before + MATRIX_BYTES


def test_storages_count_once():
    x = torch.ones(10)
    sparse = torch.eye(4).to_sparse()  # 4 pairs of int64 and 4 float32

    assert storage_bytes([x, x[2:], x.view(2, 5), x.detach()]) == 40
    assert storage_bytes([x, x.clone()]) == 80
    assert storage_bytes([x, x.clone()], granularity_bytes=512) == 1024
    assert storage_bytes([x[:1]]) == 40
    assert storage_bytes([sparse]) == 4 * 2 * 8 + 4 * 4
    assert storage_bytes([x, torch.ones(5, device="meta")], device="cpu") == 40


def trained(seed=0, optimizer_class=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = optimizer_class(model.parameters(), lr=0.1)
    loss = model(torch.randn(8, 4)).square().sum()
    loss.backward()
    optimizer.step()
    return model, optimizer, loss.detach()


def test_state_holds_everything_a_step_changes():
    state = capture_state(*trained())

    assert state.keys() >= {
        "loss",
        "parameter 0.weight",
        "gradient of 0.weight",
        "buffer 1.running_mean",
        "buffer 1.num_batches_tracked",
        "optimizer state ['exp_avg'] of 0.weight",
        "optimizer state ['step'] of 0.weight",
        "random state of cpu",
        "random state of Python",
        "random state of NumPy",
    }


class Counting(torch.optim.SGD):
    """Has a number of all parameters in its state, by a name, as MADGRAD does."""

    def step(self, closure=None):
        self.state["k"] = self.state.get("k", torch.zeros(1)) + 1
        return super().step(closure)


def test_what_an_optimizer_keeps_by_a_name_is_state():
    model, optimizer, loss = trained(optimizer_class=Counting)
    state = capture_state(model, optimizer, loss)
    assert state["optimizer state of k"] == 1


def test_states_of_the_same_streams_are_equal_by_any_comparison():
    first, second = (capture_state(*trained()) for _ in range(2))
    for name in ("random state of Python", "random state of NumPy"):
        assert torch.equal(first[name], second[name])


def test_state_is_a_copy():
    model, optimizer, loss = trained()
    state = capture_state(model, optimizer, loss)

    with torch.no_grad():
        model[0].weight.add_(1)

    assert differences(state, capture_state(model, optimizer, loss)) == (
        "parameter 0.weight: 16 of 16 elements differ, by at most 1",
    )


def test_equal_runs_have_no_differences():
    assert differences(capture_state(*trained()), capture_state(*trained())) == ()


def test_nested_optimizer_state_is_found():
    def lbfgs(parameters, lr):
        optimizer = torch.optim.LBFGS(parameters, lr=lr)
        step = optimizer.step
        optimizer.step = lambda: step(lambda: torch.zeros(()))
        return optimizer

    model, optimizer, loss = trained(optimizer_class=lbfgs)
    names = capture_state(model, optimizer, loss).keys()

    assert any(name.startswith("optimizer state ['func_evals']") for name in names)
    assert storage_bytes(optimizer_tensors(optimizer)) > 0
    assert optimizer_tensors(None) == []


def test_sparse_gradients_are_compared():
    def gradient(index):
        model = torch.nn.Embedding(4, 2, sparse=True)
        model(torch.tensor([index])).sum().backward()
        return capture_state(model, None, torch.zeros(()))

    differing = differences(gradient(1), gradient(2), limit=99)

    assert "gradient of weight: 1 of 1 elements differ" in differing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_single_flipped_bit_is_found(dtype):
    expected = torch.ones(3, 5).to(dtype)
    actual = expected.clone()
    actual.view(torch.uint8)[1, 8] ^= 1

    (observed,) = differences({"x": expected}, {"x": actual})

    assert observed.startswith("x: 1 of 15 elements differ")


def test_equality_is_of_bits():
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])

    assert differences({"x": nan}, {"x": nan.clone()}) == ()
    assert differences({"x": zero}, {"x": -zero}) == (
        "x: 1 of 1 elements differ, by at most 0",
    )
    assert differences({"x": zero}, {"x": zero.double()}) == (
        "x: torch.float64 (1,) instead of torch.float32 (1,)",
    )
    assert differences({"x": torch.tensor(1)}, {"x": torch.tensor(1)}) == ()
    assert differences({"x": torch.empty(0)}, {"x": torch.empty(0)}) == ()


def test_missing_entries_are_differences():
    x = torch.zeros(1)

    assert differences({"a": x}, {"b": x}) == (
        "a: only in the expected state",
        "b: only in the actual state",
    )


def test_only_the_first_differences_are_named():
    zeros = {str(i): torch.zeros(1) for i in range(9)}
    ones = {str(i): torch.ones(1) for i in range(9)}

    differing = differences(zeros, ones, limit=3)

    assert [line[0] for line in differing] == ["0", "1", "2"]


def test_one_element_of_any_stride_is_compared():
    one = torch.ones(4, 4).as_strided((1, 1), (7, 3))

    assert differences({"one": one}, {"one": one.clone()}) == ()
    assert len(differences({"one": one}, {"one": 2 * one})) == 1
