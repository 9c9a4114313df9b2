import pytest
import torch
from torch import nn

from autosac import _compat_gpu
from autosac.devices.cuda_matmuls import Library, library_of
from autosac.devices.specs import device_spec
from autosac.profiles.profile import profile

aten = torch.ops.aten
A100, H100, MI300X = map(device_spec, ("a100", "h100", "mi300x"))
MIB = 2**20


@pytest.fixture(params=["own", "shared", "temporary"])
def workspaces(request, monkeypatch):
    """As of torch 2.11, 2.14 and 2.15."""
    shares = request.param == "shared"
    keeps = request.param != "temporary"
    monkeypatch.setattr(_compat_gpu, "CUBLASLT_SHARES_WORKSPACE", shares)
    monkeypatch.setattr(_compat_gpu, "cublas_keeps_workspaces", lambda: keeps)
    return request.param


def sizes(model, device=H100):
    """MiB that are kept, and those that forward's matrix products take and free."""
    traced = profile(model, torch.zeros(8, 64), device=device)
    kept = [s.nbytes // MIB for s in traced.tape.storages if s.category == "workspace"]
    forward = [op for op in traced.tape.ops if op.phase == "forward"]
    products = [op for op in forward if "mm" in op.name]
    return kept, [op.workspace_bytes // MIB for op in products]


def test_a_bias_takes_a_workspace_of_its_own_until_it_is_shared(workspaces):
    with_bias = {
        "own": ([32, 1, 32, 1], [0]),
        "shared": ([32, 32], [0]),
        "temporary": ([], [1]),
    }
    without = {**with_bias, "own": ([32, 32], [0]), "temporary": ([], [32])}

    assert sizes(nn.Linear(64, 64)) == with_bias[workspaces]
    assert sizes(nn.Linear(64, 64, bias=False)) == without[workspaces]


def test_sizes_are_those_of_the_gpu(workspaces):
    kept, taken = sizes(nn.Linear(64, 64, bias=False), A100)

    assert sizes(nn.Linear(64, 64), MI300X) == ([128, 128], [0])  # AMD's are kept
    assert kept == ([] if workspaces == "temporary" else [8, 8])
    assert taken == ([8] if workspaces == "temporary" else [0])


def test_what_is_kept_is_kept_throughout_and_only_for_matrix_products(monkeypatch):
    monkeypatch.setattr(_compat_gpu, "cublas_keeps_workspaces", lambda: True)
    tape = profile(nn.Linear(64, 64), torch.zeros(8, 64), device=H100).tape
    held = [s for s in tape.storages if s.category == "workspace"]

    assert held
    assert all((s.born, s.died) == (0, tape.num_ticks) for s in held)
    assert sizes(nn.LayerNorm(64)) == ([], [])


@pytest.mark.parametrize(
    ("bias", "matrix", "kwargs", "library"),
    [
        (torch.zeros(6), torch.zeros(4, 6), {}, Library.CUBLASLT),
        (torch.zeros(6), torch.zeros(4, 6), {"beta": 0.5}, Library.CUBLAS),
        (torch.zeros(8, 6), torch.zeros(4, 6), {}, Library.CUBLAS),
        (torch.zeros(1), torch.zeros(4, 6), {}, Library.CUBLAS),
        (torch.zeros(12)[::2], torch.zeros(4, 6), {}, Library.CUBLAS),
        (torch.zeros(1), torch.zeros(4, 1), {}, Library.CUBLAS),
        (torch.zeros(6).cfloat(), torch.zeros(4, 6).cfloat(), {}, Library.CUBLAS),
    ],
)
def test_only_a_bias_that_is_added_as_it_is_goes_to_cublaslt(
    bias, matrix, kwargs, library
):
    args = (bias, torch.zeros(8, matrix.shape[0], dtype=matrix.dtype), matrix)

    assert library_of(aten.addmm.default, args, kwargs) is library
    assert library_of(aten.mm.default, args[1:], {}) is Library.CUBLAS


@pytest.mark.parametrize(("value", "keeps"), [("1", True), ("0", False), ("", False)])
def test_the_variable_that_keeps_workspaces_is_looked_at(monkeypatch, value, keeps):
    monkeypatch.setattr(_compat_gpu, "TORCH_VERSION", (2, 15))
    monkeypatch.setenv("TORCH_CUBLAS_WORKSPACE_CACHE", value)
    assert _compat_gpu.cublas_keeps_workspaces() is keeps

    monkeypatch.setattr(_compat_gpu, "TORCH_VERSION", (2, 14))
    assert _compat_gpu.cublas_keeps_workspaces()
