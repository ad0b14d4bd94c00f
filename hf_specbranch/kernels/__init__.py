"""Fewer, larger kernels for a pass over a few tokens. A file holds a Triton kernel and its torch reference."""

from hf_specbranch.kernels.attention_interface import register
from hf_specbranch.kernels.fuse import can_build_in_parallel, fuse, fused
from hf_specbranch.kernels.parallel_build import build_in_parallel
from hf_specbranch.kernels.warm_up import warm_up_in_background

__all__ = ["build_in_parallel", "can_build_in_parallel", "fuse", "fused", "register", "warm_up_in_background"]
