"""Plans of compiled graphs, with peaks that follow what the model holds beside them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from autosac.graphs.plans import GraphPlan
from autosac.quantities import format_bytes
from autosac.step.arguments import warn
from autosac.storages import storage_bytes
from autosac.summaries import Summarized, Summary


@dataclass(frozen=True, kw_only=True, repr=False)
class CompiledPlan(Summarized):
    """The plan of one compiled graph.

    Attributes:
        graph: What is recomputed, and the joint graph that does so.
        peak_bytes: Peak of forward and backward with all that is counted: simulated
            for ``aot_eager``, measured for ``inductor``. Before the first backward pass
            with all outputs, and gradients of all of them, until backward ends; then,
            with ``aot_eager``, without those that no pass held so long. With the
            parameters and buffers that the model held as its last forward pass began.
    """

    graph: GraphPlan
    peak_bytes: int

    def summary(self) -> Summary:
        """The plan of the graph, and the peak with all that is counted."""
        facts = self.graph.summary().facts
        total = ("in all", f"{format_bytes(self.peak_bytes)} at the peak")
        return Summary(title="Compiled plan", facts=(*facts, total))


class Growth:
    """How much more a model holds than when a graph of it was compiled.

    Dynamo compiles nothing anew for tensors that the graph does not read.

    Args:
        model: The model.

    Attributes:
        num_bytes: That much, when a forward pass last began.
    """

    num_bytes = 0
    _tell: Callable[[], object] | None = None

    def __init__(self, model: weakref.ref[torch.nn.Module]) -> None:
        self._model = model
        self._first_bytes = self._held_bytes()

    def _held_bytes(self) -> int:
        if (model := self._model()) is None:
            return 0
        return storage_bytes([*model.parameters(), *model.buffers()])

    def check(self) -> None:
        """Look again."""
        num_bytes = self._held_bytes() - self._first_bytes
        if num_bytes != self.num_bytes and self._tell is not None:
            self.num_bytes = num_bytes
            self._tell()

    def add(
        self, plans: list[CompiledPlan], plan: CompiledPlan, budget_bytes: int
    ) -> Callable[[CompiledPlan], None]:
        """Add a plan to others, with a peak that follows; return what corrects it.

        That takes the plan as it would be had the model not grown.
        """
        place, known, is_said = len(plans), plan, False
        plans.append(plan)

        def correct(plan: CompiledPlan) -> None:
            nonlocal known
            known = plan
            plans[place] = replace(plan, peak_bytes=plan.peak_bytes + self.num_bytes)

        def tell() -> None:
            nonlocal is_said
            correct(known)
            peak_bytes = plans[place].peak_bytes
            if self.num_bytes > 0 and peak_bytes > budget_bytes and not is_said:
                is_said = True
                warn(
                    f"The model holds {format_bytes(self.num_bytes)} more in parameters"
                    " and buffers than when it was compiled: the peak is"
                    f" {format_bytes(peak_bytes)}, above `memory_budget`="
                    f"{budget_bytes} ({format_bytes(budget_bytes)}). Call"
                    " `torch.compiler.reset()`, and the next call plans anew."
                )

        self._tell = tell
        return correct
