"""Fewer, larger kernels for a pass over a few tokens; each file holds a Triton kernel and its torch reference."""

from hf_specbranch.kernels.fuse import fuse, fused
from hf_specbranch.kernels.interface import register

__all__ = ["fuse", "fused", "register"]
