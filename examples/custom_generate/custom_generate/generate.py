"""SpecBranch as a `custom_generate` repository: every argument of `generate()` is passed on."""

from hf_specbranch.attach import attached_for_call


def generate(model, assistant_model=None, **kwargs):
    """Run `model.generate(assistant_model=draft, ...)` with branch-parallel speculative decoding.

    Takes what plain `generate()` takes, and `specbranch=`, `length_head=`, `speculation_hooks=` and `generator=`.
    """
    with attached_for_call(model):
        return model.generate(assistant_model=assistant_model, **kwargs)
