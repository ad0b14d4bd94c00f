"""Fewer, larger kernels for a pass over a few tokens; each file holds a Triton kernel and its torch reference."""

from hf_specbranch.kernels.fuse import can_build_in_parallel, fuse, fused
from hf_specbranch.kernels.interface import register
from hf_specbranch.kernels.parallel_build import build_in_parallel
from hf_specbranch.kernels.warm_up import prepare

__all__ = ["can_build_in_parallel", "fuse", "fused", "prepare", "register", "build_in_parallel"]
