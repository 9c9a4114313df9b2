import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, settings

import autosac  # noqa: F401  # before the session starts

# Processes that run side by side (pytest -n) share the cores.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // _WORKERS))

# No test fails because the machine is busy.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


def pytest_sessionstart():
    """Measuring collects garbage: not among all that PyTorch's import has made."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_thread():
    """Models this small are faster on one thread, by much on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def one_thread_throughout():
    """As `one_thread`, for modules whose fixtures measure."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory):
    """Tests neither read nor write the table of measured ops of the user."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setenv("AUTOSAC_CACHE_DIR", str(directory))
        yield directory
