"""What FSDP2 itself does where one module reshards, on a group that moves nothing."""

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autosac._compat_distributed import fake_group


def runs_with(model, inputs, fqn):
    """Whether a step runs in which a module is a unit that reshards."""
    with fake_group(2):
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model.get_submodule(fqn), mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        try:
            model(inputs).sum().backward()
        except RuntimeError:
            return False
        return all(p.grad is not None for p in model.parameters())
