"""Memory and time of every node of an FX graph that is run node by node.

A run keeps the result of every node until its last user has run. A storage is alive as
long as a node that refers to it is: views hold their base. `live` simulates that; a run
by `torch.fx.Interpreter`, or of the generated code, does the same for real.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import fx

from autosac import _compat, _compat_fakes, _compat_graphs
from autosac.costs.calibrating import look_up
from autosac.costs.roofline import call_ms
from autosac.costs.timing import OpMeasurement, OpSizes
from autosac.devices.specs import device_spec
from autosac.fake_tensors import op_facts, real_layouts
from autosac.pytrees import tensors_in
from autosac.step.ledger import Ledger
from autosac.step.op_signatures import Signature


@dataclass(frozen=True, kw_only=True)
class NodeMemory:
    """What a node does to memory, and what it costs.

    Attributes:
        storages: Storages that its result refers to.
        makes: Storages that it allocates.
        sizes: What measuring it must know; None if it allocates nothing.
        signature: Equal for nodes that do the same work; None likewise.
        runtime_ms: Its time, modelled until measured.
        workspace_bytes: What it allocates and frees inside itself, likewise.
        flops: Floating point operations, by PyTorch's formulas.
    """

    storages: tuple[int, ...]
    makes: tuple[int, ...] = ()
    sizes: OpSizes | None = None
    signature: Signature | None = None
    runtime_ms: float = 0.0
    workspace_bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class GraphMemory:
    """Memory of a graph.

    Attributes:
        nodes: All nodes in order.
        nbytes: Size of each storage.
    """

    nodes: Mapping[fx.Node, NodeMemory]
    nbytes: Mapping[int, int]

    @property
    def input_bytes(self) -> int:
        """Bytes of the inputs, which are there before and after a run."""
        return sum(self.nbytes[storage] for storage in self._held(()))

    def measured(self) -> GraphMemory:
        """A copy with times and workspaces that were measured here, or before."""
        needed = {
            memory.signature: memory.sizes
            for memory in self.nodes.values()
            if memory.signature is not None and memory.sizes is not None
        }
        with _compat.no_modes():  # AOTAutograd's fake tensors cost nothing
            measurements, _ = look_up(needed, device=torch.device("cpu"))
        return self.with_costs({s: cost for s, (cost, _) in measurements.items()})

    @cached_property
    def costs(self) -> dict[Signature, OpMeasurement]:
        """Time and workspace per kind of node."""
        return {
            memory.signature: OpMeasurement(
                runtime_ms=memory.runtime_ms, workspace_bytes=memory.workspace_bytes
            )
            for memory in self.nodes.values()
            if memory.signature is not None
        }

    def with_costs(self, costs: Mapping[Signature, OpMeasurement]) -> GraphMemory:
        """A copy with these times and workspaces, where they are known."""

        def with_cost(memory: NodeMemory) -> NodeMemory:
            cost = None if memory.signature is None else costs.get(memory.signature)
            if cost is None:
                return memory
            return replace(
                memory,
                runtime_ms=cost.runtime_ms,
                workspace_bytes=cost.workspace_bytes,
            )

        nodes = {node: with_cost(memory) for node, memory in self.nodes.items()}
        return replace(self, nodes=nodes)

    def last_users(self) -> dict[fx.Node, int]:
        """Place in the order of the last user of each node, else its own place."""
        last_places: dict[fx.Node, int] = {}
        for place, node in enumerate(self.nodes):
            last_places[node] = place
            for argument in node.all_input_nodes:
                last_places[argument] = place
        return last_places

    def lives(
        self,
        freed: Collection[fx.Node] = (),
        ends: Mapping[fx.Node, int] | None = None,
    ) -> dict[int, tuple[int, int]]:
        """Storages -> first and last place at which they are alive.

        Args:
            freed: Placeholders that only this run holds. Others outlive it, and are
                not listed.
            ends: Last places of nodes that are not those of their last users.
        """
        last_users, held = self.last_users() | dict(ends or {}), self._held(freed)
        spans: dict[int, tuple[int, int]] = {}
        for place, (node, memory) in enumerate(self.nodes.items()):
            for storage in memory.storages if node in freed else memory.makes:
                if storage not in held:
                    spans[storage] = (0 if node in freed else place), place
            if node.op == "output":  # the last user of what it returns
                continue
            for storage in memory.storages:
                if storage in spans:
                    first, last = spans[storage]
                    spans[storage] = first, max(last, last_users[node])
        return spans

    def _held(self, freed: Collection[fx.Node]) -> frozenset[int]:
        """Storages of inputs that outlive a run."""
        return frozenset(
            storage
            for node, memory in self.nodes.items()
            if node.op in ("placeholder", "get_attr") and node not in freed
            for storage in memory.storages
        )

    def live(
        self,
        freed: Collection[fx.Node] = (),
        ends: Mapping[fx.Node, int] | None = None,
    ) -> Iterator[tuple[fx.Node, int]]:
        """Bytes alive while each node runs; arguments as for `lives`."""
        lives = self.lives(freed, ends)
        spans = np.array(list(lives.values()), dtype=np.int64).reshape(-1, 2)
        ledger = Ledger(
            born=spans[:, 0],
            died=spans[:, 1] + 1,
            nbytes=np.array([self.nbytes[storage] for storage in lives], np.int64),
            constant_bytes=sum(self.nbytes[storage] for storage in self._held(freed)),
        )
        alive = ledger.after_ticks(len(self.nodes)).tolist()
        for (node, memory), num_bytes in zip(self.nodes.items(), alive, strict=False):
            yield node, num_bytes + memory.workspace_bytes

    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(num_bytes for _, num_bytes in self.live())


def graph_memory(module: fx.GraphModule) -> GraphMemory:
    """Run a graph on fake tensors: which storages does every node make and hold?

    Times and workspaces are modelled.
    """
    inputs = [
        node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"
    ]
    run = _FakeRun(module)
    mode = next(
        (
            m
            for t in tensors_in(inputs)
            if (m := _compat_fakes.fake_mode_of(t)) is not None
        ),
        None,
    )
    with (
        mode or _compat_fakes.FakeTensorMode(allow_non_fake_inputs=True),
        torch.no_grad(),
    ):
        run.run(*inputs)
    return GraphMemory(nodes=run.found, nbytes=run.nbytes)


class _FakeRun(fx.Interpreter):
    """Notes what every node makes."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.found: dict[fx.Node, NodeMemory] = {}
        self.nbytes: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # of storages, which `env` keeps alive
        self._device = device_spec("cpu")

    def run_node(self, n: fx.Node) -> Any:
        """Run a node and note its storages; numbers come from the node's metadata."""
        self._node = n
        self._costs: dict[str, Any] = {}
        value = n.meta.get("val") if n.op == "call_function" else None
        out = value if isinstance(value, (int, float)) else super().run_node(n)
        storages, new = self._storages(out)
        if n.op == "call_function" and (new or self._costs.get("is_written")):
            costs = self._cost_of(out, new)
        else:
            costs = {}
        self.found[n] = NodeMemory(storages=storages, makes=new, **costs)
        return out

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, with the memory that its CPU kernel gives its results."""
        if not _compat_graphs.is_op(target):
            return super().call_function(target, args, kwargs)
        out = real_layouts.of_own_kernel(target, args, kwargs)
        if out is None:
            out = super().call_function(target, args, kwargs)
        out = real_layouts.on_cpu(target, args, out)
        written = _compat.written_arguments(target, args, kwargs)
        self._costs = {"call": (target, args, kwargs), "is_written": bool(written)}
        return out

    def _storages(self, out: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        storages: list[int] = []
        new: list[int] = []
        for tensor in tensors_in(out):
            key = _compat_graphs.storage_key(tensor)
            if key not in self._numbers:
                self._numbers[key] = len(self._numbers)
                self.nbytes[self._numbers[key]] = tensor.untyped_storage().nbytes()
                new.append(self._numbers[key])
            storages.append(self._numbers[key])
        return tuple(dict.fromkeys(storages)), tuple(new)

    def _cost_of(self, out: Any, new: tuple[int, ...]) -> dict[str, Any]:
        if "call" not in self._costs:
            return {}
        func, args, kwargs = self._costs["call"]
        tensors = [*tensors_in(args), *tensors_in(kwargs), *tensors_in(out)]
        costs = op_facts.costs(
            func, args, kwargs, tensors, out, device_type="cpu", target=None
        )
        floats = (t.dtype for t in tensors_in(out) if t.is_floating_point())
        dtype = str(next(floats, ""))[6:]
        return {
            "signature": costs.signature,
            "sizes": OpSizes(
                moved_bytes=costs.moved_bytes,
                made_bytes=sum(self.nbytes[storage] for storage in new),
            ),
            "runtime_ms": call_ms(
                str(func),
                costs.signature,
                dtype,
                costs.flops,
                costs.moved_bytes,
                self._device,
            ),
            "workspace_bytes": costs.workspace_bytes,
            "flops": costs.flops,
        }
