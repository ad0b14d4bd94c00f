"""Replacement forwards: the layers of a model through our kernels.

A file holds one kind of module: how it is recognised by its structure, and the forward that replaces its own.
"""

from .fuse import can_build_in_parallel, fuse, fused

__all__ = ["can_build_in_parallel", "fuse", "fused"]
