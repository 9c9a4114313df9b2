"""Which module of a model each op of its step belongs to."""

from __future__ import annotations

import torch

from autosac import _compat_autograd


class Attribution:
    """Modules by index: that of a forward op is the innermost that runs.

    A backward op belongs to the module whose forward op it differentiates, which
    autograd's sequence numbers tell, or whose parameter it accumulates for.

    Attributes:
        stack: Modules that run, innermost last.
        last_backward: Module of the last backward op,
        function: and the autograd function that ran it, see `Op.function`.
        first_loss_node: Number of the first autograd function of the loss.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.stack = [0]
        self.last_backward = 0
        self.function = ""
        self._first_node = _compat_autograd.next_sequence_nr()
        self._of_node: dict[int, int] = {}
        self.first_loss_node = 0
        self._of_parameter: dict[int, int] = {}
        for index, module in enumerate(model.modules()):
            for _, parameter in module.named_parameters(recurse=False):
                self._of_parameter.setdefault(id(parameter), index)

    def begin_loss(self) -> None:
        """What runs from here on differentiates no op of the model itself."""
        self.first_loss_node = _compat_autograd.next_sequence_nr()

    def of_forward(self) -> int:
        """Module of a forward op that has just run."""
        module = self.stack[-1]
        self._of_node.setdefault(_compat_autograd.next_sequence_nr() - 1, module)
        return module

    def of_backward(self) -> tuple[int, bool]:
        """Module of a backward op, and whether it differentiates the model itself."""
        variable = _compat_autograd.current_node_variable()
        node, self.function = None, ""
        if variable is not None:
            self.last_backward = self._of_parameter.get(id(variable), 0)
        else:
            node = _compat_autograd.current_node_sequence_nr()
        if node is not None:
            name = _compat_autograd.name_of(_compat_autograd.current_node())
            self.function = f"{name} {node - self._first_node}"
            self.last_backward = self._of_node.get(node, self.last_backward)
        return self.last_backward, node is not None and node < self.first_loss_node
