"""Graphs on a CPU: what operations a stage runs is recorded, and replayed without its Python code.

They stand in for CUDA graphs where a test needs what a capture really does: it computes nothing, it fixes all
addresses, and a replay knows nothing of Python. `graphs.EagerGraphs` runs the code of a stage again instead.
"""

from contextlib import contextmanager, nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_specbranch.runtime.pieces import Recorder, warm_up_run

FORBIDDEN = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}  # they wait for the device


def tensors(values):
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


class CpuGraph(TorchDispatchMode):
    """Records operations. What they change is put back at the end: to capture is not to run."""

    def __init__(self):
        super().__init__()
        self.operations, self.before = [], {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function not in FORBIDDEN, f"{function} cannot be captured"
        kwargs = kwargs or {}
        named = dict(zip([each.name for each in function._schema.arguments], args)) | kwargs
        for each in function._schema.arguments:
            if each.alias_info is not None and each.alias_info.is_write:
                for tensor in tensors(named.get(each.name)):
                    storage = tensor.untyped_storage()
                    self.before.setdefault(storage.data_ptr(), (storage, storage.clone()))
        output = function(*args, **kwargs)
        inputs = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
        new = [each for each in tensors(output) if each.untyped_storage().data_ptr() not in inputs]
        if new or any(each.alias_info is not None and each.alias_info.is_write for each in function._schema.arguments):
            self.operations.append((function, args, kwargs, output if new else None))
        return output

    def capture_begin(self):
        self.__enter__()
        return self

    def capture_end(self):
        self.__exit__(None, None, None)
        for storage, content in self.before.values():
            storage.copy_(content)
        self.before = {}

    def replay(self):
        for function, args, kwargs, output in self.operations:
            result = function(*args, **kwargs)
            if output is not None:
                for memory, value in zip(tensors(output), tensors(result), strict=True):
                    memory.copy_(value)


class CpuGraphs:
    """In place of `static_buffers.GraphMemory`."""

    def __init__(self, device):
        self.device, self.captures, self.seconds, self.num_bytes, self.graphs = device, 0, 0.0, 0, []

    @contextmanager
    def capturing(self):
        yield
        self.captures += 1

    def run_and_record(self, stage, generators=()):
        with warm_up_run() as first:
            stage()
        with Recorder(self.device, lambda: CpuGraph().capture_begin(), nullcontext, first.outputs) as recorder:
            stage()
        self.graphs.append(recorder.parts)
        return recorder.parts
