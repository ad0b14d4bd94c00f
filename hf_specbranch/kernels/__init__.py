"""Fewer, larger kernels for a pass over a few tokens; each file holds a Triton kernel and its torch reference."""

from hf_specbranch.kernels.fuse import can_rehearse, fuse, fused
from hf_specbranch.kernels.interface import register
from hf_specbranch.kernels.prepare import prepare
from hf_specbranch.kernels.rehearsal import rehearse

__all__ = ["can_rehearse", "fuse", "fused", "prepare", "register", "rehearse"]
