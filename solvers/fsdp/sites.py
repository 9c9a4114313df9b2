"""A parallel problem with few candidates: what each holds, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from .problem import FsdpProblem


class Sites:
    """The candidates for FSDP units, each with what of other modules is in it.

    Args:
        problem: The modules.
        candidates: Indices of modules that may be units, the root among them.
        forced: Whether all of them are units.

    Attributes:
        modules: Index of each candidate's module, in the order of modules.
        around: Candidate around each candidate, -1 for the root.
        gather, reduce, shard: Bytes of parameters that belong to a candidate or to what
            is around it.
        grads: Pairs of first position and bytes of their gradients.
        dtypes: Their dtypes.
        most_gather, most_reduce: Bytes that a unit could own at most.
        forward_order, backward_order, end_order: Candidates by the beginning of their
            forward and backward and by the end of their backward.
    """

    def __init__(
        self, problem: FsdpProblem, candidates: Sequence[int], *, forced: bool
    ) -> None:
        modules = problem.modules
        self.problem = problem
        self.modules = sorted(candidates)
        number = {index: site for site, index in enumerate(self.modules)}
        site_of: list[int] = []
        for index, module in enumerate(modules):
            inherited = -1 if module.parent is None else site_of[module.parent]
            site_of.append(number.get(index, inherited))
        count = len(self.modules)
        sites = range(count)
        self.around = [
            -1 if (parent := modules[index].parent) is None else site_of[parent]
            for index in self.modules
        ]
        self.gather, self.reduce, self.shard = ([0] * count for _ in range(3))
        self.grads: list[list[tuple[int, int]]] = [[] for _ in sites]
        self.dtypes: list[set[str]] = [set() for _ in sites]
        for index, module in enumerate(modules):
            site = site_of[index]
            self.gather[site] += module.gather_bytes
            self.reduce[site] += module.reduce_bytes
            self.shard[site] += module.shard_grad_bytes
            if module.grad_bytes:
                self.grads[site].append((module.grads_from, module.grad_bytes))
            if module.gather_bytes:
                self.dtypes[site].add(module.dtype or "")
        self.most_gather, self.most_reduce = list(self.gather), list(self.reduce)
        if not forced:
            for site in reversed(sites[1:]):
                self.most_gather[self.around[site]] += self.most_gather[site]
                self.most_reduce[self.around[site]] += self.most_reduce[site]
        spans = [
            (modules[index].forward, modules[index].backward) for index in self.modules
        ]
        self.starts = [span[0][0] for span in spans]
        self.begins = [span[1][0] for span in spans]
        self.ends = [span[1][1] for span in spans]
        self.forward_order = sorted(sites, key=self.starts.__getitem__)
        self.backward_order = sorted(sites, key=self.begins.__getitem__)
        self.end_order = sorted(sites, key=self.ends.__getitem__)
        self._until = [0.0, *accumulate(map(float, problem.compute_ms))]

    def compute_between(self, start: int, stop: int) -> float:
        """Compute without recomputation at ``start <= q < stop``."""
        return self._until[stop] - self._until[start]

    def segments(self, firsts: Sequence[int], end: int) -> list[tuple[int, int]]:
        """Stretches between neighbouring first positions, the last one up to an end."""
        return list(zip(firsts, [*firsts[1:], end], strict=True))
