"""Values that are never worth keeping, and the ops that this ties together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from .recomputation import GraphProblem

_Readers = Mapping[int, Sequence[int]]  # values -> ops that read them if they run again


def may_be_kept(problem: GraphProblem, readers: _Readers, value: int) -> bool:
    """Whether it makes a difference if a value is kept."""
    is_needed = value in problem.first_need or value in readers
    return is_needed and value not in problem.returned


def dominated_values(problem: GraphProblem, readers: _Readers) -> frozenset[int]:
    """Values for which it is never worse to keep what is made of them instead.

    Each op that needs such a value again makes a single value that forward reads as
    late, and these together are no larger: kept, they take no more memory than the
    value until the last of these ops would run again, and no more than copies of them
    from then on.
    """
    return frozenset(v for v in readers if _is_dominated(problem, readers, v))


def _is_dominated(problem: GraphProblem, readers: _Readers, value: int) -> bool:
    if value in problem.first_need or value in problem.returned:
        return False
    if any(len(problem.makes[op]) != 1 for op in readers[value]):
        return False
    results = [problem.makes[op][0] for op in readers[value]]
    sizes, last = problem.value_bytes, problem.last_forward_read
    return (
        all(may_be_kept(problem, readers, v) for v in results)
        and sum(sizes[v] for v in results) <= sizes[value]
        and all(last[v] >= last[value] for v in results)
    )


def runs_with(
    problem: GraphProblem, readers: _Readers, dominated: Set[int]
) -> dict[int, int]:
    """Ops -> another op that alone takes all they make, which is never kept.

    They run again whenever that one does, just before it, and only then.
    """
    tied: dict[int, int] = {}
    for value in dominated:
        op = problem.maker[value]
        is_free = op not in problem.pinned and len(problem.makes[op]) == 1
        if is_free and len(readers[value]) == 1:
            tied[op] = readers[value][0]
    return tied
