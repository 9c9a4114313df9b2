"""What is alive in this process, for peaks of loops that other libraries run."""

import gc

import torch


def tensors_alive():
    """All tensors that Python can reach, and the gradients that it never looked at."""
    alive = [one for one in gc.get_objects() if _is_tensor(type(one))]
    return alive + [one.grad for one in alive if one.is_leaf and one.grad is not None]


def tensors_since(before):
    """Tensors that are alive and do not share memory with earlier ones."""
    known = {tensor.untyped_storage()._cdata for tensor in before}
    return (
        tensor
        for tensor in tensors_alive()
        if tensor.untyped_storage()._cdata not in known
    )


def _is_tensor(kind):
    """Whether tensors of a type have memory, as fakes have not."""
    return kind in _KINDS or torch.nn.Parameter in kind.__mro__


_KINDS = (torch.Tensor, torch.nn.Buffer)
