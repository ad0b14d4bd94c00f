"""A rehearsal in which nothing is built; what it has met can be looked at."""

from contextlib import contextmanager

from hf_specbranch.kernels.parallel_build import DryRun, _dry_run


class BuildsNothing(DryRun):
    def __init__(self):
        self.met = []  # (kernel, its arguments, its options)

    def build(self, kernel, grid, args, options):
        self.met.append((kernel, args, options))

    @property
    def kernels(self):
        return [kernel for kernel, _, _ in self.met]

    @property
    def kinds(self):
        """What Triton would have compiled."""
        return {kernel.kind(args, options) for kernel, args, options in self.met}


@contextmanager
def in_rehearsal():
    before = _dry_run.set(found := BuildsNothing())
    try:
        yield found
    finally:
        _dry_run.reset(before)
