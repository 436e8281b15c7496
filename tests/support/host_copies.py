"""Finds copies from host memory: no recording of a GPU's work may hold one, and elsewhere the host
waits for them. It works on a device without memory too, since only where tensors live counts.
"""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NoHostCopies(TorchDispatchMode):
    """Within it an operation that brings a tensor of the CPU to another device is an error."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given, made = (
            {leaf.device.type for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}
            for values in ((args, kwargs), out)
        )
        assert "cpu" not in given or made <= {"cpu"}, f"{func} copies from the host"
        return out
