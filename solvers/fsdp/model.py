"""The parallel MILP in PuLP: FSDP units, what reshards, and AC points together.

x_m = 1 if candidate m is an FSDP unit, n_tm = 1 if it is the nearest one around
candidate t, s_m = 1 if it reshards; y_u = 1 if AC unit u is used, z_uk at point k:

minimize    sum rec + sum e + T  (or P)             exposed and recompute ms, or peak
subject to  sum_m n_tm = 1,  n_tt = x_t             nearest unit                   (1)
            n_tm <= n_pm                            p is the candidate around t    (2)
            x_m <= sum_t n_tm                       a unit owns something          (3)
            n_tm <= d_mj,  sum_j d_mj <= 1          t has dtype j: one per unit    (4)
            sum_u y_u <= 1 - x_m                    AC units around m              (5)
            G_m = sum_t gather_t n_tm, R_m and S_m likewise                        (6)
            K_m = G_m (1 - s_m), s_m <= x_m         parameters that stay           (7)
            L >= c R_m,  L >= c G_m                 buffers that threads hold      (8)
            live memory + L <= P at the rows' positions                            (9)
            e, T by (3) and (4) of `step_time`, see `time_rows`                    (10)

What depends on the *next* or the *last* unit is carried from candidate to candidate:
V_i >= own value of i, V_i >= V_i-1 - M x_i. Bytes are in MiB, times in ms. The rows of
AC units are those of `sac.counts`, with one member per class.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pulp

from ..milp import pulp_models
from ..sac.holds import Held
from ..sac.table import Table
from .problem import FsdpChoice, FsdpProblem
from .sites import Sites

_MIB = 2**20
Terms = list[tuple[pulp.LpVariable, float]]


class FsdpModel:
    """The model for some rows of memory, and the way back from its variables.

    Args:
        problem: Modules, AC units and costs.
        table: Its AC units.
        sites: The candidates.
        forced: Whether all candidates are units.
        integral: Whether resharding and AC points are whole; otherwise shares.
        peak: Minimise the peak; the budget is ignored. Otherwise there is no objective:
            `time_rows.TimedModel` has one.

    Attributes:
        model: The PuLP model.
        is_linear: Whether nothing that is open must be whole.
        constant_ms: What the objective leaves out of the time of a step.
    """

    def __init__(
        self,
        problem: FsdpProblem,
        table: Table,
        sites: Sites,
        *,
        forced: bool,
        integral: bool,
        peak: bool,
    ) -> None:
        self.model = pulp_models.Model("fsdp")
        self.is_linear = forced and not integral
        self._problem, self._table, self._sites = problem, table, sites
        self._forced, self._integral = forced, integral
        self._rows: dict[int, tuple[pulp.LpConstraint, float]] = {}
        self._held: dict[tuple[int, int, int], pulp.LpVariable] = {}
        self._add_units()
        self._add_points()
        self._add_bytes()
        self._late = self._late_copies()
        self._add_stays()
        self._add_carried()
        self._peak: pulp.LpVariable | None = None
        self.constant_ms = 0.0
        if peak:
            self._peak = self.model.add_variable("peak")
            self.model.setObjective(pulp_models.row([(self._peak, 1.0)]))

    # --- variables and rows (1) to (8) ---

    def _add_units(self) -> None:
        """Rows (1) to (4)."""
        sites, modules = self._sites, self._problem.modules
        add = self.model.add_variable
        shared: dict[int, pulp.LpVariable] = {}
        self._x: list[pulp.LpVariable] = []
        for site, index in enumerate(sites.modules):
            kind = modules[index].kind
            if kind is not None and kind in shared:
                self._x.append(shared[kind])
                continue
            low = 1 if self._forced or site == 0 else 0
            x = add(f"x_{site:05d}", low, 1, pulp.LpInteger)
            self._x.append(x)
            if kind is not None:
                shared[kind] = x
        self._nearest: list[dict[int, pulp.LpVariable]] = []
        for site in range(len(sites.modules)):
            own = {site: self._x[site]}
            if site and not self._forced:
                outer = self._nearest[sites.around[site]]
                for unit, around in outer.items():
                    n = add(f"n_{site:05d}_{unit:05d}", 0, 1)
                    self.model += pulp_models.row([(n, 1.0), (around, -1.0)]) <= 0
                    own[unit] = n
                self.model += pulp_models.row([(n, 1.0) for n in own.values()]) == 1
            self._nearest.append(own)
        self._inside: list[list[int]] = [[] for _ in sites.modules]
        for site, nearest in enumerate(self._nearest):
            for unit in nearest:
                self._inside[unit].append(site)
        for unit, inside in enumerate(self._inside):
            owned = [(self._nearest[t][unit], 1.0) for t in inside if sites.gather[t]]
            if unit:
                self.model += pulp_models.row([*owned, (self._x[unit], -1.0)]) >= 0
            self._add_dtypes(unit, inside)

    def _add_dtypes(self, unit: int, inside: Sequence[int]) -> None:
        """Row (4)."""
        names = sorted(set().union(*(self._sites.dtypes[t] for t in inside)))
        if len(names) < 2:
            return
        has = {
            name: self.model.add_variable(f"d_{unit:05d}_{k:03d}", 0, 1)
            for k, name in enumerate(names)
        }
        self.model += pulp_models.row([(d, 1.0) for d in has.values()]) <= 1
        for t in inside:
            for name in self._sites.dtypes[t]:
                terms = [(self._nearest[t][unit], 1.0), (has[name], -1.0)]
                self.model += pulp_models.row(terms) <= 0

    def _add_points(self) -> None:
        """AC units, and row (5)."""
        add, units = self.model.add_variable, self._problem.sac.units
        kind = pulp.LpInteger if self._integral else pulp.LpContinuous
        self._y: list[pulp.LpVariable] = []
        self._z: list[pulp.LpVariable] = []
        for u, unit in enumerate(units):
            first = len(self._z)
            most = int(u not in self._problem.left_out)
            self._z += [
                add(f"z_{first + k:06d}", 0, most, kind)
                for k in range(len(unit.points))
            ]
            self._y.append(add(f"y_{u:05d}", 0, 1))
            terms = [(z, 1.0) for z in self._z[first:]]
            self.model += pulp_models.row([*terms, (self._y[u], -1.0)]) == 0
        if (host_bytes := self._problem.host_bytes) is not None:
            points = [point for unit in units for point in unit.points]
            far = zip(self._z, points, strict=True)
            terms = [(z, point.far_bytes / _MIB) for z, point in far]
            self.model += pulp_models.row(terms) <= host_bytes / _MIB
        for path in self._problem.sac.paths():
            if len(path) > 1:
                self.model += pulp_models.row([(self._y[u], 1.0) for u in path]) <= 1
        around: list[list[int]] = [[] for _ in self._problem.modules]
        for u, inside in enumerate(self._problem.inside):
            for index in inside:
                around[index].append(u)
        for site, index in enumerate(self._sites.modules):
            if around[index]:
                for group in self._paths(around[index]):
                    terms = [(self._y[u], 1.0) for u in group]
                    self.model += pulp_models.row([*terms, (self._x[site], 1.0)]) <= 1

    def _paths(self, units: Sequence[int]) -> list[list[int]]:
        """AC units in groups that exclude each other."""
        chosen = set(units)
        outer = {
            v for u in units for v in self._problem.sac.ancestry(u)[1:] if v in chosen
        }
        return [
            [v for v in self._problem.sac.ancestry(u) if v in chosen]
            for u in units
            if u not in outer
        ]

    def _add_bytes(self) -> None:
        """Row (6)."""
        self._gathered = self._sums("g", self._sites.gather)
        self._reduced = self._sums("r", self._sites.reduce)
        self._shards = self._sums("sh", self._sites.shard)

    def _sums(self, name: str, values: Sequence[int]) -> list[pulp.LpVariable]:
        totals = []
        for unit, inside in enumerate(self._inside):
            total = self.model.add_variable(f"{name}_{unit:05d}", 0)
            terms = [(self._nearest[t][unit], values[t] / _MIB) for t in inside]
            self.model += pulp_models.row([*terms, (total, -1.0)]) == 0
            totals.append(total)
        return totals

    def _late_copies(self) -> Terms:
        """Row (8)."""
        copies = self._problem.late_copies
        if not copies:
            return []
        # What a candidate holds outside of others is in one unit, whichever that is.
        gather, reduce = self._sites.gather, self._sites.reduce
        late = self.model.add_variable("late", copies * max(*gather, *reduce) / _MIB)
        buffers = list(self._reduced)
        if any(g > r for g, r in zip(gather, reduce, strict=True)):  # frozen
            buffers += self._gathered
        for nbytes in buffers:
            self.model += pulp_models.row([(late, 1.0), (nbytes, -copies)]) >= 0
        return [(late, 1.0)]

    def _add_stays(self) -> None:
        """Row (7); the root stays."""
        kind = pulp.LpInteger if self._integral else pulp.LpContinuous
        self._stays: list[pulp.LpVariable] = []
        self._reshards: list[pulp.LpVariable] = []
        for unit, nbytes in enumerate(self._sites.most_gather):
            most = nbytes / _MIB
            stay = self.model.add_variable(f"k_{unit:05d}", 0)
            s = self.model.add_variable(f"s_{unit:05d}", 0, min(unit, 1), kind)
            gathered, x = self._gathered[unit], self._x[unit]
            self.model += pulp_models.row([(s, 1.0), (x, -1.0)]) <= 0
            self.model += (
                pulp_models.row([(stay, 1.0), (gathered, -1.0), (s, most)]) >= 0
            )
            self.model += pulp_models.row([(stay, 1.0), (gathered, -1.0)]) <= 0
            self.model += pulp_models.row([(stay, 1.0), (s, most)]) <= most
            self._stays.append(stay)
            self._reshards.append(s)

    def _add_carried(self) -> None:
        """Buffers that are alive until the next unit's begin or end."""
        sites = self._sites
        gathered = [[(g, 1.0)] for g in self._gathered]
        again = [
            [(g, 1.0), (k, -1.0)]
            for g, k in zip(self._gathered, self._stays, strict=True)
        ]
        reduced = [[(r, 1.0)] for r in self._reduced]
        most_gather = [nbytes / _MIB for nbytes in sites.most_gather]
        most_reduce = [nbytes / _MIB for nbytes in sites.most_reduce]
        self._forward_buffer = self._carry(
            "fb", sites.forward_order, gathered, most_gather
        )
        self._backward_buffer = self._carry(
            "bb", sites.backward_order[::-1], again, most_gather
        )
        self._reduce_buffer = self._carry("rb", sites.end_order, reduced, most_reduce)
        self._ahead = self._gathered_ahead()

    def _carry(
        self,
        name: str,
        order: Sequence[int],
        own: Sequence[Terms],
        most: Sequence[float],
    ) -> list[pulp.LpVariable]:
        """By candidate, the value of the last unit up to it in an order."""
        values: dict[int, pulp.LpVariable] = {}
        before: int | None = None
        largest = 0.0
        for site in order:
            value = self.model.add_variable(f"{name}_{site:05d}", 0)
            terms = [(v, -c) for v, c in own[site]]
            self.model += pulp_models.row([(value, 1.0), *terms]) >= 0
            if before is not None:
                terms = [(values[before], -1.0), (self._x[site], largest)]
                self.model += pulp_models.row([(value, 1.0), *terms]) >= 0
            largest = max(largest, most[site])
            values[site] = value
            before = site
        return [values[site] for site in range(len(own))]

    def _gathered_ahead(self) -> list[pulp.LpVariable]:
        """By candidate, its buffer of (3): none where no unit began before it."""
        sites = self._sites
        buffers = list(self._backward_buffer)
        largest = max(sites.most_gather) / _MIB
        begun = [self._nearest[t][0] for t in self._inside[0] if sites.gather[t]]
        for site in sites.backward_order[1:]:
            some = self.model.add_variable(f"some_{site:05d}", 0, 1)
            for unit in begun:
                self.model += pulp_models.row([(some, 1.0), (unit, -1.0)]) >= 0
            ahead = self.model.add_variable(f"ahead_{site:05d}", 0)
            terms = [(ahead, 1.0), (buffers[site], -1.0), (some, -largest)]
            self.model += pulp_models.row(terms) >= -largest
            buffers[site] = ahead
            if sites.gather[site]:
                break  # some unit has its parameters, and has begun
            begun = [some, self._x[site]]
        return buffers

    def fix_units(self, chosen: Collection[int] | None) -> None:
        """Fix which modules are units, or free that again."""
        for site, index in enumerate(self._sites.modules):
            x = self._x[site]
            x.lowBound = 1 if site == 0 else 0
            x.upBound = 1
            if chosen is not None:
                x.lowBound = x.upBound = int(index in chosen)

    # --- rows of memory ---

    def add_row(self, position: int, *, slack_bytes: float = 0.0) -> None:
        """Cap the memory at a position (9), or lower a cap by some slack."""
        budget = self._problem.sac.budget_bytes
        if position in self._rows:
            constraint, less = self._rows[position]
            less += slack_bytes
            self._rows[position] = constraint, less
            base = float(self._table.base[position])
            limit = 0.0 if self._peak is not None else budget
            constraint.changeRHS((limit - base - less) / _MIB)
            return
        terms = [*self._of_points(position), *self._of_parameters(position)]
        terms += self._late
        base = float(self._table.base[position])
        if self._peak is not None:
            constraint = pulp_models.row([*terms, (self._peak, -1.0)]) <= -base / _MIB
        else:
            constraint = pulp_models.row(terms) <= (budget - base) / _MIB
        self.model += constraint
        self._rows[position] = constraint, 0.0

    def has_row(self, position: int) -> bool:
        """Whether the memory at a position is capped."""
        return position in self._rows

    def _of_points(self, position: int) -> Terms:
        added = self._table.row(position)
        terms = [
            (self._z[column], float(added[column]) / _MIB)
            for column in added.nonzero()[0].tolist()
        ]
        for hold in self._table.holds.at(position):
            if hold.key not in self._held:
                self._held[hold.key] = self._add_hold(hold)
            terms.append((self._held[hold.key], hold.added_bytes / _MIB))
        return terms

    def _add_hold(self, hold: Held) -> pulp.LpVariable:
        name = "h_" + "_".join(f"{number:05d}" for number in hold.key)
        held = self.model.add_variable(name, 0, 1)
        columns = [] if hold.columns is None else hold.columns.tolist()
        others = [(self._z[column], -1.0) for column in columns]
        if hold.is_kept:
            taken = [(self._y[u], -1.0) for u in hold.holders.tolist()]
            self.model += pulp_models.row([(held, 1.0), *others]) <= 0
            self.model += pulp_models.row([(held, 1.0), *taken]) <= 0
            return held
        spare = 0 if hold.columns is None else 1  # one of these and one holder
        for u in hold.holders.tolist():
            terms = [(held, 1.0), (self._y[u], -1.0), *others]
            self.model += pulp_models.row(terms) >= -spare
        return held

    def _of_parameters(self, position: int) -> Terms:
        sites, modules = self._sites, self._problem.modules
        terms: Terms = []
        for site, index in enumerate(sites.modules):
            (f0, f1), (b0, b1) = modules[index].forward, modules[index].backward
            if f0 <= position < f1 or b0 <= position < b1 - 1:
                terms.append((self._gathered[site], 1.0))
            elif f1 <= position < b0:
                terms.append((self._stays[site], 1.0))
            if position >= b1 - 1:
                terms.append((self._shards[site], 1.0))
            for start, nbytes in sites.grads[site]:
                if start <= position:
                    terms += [
                        (n, nbytes / _MIB)
                        for unit, n in self._nearest[site].items()
                        if position < sites.ends[unit]
                    ]
        root = modules[sites.modules[0]]
        if root.forward[0] <= position < root.forward[1]:
            site = [s for s in sites.forward_order if sites.starts[s] <= position][-1]
            terms.append((self._forward_buffer[site], 1.0))
        later = [s for s in sites.backward_order if sites.begins[s] >= position]
        if later and position > root.backward[0]:
            terms.append((self._ahead[later[0]], 1.0))
        ended = [s for s in sites.end_order if sites.ends[s] - 1 <= position]
        if ended and position < root.backward[1]:
            terms.append((self._reduce_buffer[ended[-1]], 1.0))
        return terms

    # --- the way back ---

    def units(self) -> tuple[bool, ...]:
        """By module, whether it is an FSDP unit."""
        is_unit = [False] * len(self._problem.modules)
        for site, index in enumerate(self._sites.modules):
            is_unit[index] = (self._x[site].varValue or 0.0) > 0.5
        return tuple(is_unit)

    def reshards(self) -> tuple[float, ...]:
        """By module, the share of it that reshards."""
        shares = [0.0] * len(self._problem.modules)
        for site, index in enumerate(self._sites.modules):
            shares[index] = min(1.0, max(0.0, self._reshards[site].varValue or 0.0))
        return tuple(shares)

    def weights(self) -> list[list[float]]:
        """Weight of each point of each AC unit."""
        values = [min(1.0, max(0.0, z.varValue or 0.0)) for z in self._z]
        first = self._table.first
        return [values[first[u] : first[u + 1]] for u in range(len(self._y))]

    def choice(self) -> FsdpChoice:
        """The choice that the variables hold, if they are whole."""
        points = [
            next((k for k, w in enumerate(shares) if w > 0.5), None)
            for shares in self.weights()
        ]
        units = self.units()
        return FsdpChoice(
            units=units,
            reshard=tuple(
                unit and share > 0.5
                for unit, share in zip(units, self.reshards(), strict=True)
            ),
            points=tuple(points),
        )
