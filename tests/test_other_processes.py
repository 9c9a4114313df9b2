"""What names cells, measured ops and plans is the same in another process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import autosac
from autosac.costs import caching
from autosac.devices.specs import KNOWN_DEVICES
from autosac.sweeps.cell_facts import code_of, text_of
from tests.grid_steps import make_step
from tests.models import CASES

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
_CODE = """
import sys, json, autosac
from tests import test_other_processes as texts
autosac.Plan.load(sys.argv[1]).save(sys.argv[2])
print(json.dumps([texts.of_ops(), texts.of_steps()]))
"""


def traced():
    return CASES["gpt"].profile(torch.optim.AdamW)


def of_ops():
    ops = {op.signature for op in traced().tape.ops if not op.is_view}
    texts = sorted(caching.text_of(signature) for signature in ops)
    assert len(set(texts)) == len(ops)
    return texts


def of_steps():
    value = [make_step, torch.optim.AdamW, {"a", "b", "c"}, KNOWN_DEVICES["h100"]]
    return code_of(make_step), text_of(value)


@pytest.mark.slowest
def test_texts_and_files_of_plans_are_those_of_another_process(tmp_path):
    own, other = tmp_path / "own" / "plan.json", tmp_path / "other" / "plan.json"
    profile = traced()
    for path in (own, other):
        path.parent.mkdir()
    autosac.plan(profile, memory_budget=autosac.floor(profile)).save(own)
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # not our own

    ended = subprocess.run(
        [sys.executable, "-c", _CODE, str(own), str(other)],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True,
        text=True,
    )

    assert not ended.returncode, ended.stderr
    assert json.loads(ended.stdout) == [of_ops(), [*of_steps()]]
    assert other.read_bytes() == own.read_bytes()
    assert [path.name for path in other.parent.iterdir()] == ["plan.json"]


_FORK = """
import os, torch, autosac
model = torch.nn.Linear(3, 3)
autosac.profile(model, torch.ones(1, 3), loss_fn=torch.sum)
child = os.fork()
if not child:
    try:
        model(torch.ones(1, 3)).sum().backward()
    except RuntimeError as error:
        print(error, flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no processes are forked here")
@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch forbids it with a GPU")
def test_a_process_that_is_forked_after_planning_can_train():
    ended = subprocess.run(
        [sys.executable, "-c", _FORK], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
