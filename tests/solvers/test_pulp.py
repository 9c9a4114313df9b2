import math
import random
import subprocess
import sys
from unittest.mock import patch

import pulp
import pytest

from autosac.solvers.milp import cbc_runner, highs_runner, pulp_models, pulp_runner
from autosac.solvers.milp.solution import Termination
from tests.examples import seeds

both = pytest.mark.parametrize("backend", ["highs", "cbc"])


def cover(least, *, cat=pulp.LpBinary, num_items=3):
    """Pick items of cost 1, 2, 3, ... until `least` of them are picked."""
    model = pulp.LpProblem("cover", pulp.LpMinimize)
    items = [model.add_variable(f"x{i:03d}", 0, 1, cat) for i in range(num_items)]
    model.setObjective(pulp_models.row((x, i + 1.0) for i, x in enumerate(items)))
    model += pulp_models.row((x, 1.0) for x in items) >= least
    return model


def market_split(*, elastic):
    """Cornuejols and Dawande (1998): far from proven within any short time.

    Without elastic rows it also takes long to find any solution.
    """
    draw = random.Random(0)
    model = pulp.LpProblem("market", pulp.LpMinimize)
    items = [model.add_variable(f"x{i:03d}", 0, 1, pulp.LpBinary) for i in range(40)]
    missed = [(model.add_variable(f"missed{r}", 0), 1.0) for r in range(10)]
    model.setObjective(pulp_models.row([*missed, (items[0], 1.0)]))
    for r in range(5):
        weights = [draw.randrange(100) for _ in items]
        terms = list(zip(items, map(float, weights), strict=True))
        if elastic:
            terms += [(missed[2 * r][0], 1.0), (missed[2 * r + 1][0], -1.0)]
        model += pulp_models.row(terms) == sum(weights) // 2
    return model


@both
def test_the_optimum_comes_with_its_bound(backend):
    # The two cheapest items cost 1 + 2 = 3.
    model = cover(2)

    outcome = pulp_runner.run(model, backend=backend)

    assert outcome.termination is Termination.OPTIMAL
    assert outcome.bound == pytest.approx(3.0)
    assert [round(v.varValue) for v in model.variables()] == [1, 1, 0]


@both
def test_a_relaxation_run_again_has_the_optimum_of_its_new_right_hand_sides(backend):
    model = cover(1, num_items=5)
    constraint = model.constraints()[0]
    pulp_runner.run(model, backend=backend, relaxed=True)

    for least in (3, 2, 6, 5):
        constraint.changeRHS(least)
        outcome = pulp_runner.run(model, backend=backend, relaxed=True, again=True)
        fresh = pulp_runner.run(
            cover(least, num_items=5), backend=backend, relaxed=True
        )
        assert outcome.termination is fresh.termination
        assert outcome.bound == pytest.approx(fresh.bound)


@both
def test_a_relaxation_run_again_has_the_optimum_of_its_new_bounds(backend):
    model, fresh = cover(2, num_items=5), cover(2, num_items=5)
    pulp_runner.run(model, backend=backend, relaxed=True)

    # The cheapest is left out, the dearest taken; then too few are left; then all are.
    for bounds in ({0: (0, 0), 4: (1, 1)}, {i: (0, 0) for i in range(4)}, {}):
        for either in (model, fresh):
            for i, item in enumerate(either.variables()):
                item.lowBound, item.upBound = bounds.get(i, (0, 1))
        outcome = pulp_runner.run(model, backend=backend, relaxed=True, again=True)
        expected = pulp_runner.run(fresh, backend=backend, relaxed=True)
        assert outcome.termination is expected.termination
        assert outcome.bound == pytest.approx(expected.bound)


@both
def test_a_constant_in_the_objective_counts_in_the_bound(backend):
    model = cover(2)
    model.setObjective(model.objective + 10)

    assert pulp_runner.run(model, backend=backend).bound == pytest.approx(13.0)


@both
@pytest.mark.parametrize("cat", [pulp.LpBinary, pulp.LpContinuous])
def test_an_infeasible_model_is_told_from_a_time_limit(backend, cat):
    outcome = pulp_runner.run(cover(4, cat=cat), backend=backend)

    assert outcome.termination is Termination.INFEASIBLE


@both
def test_a_model_that_only_shares_could_meet_is_infeasible(backend):
    model = pulp.LpProblem("odd", pulp.LpMinimize)
    weights = [6, 10, 14, 22, 26, 34, 38]
    picked = [model.add_variable(f"x{i}", 0, 1, pulp.LpInteger) for i in range(7)]
    model += pulp.lpSum(picked)
    model += pulp.lpSum(w * x for w, x in zip(weights, picked, strict=True)) == 75

    outcome = pulp_runner.run(model, backend=backend)

    assert outcome.termination is Termination.INFEASIBLE


@both
def test_a_variable_between_bounds_that_cross_makes_a_model_infeasible(backend):
    model = cover(2)
    x = model.variables()[0]
    x.lowBound, x.upBound = 1, 0

    outcome = pulp_runner.run(model, backend=backend)

    assert outcome.termination is Termination.INFEASIBLE


@both
def test_a_time_limit_without_an_incumbent_is_no_incumbent(backend):
    outcome = pulp_runner.run(
        market_split(elastic=False), backend=backend, time_limit_s=0.2
    )

    assert outcome.termination is Termination.NO_INCUMBENT


@both
def test_a_time_limit_with_an_incumbent_is_feasible(backend):
    model = market_split(elastic=True)

    outcome = pulp_runner.run(model, backend=backend, time_limit_s=0.5)

    assert outcome.termination is Termination.FEASIBLE
    assert -0.0005 <= outcome.bound < pulp.value(model.objective)  # three decimals


@both
def test_a_limit_on_work_without_an_incumbent_is_no_incumbent(backend):
    outcome = pulp_runner.run(
        market_split(elastic=False), backend=backend, work_limit=4000
    )

    assert outcome.termination is Termination.NO_INCUMBENT


@both
def test_a_start_that_is_not_optimal_is_improved(backend):
    # Picking all three items costs 6.
    model = cover(2)
    for variable in model.variables():
        variable.varValue = 1.0

    outcome = pulp_runner.run(model, backend=backend, warm_start=True)

    assert outcome.termination is Termination.OPTIMAL
    assert outcome.bound == pytest.approx(3.0)


def test_a_jump_finds_an_incumbent_and_is_over_long_before_the_optimum_is_proven():
    # Items that together name each of 60 words at least twice: a set cover.
    draw = random.Random(0)
    model = pulp.LpProblem("words", pulp.LpMinimize)
    items = [model.add_variable(f"x{i:03d}", 0, 1, pulp.LpBinary) for i in range(60)]
    model.setObjective(pulp_models.row((x, draw.uniform(1, 9)) for x in items))
    for _ in range(60):
        model += pulp_models.row((x, 1.0) for x in draw.sample(items, 8)) >= 2

    jumped = pulp_runner.run(model, jump=0)  # which checks the rows of an incumbent
    jumped_to = pulp.value(model.objective)
    solved = pulp_runner.run(model)

    assert jumped.termination is Termination.FEASIBLE
    assert solved.termination is Termination.OPTIMAL
    assert jumped.bound < solved.bound <= jumped_to
    by_cbc = pulp_runner.run(model, jump=0, backend="cbc")  # it has no such search
    assert by_cbc.termination is Termination.NO_INCUMBENT


@both
def test_an_unbounded_model_is_told_from_an_infeasible_one(backend):
    model = pulp.LpProblem("fall", pulp.LpMinimize)
    x = model.add_variable("x", None, None, pulp.LpInteger)
    y = model.add_variable("y", 0)
    model += x + y
    model += x + y <= 3

    outcome = pulp_runner.run(model, backend=backend)

    assert outcome.termination is Termination.UNBOUNDED


@both
def test_the_relaxation_ignores_that_variables_are_whole(backend):
    # 1 + half of 2 = 2.
    model = cover(1.5)

    outcome = pulp_runner.run(model, backend=backend, relaxed=True)

    assert outcome.bound == pytest.approx(2.0)
    assert model.variables()[1].varValue == pytest.approx(0.5)


def test_a_relaxation_goes_on_with_rows_and_variables_that_came_since():
    # x + y >= 1.5 by fractions; z is cheaper than y, but x + z <= 1 leaves y half.
    model = pulp_models.Model("more")
    x, y = (model.add_variable(name, 0, 1, pulp.LpBinary) for name in "xy")
    model += x + 2 * y
    model += x + y >= 1.5
    before = pulp_runner.run(model, relaxed=True, again=True)
    z = model.add_variable("a z, which sorts first", 0, 1, pulp.LpBinary)
    model += x + z <= 1
    model += y + z <= 0.75
    highs = model.solverModel

    after = pulp_runner.run(model, relaxed=True, again=True)
    values = (x.varValue, y.varValue, z.varValue)
    assert model.solverModel is highs
    fresh = pulp_runner.run(model, relaxed=True)

    assert before.bound == pytest.approx(2.0)
    assert after.bound == pytest.approx(fresh.bound) == pytest.approx(2.0)
    assert values == pytest.approx((1.0, 0.5, 0.0))
    x.upBound = 0.75
    assert pulp_runner.run(model, relaxed=True, again=True).bound == pytest.approx(2.25)


def test_highs_may_be_asked_for_another_number_of_threads():
    outcomes = [pulp_runner.run(cover(2), threads=threads) for threads in (1, 2, 1)]

    assert [o.termination for o in outcomes] == [Termination.OPTIMAL] * 3


def test_numbers_that_break_a_row_are_no_incumbent(monkeypatch):
    def lying(model, *_, **__):
        for variable in model.variables():
            variable.varValue = 0.0
        return claimed, 0.0, 1

    monkeypatch.setattr(pulp_runner, "run_highs", lying)

    claimed = Termination.FEASIBLE
    assert pulp_runner.run(cover(2)).termination is Termination.NO_INCUMBENT
    claimed = Termination.OPTIMAL
    with pytest.raises(ArithmeticError, match="breaks a row"):
        pulp_runner.run(cover(2))


@pytest.mark.parametrize("number", [float("inf"), 1e16])
def test_a_model_of_infinite_or_huge_numbers_is_refused(number):
    model = cover(1)
    model += pulp_models.row([(model.variables()[0], number)]) <= 1

    with pytest.raises(ArithmeticError, match="'cover'"):
        pulp_runner.run(model)


@pytest.mark.slow_but_first
@both
def test_a_limit_on_work_ends_a_solve_at_the_same_place_each_time(backend):
    ends = []
    for limit in (40_000, 80_000, 80_000):
        model = market_split(elastic=True)
        outcome = pulp_runner.run(model, backend=backend, work_limit=limit)
        ends.append((outcome.work, outcome.bound, pulp.value(model.objective)))
        assert outcome.termination is Termination.FEASIBLE

    half, whole, again = ends
    assert whole == again
    assert half[0] < 0.6 * whole[0]
    assert -0.0005 <= half[1] <= whole[1] < whole[2] <= half[2]  # three decimals


def test_a_solve_far_from_its_bound_may_do_more_work():
    work = []
    for more, wide_gap in ((1.0, 0.0), (2.0, 0.0), (2.0, math.inf)):
        with patch.object(highs_runner, "WIDE_GAP", wide_gap):
            outcome = pulp_runner.run(
                market_split(elastic=True), work_limit=40_000, more_if_wide=more
            )
        work.append(outcome.work)

    usual, wide, narrow = work
    assert usual == narrow
    assert wide == pytest.approx(2 * usual, rel=0.1)


def _dear_cover():
    """Items of odd costs that cover five sums: no optimum at the root."""
    draw = random.Random(0)
    model = pulp.LpProblem("dear", pulp.LpMinimize)
    items = [model.add_variable(f"x{i:03d}", 0, 1, pulp.LpBinary) for i in range(40)]
    model.setObjective(pulp_models.row((x, draw.uniform(5.0, 20.0)) for x in items))
    for _ in range(5):
        sizes = [float(draw.randrange(1, 30)) for _ in items]
        model += (
            pulp_models.row(zip(items, sizes, strict=True)) >= float(sum(sizes)) / 3
        )
    return model


@pytest.mark.slow_but_fifth
@both
@pytest.mark.parametrize("share", [0.5, 0.9, 0.99, 0.999])
def test_what_is_proven_of_solutions_below_a_cutoff_holds(backend, share):
    # HiGHS calls a dear solution that it came upon optimal, with its cost as the bound.
    optimum = pulp_runner.run(_dear_cover()).bound

    below = pulp_runner.run(_dear_cover(), backend=backend, cutoff=share * optimum)

    assert below.termination in (Termination.OPTIMAL, Termination.INFEASIBLE)
    assert below.bound is None or below.bound <= optimum


@both
def test_what_is_below_a_cutoff_is_found(backend):
    optimum = pulp_runner.run(_dear_cover()).bound

    below = pulp_runner.run(_dear_cover(), backend=backend, cutoff=1.01 * optimum)

    assert below.termination is Termination.OPTIMAL
    assert below.bound == pytest.approx(optimum)


@pytest.fixture
def any_size(monkeypatch):
    """MILPs of any size may be given to CBC first."""
    monkeypatch.setattr(pulp_runner, "_QUICK_ROOT", 0)


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("share", [0.9, 0.9999, 1.0001, 1.1, math.inf])
def test_without_cuts_the_same_is_found_and_proven(share):
    optimum = pulp_runner.run(_dear_cover()).bound
    model = _dear_cover()

    outcome = pulp_runner.run(model, quick_nodes=10_000, cutoff=share * optimum)

    assert model.solver is None  # HiGHS was not run
    if share < 1.0:
        assert outcome.termination is Termination.INFEASIBLE
    else:
        assert outcome.termination is Termination.OPTIMAL
        assert pulp.value(model.objective) == pytest.approx(optimum)
        assert outcome.bound == pytest.approx(optimum, rel=1e-6)
        assert outcome.bound <= optimum


def _drawn(seed):
    """A MILP of whole and other numbers, some without a bound, some below 0."""
    draw = random.Random(seed)
    model = pulp.LpProblem("drawn", pulp.LpMinimize)
    numbers = []
    for i in range(12):
        lowest, cat = draw.choice(
            [(0, pulp.LpInteger), (-5, pulp.LpInteger), (0, pulp.LpContinuous)]
        )
        highest = draw.choice([None, 1, 7, 30])
        numbers.append(model.add_variable(f"x{i:03d}", lowest, highest, cat))

    def some(low, high):
        return pulp_models.row((x, draw.uniform(low, high)) for x in numbers)

    model.setObjective(some(1, 9) + draw.choice([0.0, -37.5, 12.0]))
    for _ in range(4):
        model += some(0.5, 4) >= draw.uniform(20, 200)
    model += some(-2, 2) <= draw.choice([0.0, 3.0])
    model += some(0, 2) <= 300.0
    return model


@pytest.mark.usefixtures("any_size")
@seeds(24)
def test_without_cuts_drawn_models_end_as_with_them(seed):
    model, same = _drawn(seed), _drawn(seed)
    expected = pulp_runner.run(model)

    outcome = pulp_runner.run(same, quick_nodes=10_000)

    assert same.solver is None  # HiGHS was not run
    assert outcome.termination is expected.termination
    if expected.termination is Termination.OPTIMAL:
        optimum = pulp.value(model.objective)
        assert pulp.value(same.objective) == pytest.approx(optimum, abs=1e-4)
        assert outcome.bound <= optimum + 1e-6
        few = optimum - 0.02 * abs(optimum)
        below = pulp_runner.run(_drawn(seed), quick_nodes=10_000, cutoff=few)
        assert below.termination is Termination.INFEASIBLE


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize("options", [{"relaxed": True}, {"time_limit_s": 60.0}])
def test_a_relaxation_or_a_time_limit_is_for_highs_alone(options):
    expected = pulp_runner.run(_dear_cover(), **options)
    model = _dear_cover()

    outcome = pulp_runner.run(model, quick_nodes=10_000, **options)

    assert model.solver is not None  # HiGHS was run
    assert outcome.bound == pytest.approx(expected.bound)
    assert outcome.work == expected.work


@pytest.mark.usefixtures("any_size")
def test_without_cuts_a_gap_that_is_wide_enough_ends_a_search():
    optimum = pulp_runner.run(_dear_cover()).bound
    model = _dear_cover()

    outcome = pulp_runner.run(model, quick_nodes=10_000, relative_gap=0.05)

    assert outcome.termination is Termination.OPTIMAL
    assert outcome.bound <= optimum <= pulp.value(model.objective)
    assert pulp.value(model.objective) <= outcome.bound * 1.06


@pytest.mark.usefixtures("any_size")
def test_what_takes_more_nodes_without_cuts_is_left_to_highs():
    alone = pulp_runner.run(_dear_cover())
    model = _dear_cover()

    outcome = pulp_runner.run(model, quick_nodes=5)

    assert isinstance(model.solver, highs_runner.pulp.HiGHS)
    assert outcome.termination is Termination.OPTIMAL
    assert outcome.bound == pytest.approx(alone.bound)
    assert outcome.work > alone.work  # that of both


def _no_cbc(monkeypatch, tmp_path):
    monkeypatch.setattr(cbc_runner.shutil, "which", lambda _: None)


def _cbc_that_fails(monkeypatch, tmp_path):
    program = tmp_path / "cbc"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr(cbc_runner.shutil, "which", lambda _: str(program))


def _cbc_of_another_machine(monkeypatch, tmp_path):
    program = tmp_path / "cbc"
    program.write_bytes(b"\x7fELF nothing that runs")
    program.chmod(0o755)
    monkeypatch.setattr(cbc_runner.shutil, "which", lambda _: str(program))


def _cbc_that_breaks_rows(monkeypatch, tmp_path):
    program = tmp_path / "cbc"
    program.write_text(
        "#!/bin/sh\nfor last; do true; done\n"
        "echo 'Optimal - objective value 0' > $last\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(cbc_runner.shutil, "which", lambda _: str(program))


@pytest.mark.usefixtures("any_size")
@pytest.mark.parametrize(
    "found", [_no_cbc, _cbc_that_fails, _cbc_of_another_machine, _cbc_that_breaks_rows]
)
def test_without_a_cbc_that_works_highs_solves_all(found, monkeypatch, tmp_path):
    optimum = pulp_runner.run(_dear_cover()).bound
    found(monkeypatch, tmp_path)

    outcome = pulp_runner.run(_dear_cover(), quick_nodes=10_000)

    assert outcome.termination is Termination.OPTIMAL
    assert outcome.bound == pytest.approx(optimum)


def test_looks_at_the_root_count_as_many_as_one_says():
    nodes = []
    for look_at_root in (1.0, 20.0):
        model = market_split(elastic=True)
        outcome = pulp_runner.run(model, work_limit=40_000, look_at_root=look_at_root)
        nodes.append(model.solverModel.getInfo().mip_node_count)
        assert outcome.termination is Termination.FEASIBLE
        assert 40_000 < outcome.work < 1.1 * 40_000

    in_tree, at_root = nodes
    assert in_tree > 0 == at_root


def test_a_missing_cbc_names_the_remedy(monkeypatch):
    monkeypatch.setattr(cbc_runner.shutil, "which", lambda _: None)

    with pytest.raises(FileNotFoundError, match="search path"):
        pulp_runner.run(cover(2), backend="cbc")


@pytest.mark.slow
def test_a_solve_prints_nothing():
    script = (
        "from autosac.solvers.milp import cbc_runner, pulp_models, pulp_runner\n"
        "from tests.solvers.test_pulp import cover\n"
        "assert pulp_runner.run(cover(1)).bound == 1.0"
    )
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)

    assert ended.stdout == ended.stderr == ""


@pytest.mark.slowest
def test_a_function_that_plans_first_leaves_no_model_behind():
    # PuLP keeps errors of its import, and with them frames of whoever imported it.
    script = (
        "import gc, weakref, torch, autosac\n"
        "def planned():\n"
        "    model = torch.nn.Linear(4, 4)\n"
        "    plan = autosac.plan(model, torch.ones(2, 4), memory_budget='1 GiB',"
        " loss_fn=torch.sum)\n"
        "    return weakref.ref(model.weight), plan\n"
        "left, plan = planned()\n"
        "gc.collect()\n"
        "assert left() is None, gc.get_referrers(left())"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="backend"):
        pulp_runner.run(cover(2), backend="glpk")
    with pytest.raises(ValueError, match="minimisation"):
        pulp_runner.run(pulp.LpProblem("up", pulp.LpMaximize))
