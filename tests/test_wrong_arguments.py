"""What cannot be meant is one sentence with the value and what it must be."""

import re

import numpy as np
import pytest
import torch
from torch import nn

import autosac
from autosac.errors import ArgumentError
from autosac.graphs.plans import GraphPlanner
from autosac.parallel.clusters import cluster_spec
from autosac.pipelines.schedules import Schedule
from autosac.planning.make_plan import read_offload
from autosac.quantities import read_budgets
from autosac.solving.solve_options import SolveOptions
from autosac.step.arguments import read_fsdp_dtypes


@pytest.fixture(scope="module")
def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def _mean(output):
    return output.mean()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("accumulate", value) for value in (0, 1.5, True, "2", None)),
        *(("accumulate", value) for value in (float("nan"),)),
        *(("clip_grad_norm", value) for value in ("1", 0, True, float("nan"))),
        *(("exclude", value) for value in (None, 3)),
        ("opaque", True),
        *(("device", value) for value in (0, 3.5, ["h100"], torch.device("meta"))),
        *(("backend", value) for value in ("gurobi", None)),
        *(("relative_gap", value) for value in (-1, "x", float("nan"), True)),
        *(("time_limit_s", value) for value in (-1, "x", float("nan"))),
        ("dry_run", "x"),
        ("offload_dir", 3),
        *(("allocator", value) for value in ({"max_split_size_mb": 64}, "x")),
    ],
)
def test_a_plan_refuses_it_however_ample_the_budget_is(model, name, value):
    options = {"memory_budget": "1GiB", "loss_fn": _mean, name: value}

    with pytest.raises(ArgumentError, match=f"`{name}`") as error:
        autosac.plan(model, torch.ones(2, 4), **options)

    assert re.search(re.escape(repr(value)), str(error.value))


@pytest.mark.parametrize("optimizer", ["muon", lambda p: torch.optim.SGD(p, lr=-1)])
def test_an_optimizer_that_refuses_its_parameters_is_named(model, optimizer):
    with pytest.raises(ArgumentError, match=r"`optimizer`.* says ValueError"):
        autosac.plan(
            model,
            torch.ones(2, 4),
            memory_budget="1GiB",
            loss_fn=_mean,
            optimizer=optimizer,
        )


def test_the_way_out_for_an_optimizer_of_matrices_works(model):
    options = {"memory_budget": "1GiB", "loss_fn": _mean}
    with pytest.raises(ArgumentError, match="Muon") as caught:
        autosac.plan(model, torch.ones(2, 4), optimizer=torch.optim.Muon, **options)
    of_matrices = "torch.optim.Muon([p for p in parameters if p.ndim == 2])"
    assert f"Pass `lambda parameters: {of_matrices}`" in str(caught.value)

    def own(parameters):
        return torch.optim.Muon([p for p in parameters if p.ndim == 2])

    autosac.plan(model, torch.ones(2, 4), optimizer=own, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("cluster", value) for value in (None, 3, "foo", [])),
        *(("num_gpus", value) for value in (0, "8", 1.5, True, 9)),
        *(("degrees", value) for value in (3, [], ["2"], [2.0], [True], [3])),
        *(("mesh", value) for value in ("tp", [2])),
        *(("param_dtype", value) for value in ("int8", "foo", torch.int8)),
        ("fsdp_units", 3),
        ("relative_gap", -1),
    ],
)
def test_a_parallel_plan_refuses_it(model, name, value):
    options = {"cluster": "hgx-h100", "memory_budget": "1GiB", name: value}
    if name == "param_dtype":
        options["reduce_dtype"] = "float32"

    with pytest.raises(ArgumentError) as error:
        autosac.plan_parallel(model, torch.ones(2, 4), loss_fn=_mean, **options)

    shown = value[0] if isinstance(value, list) and value else value
    assert str(shown) in str(error.value)


def test_degrees_of_an_array_are_those_of_a_list(model):
    options = {"cluster": "hgx-h100", "memory_budget": "1GiB", "loss_fn": _mean}

    plans = [
        autosac.plan_parallel(model, torch.ones(2, 4), degrees=degrees, **options)
        for degrees in (np.array([2, 4]), [2, 4])
    ]

    assert plans[0] == plans[1]
    assert type(plans[0].sharding.shard_degree) is int


@pytest.mark.parametrize("inputs", [{1: torch.ones(2, 4)}, ((), {None: 1})])
def test_keys_of_inputs_are_names(model, inputs):
    with pytest.raises(ArgumentError, match=r"`inputs` is a dict, .*, got (1|None):"):
        autosac.estimate(model, inputs)


@pytest.mark.parametrize("dtype", ["bf16", "torch.bfloat16", torch.bfloat16])
def test_types_of_fsdp_are_read_as_those_of_autocast(model, dtype):
    def gathered(types):
        plan = autosac.plan_parallel(
            model,
            torch.ones(2, 4),
            loss_fn=_mean,
            cluster="hgx-h100",
            num_gpus=2,
            memory_budget="1GiB",
            param_dtype=types[0],
            reduce_dtype=types[1],
        )
        return plan.sharding.param_dtype, plan.sharding.reduce_dtype

    assert gathered((dtype, torch.float32)) == ("bfloat16", "float32")
    assert read_fsdp_dtypes(None, "fp32") == {
        "param_dtype": None,
        "reduce_dtype": "float32",
    }


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("num_ranks", value) for value in ("2", 1.5, True)),
        ("num_micro_batches", 1.5),
        *(("schedules", value) for value in ("1F1B", None, 3, [])),
        ("mesh", "x"),
    ],
)
def test_a_pipeline_refuses_it(model, name, value):
    options = {"num_ranks": 2, "num_micro_batches": 2, name: value}

    with pytest.raises(ArgumentError, match=f"`{name}`.*{re.escape(repr(value))}"):
        autosac.plan_pipeline(
            model,
            torch.ones(2, 4),
            target=torch.ones(2, 4),
            loss_fn=nn.functional.mse_loss,
            memory_budget="1GiB",
            **options,
        )


@pytest.mark.parametrize(
    ("ask", "options"),
    [
        (autosac.min_gpus, {"memory_budget": "1GiB"}),
        (autosac.sweep_parallel, {"memory_budgets": ["1GiB"], "num_gpus": [2]}),
        (
            autosac.plan_pipeline,
            {"memory_budget": "1GiB", "mesh": {"pp": 2, "fsdp": 2}},
        ),
    ],
)
def test_every_plan_of_many_gpus_reads_short_names_of_types(model, ask, options):
    if ask is autosac.plan_pipeline:
        loss = {"loss_fn": nn.functional.mse_loss, "target": torch.ones(2, 4)}
        options = {**options, **loss, "num_gpus": 4, "num_micro_batches": 2}
    else:
        options = {**options, "loss_fn": _mean}
    common = {"cluster": "hgx-h100", "reduce_dtype": torch.float32, **options}

    assert ask(model, torch.ones(2, 4), param_dtype="bf16", **common)
    with pytest.raises(ArgumentError, match="`param_dtype`='bf17' is no type"):
        ask(model, torch.ones(2, 4), param_dtype="bf17", **common)


@pytest.mark.parametrize("budgets", [[], "1GiB", 3])
def test_budgets_are_a_list(budgets):
    with pytest.raises(ArgumentError, match=r"`memory_budgets`=.* list"):
        read_budgets(budgets, None)


@pytest.mark.parametrize("n", [1, 2.5, "x", True])
def test_so_many_budgets_are_a_whole_number_of_two_or_more(n):
    with pytest.raises(ArgumentError, match="`n` must be a whole number of at least 2"):
        read_budgets(None, n)


def test_what_is_no_profile_has_no_floor(model):
    with pytest.raises(ArgumentError, match=r"`profile` must be what.*Sequential"):
        autosac.floor(model)


@pytest.mark.parametrize(
    "ask", [autosac.estimate, autosac.floor, lambda step: autosac.sweep(step, n=2)]
)
def test_in_place_of_a_plan_its_step_is_named(model, ask):
    profile = autosac.profile(model, torch.ones(2, 4), loss_fn=_mean)
    plan = autosac.plan(profile, memory_budget="1GiB")

    with pytest.raises(ArgumentError, match=r"is a Plan, and .* pass `plan\.traced`"):
        ask(plan)
    assert ask(plan.traced)


def test_a_limit_in_seconds_may_be_0_and_says_so():
    assert SolveOptions(time_limit_s=0).time_limit_s == 0
    with pytest.raises(ArgumentError, match=r"of seconds, 0 or more, .*, got -3"):
        SolveOptions(time_limit_s=-3)


def test_numbers_that_are_meant_are_taken():
    assert SolveOptions(relative_gap=0, time_limit_s=float("inf")).relative_gap == 0
    assert cluster_spec("hgx-h100", num_gpus=16).num_nodes == 2
    assert Schedule(name="1F1B", num_ranks=2, num_micro_batches=4).num_ranks == 2
    assert read_budgets(("1GiB", 5), None) == ("1GiB", 5)


def test_a_graph_of_a_loss_of_several_numbers_is_refused(model):
    with pytest.raises(autosac.TraceError, match=r"shape \(2, 4\).*one number"):
        autosac.joint_graph(model, torch.ones(2, 4), loss_fn=lambda output: output)


@pytest.mark.parametrize("limit", [{"relative_gap": -1}, {"time_limit_s": "x"}])
def test_a_plan_of_a_graph_refuses_limits_that_mean_nothing(model, limit):
    graph = autosac.joint_graph(model, torch.ones(2, 4), loss_fn=_mean)

    with pytest.raises(ArgumentError, match=f"^`{next(iter(limit))}` must be"):
        GraphPlanner(graph).plan("1GiB", **limit)


@pytest.fixture(scope="module")
def graph(model):
    return autosac.joint_graph(model, torch.ones(2, 4), loss_fn=_mean)


@pytest.mark.parametrize("value", [None, "x", nn.Linear(4, 4)], ids=str)
def test_a_planner_of_graphs_says_what_a_graph_is(value):
    with pytest.raises(ArgumentError, match=r"`joint` must be .*`autosac\.joint_graph"):
        GraphPlanner(value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("floor_limit_s", value) for value in (-1, "x", float("nan"))),
        ("link", "x"),
        ("backend", "x"),
    ],
)
def test_a_planner_of_graphs_refuses_what_it_cannot_use(graph, name, value):
    with pytest.raises(ArgumentError, match=f"^`{name}` must be"):
        GraphPlanner(graph, **{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strategy": "x"}, "`strategy` must be 'milp' or 'capuchin', got 'x'"),
        ({"modules": "x"}, r"`modules` must be a plan of `autosac\.plan`"),
        ({"modules": {}}, r"`modules` must be a plan of `autosac\.plan`"),
        ({"host_budget": "x"}, "`host_budget`='x' must be"),
        ({"host_budget": "1KiB"}, "`host_budget`=1024 .* pass `offload`=True"),
    ],
    ids=str,
)
def test_a_plan_of_a_graph_refuses_what_has_no_meaning_or_effect(
    graph, options, message
):
    with pytest.raises(ArgumentError, match=message):
        GraphPlanner(graph).plan("1GiB", **options)


def test_a_start_of_another_model_is_refused_by_its_first_parameter(graph, planned):
    wider = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    profile = autosac.profile(wider, torch.ones(2, 4), loss_fn=_mean)
    other = autosac.plan(profile, memory_budget="1GiB")

    with pytest.raises(
        ArgumentError, match=r"no parameter `0\.weight \(4, 4\) float32`"
    ):
        GraphPlanner(graph).plan("1GiB", modules=other)
    assert GraphPlanner(graph).plan("1GiB", modules=planned).recomputed == ()


@pytest.mark.parametrize("strategy", ["milp", "capuchin"])
def test_a_cap_on_far_memory_without_any_is_refused_by_all(graph, model, strategy):
    far = {"host_budget": "1KiB", "strategy": strategy}

    with pytest.raises(ArgumentError, match="pass `offload`=True, or leave it out"):
        autosac.compile(model, memory_budget="1GiB", **far)
    with pytest.raises(ArgumentError, match="pass `offload`=True, or leave it out"):
        GraphPlanner(graph).floor(**far)


def test_a_directory_of_far_memory_is_taken_as_text_or_path(tmp_path):
    assert read_offload(True, tmp_path) == read_offload("auto", str(tmp_path))
    assert read_offload(True, tmp_path) == str(tmp_path)
    assert read_offload(False, None) is None


@pytest.fixture(scope="module")
def planned(model):
    profile = autosac.profile(model, torch.ones(2, 4), loss_fn=_mean)
    return autosac.plan(profile, memory_budget="1GiB")


def _inputs():
    return torch.ones(2, 4)


_sgd = torch.optim.SGD
_KINDS = {
    "calibrate": lambda plan, model: autosac.calibrate(plan),
    "check": lambda plan, model: autosac.check(model, plan.traced),
    "check a path": lambda plan, model: autosac.check(plan, "profile.json"),
    "report": lambda plan, model: plan.report("profile.json"),
    "unapply": lambda plan, model: plan.unapply("model"),
    "verify no plan": lambda plan, model: autosac.verify("p", lambda: model, _inputs),
    "verify a model": lambda plan, model: autosac.verify(plan, model, _inputs),
    "verify inputs": lambda plan, model: autosac.verify(plan, lambda: model, _inputs()),
    "verify no step": lambda plan, model: autosac.verify(
        plan, lambda: model, _inputs, loss_fn=_mean, steps=0.5
    ),
    "save": lambda plan, model: plan.save(None),
    "load": lambda plan, model: autosac.Plan.load(3),
    "html": lambda plan, model: plan.to_html(None),
    "in backward": lambda plan, model: autosac.OptimizerInBackward("x", _sgd),
    "a model in backward": lambda plan, model: autosac.OptimizerInBackward(model, _sgd),
    "a built one": lambda plan, model: autosac.OptimizerInBackward(
        model.parameters(), _sgd(model.parameters())
    ),
    "chunks": lambda plan, model: autosac.chunked_cross_entropy(model, None, None),
    "memory": lambda plan, model: autosac.plotting.memory(model),
    "memory of": lambda plan, model: autosac.plotting.memory(plan, "p.json"),
    "ratios": lambda plan, model: autosac.plotting.ratios(plan.traced),
    "segments": lambda plan, model: autosac.plotting.trade_offs(plan, segments=0),
    "most": lambda plan, model: autosac.plotting.trade_offs(plan, most="all"),
    "budgets": lambda plan, model: autosac.plotting.budgets(plan),
    "rivals": lambda plan, model: autosac.sweep(plan.traced, n=2).plot(rivals="x"),
    "sizes": lambda plan, model: autosac.best_batch_size(
        model, _inputs, memory_budget="1GiB", sizes=[0.5]
    ),
    "no sizes": lambda plan, model: autosac.best_batch_size(
        model, _inputs, memory_budget="1GiB", sizes=4
    ),
    "most GPUs": lambda plan, model: autosac.min_gpus(
        plan.traced, cluster="hgx-h100", memory_budget="1GiB", most_gpus=0
    ),
    "no grid": lambda plan, model: autosac.sweep_grid(lambda: None, "layers", n=2),
    "no jobs": lambda plan, model: autosac.sweep_grid(
        lambda: (model, _inputs()), {}, n=2, n_jobs=0
    ),
}


@pytest.mark.parametrize("call", _KINDS.values(), ids=_KINDS)
def test_objects_of_another_kind_are_named_with_what_is_wanted(planned, model, call):
    with pytest.raises(ArgumentError, match=r"^`\w+` must be .*, got [\w'.]+\.$"):
        call(planned, model)


def test_files_that_cannot_be_written_or_read_are_named(planned, tmp_path):
    path = tmp_path / "plans" / "plan.json"
    picture = autosac.plotting.memory(planned)
    for write in (planned.save, planned.to_html, picture.save):
        with pytest.raises(FileNotFoundError, match=r"no folder '.*plans'; make it"):
            write(path)
    for use in (planned.save, autosac.Plan.load):
        with pytest.raises(IsADirectoryError, match="is a folder: name a file"):
            use(tmp_path)


# --- arguments that are not taken -------------------------------------------------

_OPTIONS = {"memory_budget": "1GiB", "loss_fn": _mean}
_CLUSTER = {"cluster": "hgx-h100", **_OPTIONS}
_NAMED = {
    "plan": lambda model, **o: autosac.plan(model, _inputs(), **_OPTIONS, **o),
    "policy": lambda model, **o: autosac.policy(model, _inputs(), **_OPTIONS, **o),
    "plan_replicas": lambda model, **o: autosac.plan_replicas(
        model, _inputs(), **_OPTIONS, **o
    ),
    "estimate": lambda model, **o: autosac.estimate(model, _inputs(), **o),
    "advise": lambda model, **o: autosac.advise(model, _inputs(), **o),
    "sweep": lambda model, **o: autosac.sweep(model, _inputs(), n=2, **o),
    "max_batch_size": lambda model, **o: autosac.max_batch_size(
        model, lambda size: torch.ones(size, 4), **_OPTIONS, **o
    ),
    "best_batch_size": lambda model, **o: autosac.best_batch_size(
        model, lambda size: torch.ones(size, 4), **_OPTIONS, **o
    ),
    "plan_parallel": lambda model, **o: autosac.plan_parallel(
        model, _inputs(), **_CLUSTER, **o
    ),
    "sweep_parallel": lambda model, **o: autosac.sweep_parallel(
        model, _inputs(), cluster="hgx-h100", num_gpus=[2], memory_budgets=["1GiB"], **o
    ),
    "min_gpus": lambda model, **o: autosac.min_gpus(model, _inputs(), **_CLUSTER, **o),
    "plan_pipeline": lambda model, **o: autosac.plan_pipeline(
        model, _inputs(), target=_inputs(), num_ranks=2, **_OPTIONS, **o
    ),
}


@pytest.mark.parametrize("function", _NAMED)
def test_a_name_that_is_not_taken_is_said_with_the_function_that_was_called(
    model, function
):
    call = _NAMED[function]
    with pytest.raises(TypeError, match=f"^`{function}` takes no `foo`: leave it out"):
        call(model, foo=1)
    with pytest.raises(ArgumentError, match="no `optimiser`: do you mean `optimizer`"):
        call(model, optimiser="adamw")


@pytest.mark.parametrize(
    ("plan_options", "sentence"),
    [
        ({"foo": 1}, "`plan_options` takes no `foo`: leave it out"),
        ({"segment": 1}, "`plan_options` takes no `segment`: do you mean `segments`"),
        (["segments"], r"`plan_options` must be a dict of .*, got list\."),
        ({"offload": "x"}, "`offload` must be True, False or 'auto', got 'x'"),
    ],
)
def test_options_of_a_sweeps_plans_are_those_of_plan(model, plan_options, sentence):
    with pytest.raises(ArgumentError, match=sentence):
        autosac.sweep(model, _inputs(), n=2, plan_options=plan_options)
    with pytest.raises(ArgumentError, match=sentence):
        autosac.sweep_grid(
            lambda: (model, _inputs()), {}, n=2, plan_options=plan_options
        )


# --- losses that are made for a batch ---------------------------------------------

_LOSSES = {
    "plan": lambda *args, **how: autosac.plan(*args, memory_budget="1GiB", **how),
    "advise": autosac.advise,
    "max_batch_size": lambda model, inputs, **how: autosac.max_batch_size(
        model, lambda size: inputs[:size], memory_budget="1GiB", **how
    ),
}


@pytest.mark.parametrize("call", _LOSSES.values(), ids=_LOSSES)
def test_what_makes_no_loss_is_refused(model, call):
    with pytest.raises(ArgumentError, match=r"`make_loss_fn` must be a .*, got 3"):
        call(model, _inputs(), make_loss_fn=3)
    with pytest.raises(ArgumentError, match="`loss_fn` and `make_loss_fn` both"):
        call(model, _inputs(), loss_fn=_mean, make_loss_fn=lambda inputs: _mean)


def test_a_profile_knows_its_loss(planned):
    with pytest.raises(ArgumentError, match="A profile knows its inputs and options"):
        autosac.plan(
            planned.traced, memory_budget="1GiB", make_loss_fn=lambda inputs: 1 / 0
        )
