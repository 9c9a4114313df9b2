"""Gradients of ranks beside those of one process."""

from torch.distributed.tensor import DTensor


def gradients_off(whole, divided):
    """FQN -> largest difference of a gradient, as a share of the largest of all."""
    wanted = {fqn: p.grad for fqn, p in whole.named_parameters() if p.grad is not None}
    largest = max(gradient.abs().max() for gradient in wanted.values())
    off = {}
    for fqn, parameter in divided.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, DTensor):
            gradient = gradient.full_tensor()
        if fqn in wanted:
            off[fqn] = float((gradient - wanted[fqn]).abs().max() / largest)
    return off
