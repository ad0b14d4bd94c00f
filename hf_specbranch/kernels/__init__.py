"""Fewer, larger kernels for a pass over a few tokens. A file holds a Triton kernel and its torch reference."""

from .attention_interface import register
from .parallel_build import build_in_parallel
from .warm_up import warm_up_in_background

__all__ = ["build_in_parallel", "register", "warm_up_in_background"]
