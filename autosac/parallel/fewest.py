"""The fewest GPUs on which a step fits."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from autosac.errors import ArgumentError
from autosac.parallel.clusters import ClusterSpec
from autosac.parallel.solving import ParallelChooser, SimulatedChoice
from autosac.solving.solve_options import SolveOptions


def fewest_gpus(
    chooser: ParallelChooser,
    spec: ClusterSpec,
    budget_bytes: int,
    *,
    most_gpus: int = 65_536,
    guess: SimulatedChoice | None = None,
    options: SolveOptions | None = None,
) -> int | None:
    """Fewest GPUs whose fully sharded step fits: see `min_gpus`.

    Peaks fall as GPUs are added, until padding outgrows what is left of a parameter.
    So sizes are doubled until a choice of least peak (the guess) fits by simulation,
    and then halved; the choice of least peak on fewer GPUs says whether to go on. One
    GPU alone is another matter: it gathers nothing and needs no buffers for that.
    """
    options, ranks = options or SolveOptions(), chooser.form.ranks

    def lowest_on(num_gpus: int) -> SimulatedChoice:
        return chooser.at(spec.resized(num_gpus), num_gpus).lowest(options)

    sizes = [n for n in range(1, spec.gpus_per_node) if n <= most_gpus]
    sizes += range(spec.gpus_per_node, most_gpus + 1, spec.gpus_per_node)
    if not sizes:
        raise ArgumentError(f"`most_gpus` must be at least 1, got {most_gpus}.")
    fits_alone = chooser.form.resident_bytes(1) <= budget_bytes
    if fits_alone and lowest_on(1).highest_peak_bytes <= budget_bytes:
        return 1
    some = min(spec.gpus_per_node, most_gpus)
    lowest = guess or lowest_on(some)

    def highest_peak_bytes(place: int) -> int:
        sharding = replace(
            lowest.sharding, shard_degree=sizes[place], replicate_degree=1
        )
        peak_bytes = ranks.peak_bytes(sharding, lowest.chosen)
        return peak_bytes + ranks.late_bytes(sharding)

    def fits(place: int) -> bool:
        return highest_peak_bytes(place) <= budget_bytes

    doubled = [2**k - 1 for k in range(len(sizes).bit_length())]
    place = next(filter(fits, doubled), None)
    if place is None:
        place = min(doubled, key=highest_peak_bytes)
        lowest = lowest_on(sizes[place])
        if not fits(place):
            return None
    place = bisect_left(range(place), True, key=fits)
    while place:
        lowest = lowest_on(sizes[place - 1])
        if not fits(place - 1):
            break
        place = bisect_left(range(place - 1), True, key=fits)
    return sizes[place]
