"""Notes how large tensors become that operations make."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Notes the elements of the largest tensor that any operation returns.

    Attributes:
        elements: of the largest storage, those of the tensors left out.
    """

    def __init__(self, *left_out):
        super().__init__()
        self.elements = 0
        self._left_out = {one.untyped_storage().data_ptr() for one in left_out}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, torch.Tensor) and not self._is_left_out(one):
                elements = one.untyped_storage().nbytes() // one.itemsize
                self.elements = max(self.elements, elements)
        return result

    def _is_left_out(self, tensor):
        return bool(self._left_out) and tensor.untyped_storage().data_ptr() in self._left_out
