"""The pipeline task `specbranch-text-generation`: `text-generation` with a draft."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .attach import specbranch
from .model_state import draft_model, transformers_model
from .runtime.selection import check_model, check_pair

TASK = "specbranch-text-generation"


class SpecBranchTextGenerationPipeline(TextGenerationPipeline):
    """A `TextGenerationPipeline` that drafts with a second model. It takes every argument of `text-generation` too.

    Args:
        draft: as in `specbranch(model, draft=...)`: the draft model, its folder or repository id, "lookup", or a list
            of a model and "lookup". By default the one that `model` remembers, or lookup where it pays.
        length_head: a length head, its folder, its repository id or "auto".
        specbranch: settings, as `generate(specbranch=...)` takes them; may also be given with each call.

    Example:
        >>> from hf_specbranch import load_demo_pair
        >>> from transformers import pipeline
        >>> target, draft, tokenizer = load_demo_pair()
        >>> pipe = pipeline("specbranch-text-generation", model=target, draft=draft, tokenizer=tokenizer)
        >>> text = pipe("def add(a, b):", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    """

    def __init__(
        self,
        *args: Any,
        model: Any,
        draft: Any = None,
        length_head: Any = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(draft, nn.Module):
            _check(model, draft)
        super().__init__(*args, model=model, **kwargs)
        specbranch(self.model, draft=draft, head=length_head)

    def check_model_type(self, supported_models: Any) -> None:
        if transformers_model(self.model) is self.model:  # transformers knows PEFT models only in its own tasks
            super().check_model_type(supported_models)


def _check(target: Any, draft: Any) -> None:
    check_model(draft_model(draft), "draft")
    check_pair(transformers_model(target), draft_model(draft), None, None)


def register_task() -> None:
    """Register `pipeline("specbranch-text-generation", ...)` with transformers; importing this module does it."""
    if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
        PIPELINE_REGISTRY.register_pipeline(
            TASK, SpecBranchTextGenerationPipeline, pt_model=AutoModelForCausalLM, type="text"
        )


register_task()
