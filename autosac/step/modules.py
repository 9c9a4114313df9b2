"""The module tree of a model, in forward pre-order."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNode:
    """One module.

    Attributes:
        fqn: Its name in ``named_modules()``, empty for the model itself.
        class_name: Name of its class.
        parent: Index of its parent, -1 for the model itself.
        depth: Number of ancestors.
        is_leaf: Whether it has no child modules.
        parameter_bytes: Bytes of its and its descendants' parameters.
        buffer_bytes: Bytes of its and its descendants' buffers.
    """

    fqn: str
    class_name: str
    parent: int
    depth: int
    is_leaf: bool
    parameter_bytes: int
    buffer_bytes: int


@dataclass(frozen=True)
class ModuleTree:
    """All modules of a model; index 0 is the model itself.

    Attributes:
        nodes: Modules in the pre-order of ``named_modules()``.
    """

    nodes: tuple[ModuleNode, ...]

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, index: int) -> ModuleNode:
        return self.nodes[index]

    @cached_property
    def index(self) -> dict[str, int]:
        """FQN of a module -> its index."""
        return {node.fqn: i for i, node in enumerate(self.nodes)}

    @cached_property
    def ad_matrix(self) -> npt.NDArray[np.uint8]:
        """Ancestor-descendant matrix, shape (n, n): 1 if j is i or lies in i.

        Quadratic in size: plans of profiles go by parents instead, plans of statistics
        by the part of it that belongs to modules with a trade-off curve.
        """
        size = len(self.nodes)
        matrix = np.eye(size, dtype=np.uint8)
        for i, node in enumerate(self.nodes):
            if node.parent >= 0:
                matrix[:, i] |= matrix[:, node.parent]
        return matrix

    def ancestors(self, index: int) -> tuple[int, ...]:
        """Indices from the parent of a module up to the model itself."""
        ancestors = []
        parent = self.nodes[index].parent
        while parent >= 0:
            ancestors.append(parent)
            parent = self.nodes[parent].parent
        return tuple(ancestors)

    def contains(self, outer: int, inner: int) -> bool:
        """Whether ``inner`` is ``outer`` or lies inside it."""
        return inner == outer or outer in self.ancestors(inner)
