"""A dry run in which nothing is built: it records the kernels that would be launched."""

from hf_specbranch.kernels.parallel_build import dry_run


class RecordingBuilder:
    """Records the launches of a dry run."""

    def __init__(self):
        self.launches = []  # (kernel, its arguments, its options)

    def build(self, kernel, grid, args, options):
        self.launches.append((kernel, args, options))

    @property
    def kernels(self):
        return [kernel for kernel, _, _ in self.launches]

    @property
    def specializations(self):
        """What Triton would have compiled."""
        return {kernel.specialization(args, options) for kernel, args, options in self.launches}


def recorded_dry_run():
    return dry_run(RecordingBuilder())
