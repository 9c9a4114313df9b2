import atexit
import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest


def _limit_onednn():
    """Keep oneDNN from AMX where a virtual machine reports it, and then lacks it.

    There the first product of bfloat16 matrices ends any process, ours or not.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that started this one has tried it
    flags = Path("/proc/cpuinfo")
    if "ONEDNN_MAX_CPU_ISA" in os.environ or not flags.exists():
        return
    if "amx_tile" in flags.read_text():
        product = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"
        ended = subprocess.run([sys.executable, "-c", product], check=False)
        if ended.returncode == -signal.SIGILL:
            os.environ["ONEDNN_MAX_CPU_ISA"] = "AVX512_CORE_BF16"


_limit_onednn()


def pytest_addoption(parser):
    told = "Run the slowest tests, too, which `-m 'slow or not slow'` alone does not."
    parser.addoption("--every-case", action="store_true", help=told)


def pytest_configure(config):
    """Runs without slow tests draw fewer examples."""
    if config.getoption("numprocesses"):
        return  # this process runs no tests: imports would only take it time
    gc.disable()  # until tests are collected: what imports make stays
    atexit.register(gc.unfreeze)  # so that what was frozen is not reported as leaked
    _share_cores()
    _seed_what_is_there()
    from hypothesis import HealthCheck, settings

    from tests import examples

    if config.option.markexpr == "not slow":
        examples.draw_fewer()
    # No test fails because the machine is busy.
    settings.register_profile(
        "any machine",
        deadline=None,
        max_examples=examples.at_most(examples.DEFAULT),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("any machine")


def _share_cores():
    """Processes that run side by side (pytest -n) share the cores."""
    import torch

    import autosac  # noqa: F401  # before the session starts

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    torch.set_num_threads(max(1, torch.get_num_threads() // workers))


def _seed_what_is_there():
    """`torch.manual_seed` takes ms to note where it was called for devices to come."""
    import torch

    for kind in (torch.cuda, torch.xpu, torch.mtia):
        if not kind.is_available():
            kind.manual_seed_all = lambda seed: None


def pytest_collection_finish():
    """Garbage is collected from here on, not among what imports have made."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of a test that is `slow_but_first`, all cases but the first are slow.

    Of one that is `slow_but_fifth`, four of five are, beginning with another one in
    each such test; half of these are among the slowest. So are all cases but the first
    of a slow test that is `slowest_but_first`.
    """
    names = [item.nodeid.partition("[")[0] for item in items]
    num_cases, seen = Counter(names), Counter()
    for item, name in zip(items, names, strict=True):
        if item.get_closest_marker("slow_but_first") and seen[name]:
            item.add_marker("slow")
        if item.get_closest_marker("slowest_but_first"):
            item.add_marker("slowest" if seen[name] else "slow")
        first = crc32(name.encode()) % min(5, num_cases[name])
        behind = (seen[name] - first) % 5
        if item.get_closest_marker("slow_but_fifth") and behind:
            item.add_marker("slowest" if behind > 2 else "slow")
        if item.get_closest_marker("slowest"):
            item.add_marker("slow")
        seen[name] += 1
    if not config.getoption("every_case"):
        _leave_out_slowest(config, items)


def _leave_out_slowest(config, items):
    slowest = [item for item in items if item.get_closest_marker("slowest")]
    config.hook.pytest_deselected(items=slowest)
    gone = set(map(id, slowest))
    items[:] = [item for item in items if id(item) not in gone]


@pytest.fixture(scope="module", autouse=True)
def frozen_objects():
    """Measuring collects garbage: not among all that imports and others have made."""
    gc.collect()
    gc.freeze()


def _on_one_thread():
    import torch  # not in the process that starts others

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def one_thread():
    """Models this small are faster on one thread, by much on a busy machine."""
    yield from _on_one_thread()


@pytest.fixture(scope="module")
def one_thread_throughout():
    """As `one_thread`, for modules whose fixtures measure."""
    yield from _on_one_thread()


@pytest.fixture(scope="module")
def kept_workspaces():
    """Matrix products keep their workspaces on a GPU, as until torch 2.14."""
    from autosac import _compat_gpu  # imports PyTorch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compat_gpu, "cublas_keeps_workspaces", lambda: True)
        yield


@pytest.fixture(scope="session", autouse=True)
def cache_of_this_run(tmp_path_factory):
    """Tests neither read nor write the table of measured ops of the user."""
    with pytest.MonkeyPatch.context() as patch:
        directory = tmp_path_factory.mktemp("cache")
        patch.setenv("AUTOSAC_CACHE_DIR", str(directory))
        yield directory
