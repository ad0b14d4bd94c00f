"""The pipeline task `specbranch-text-generation`: `text-generation` with a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import AutoModelForCausalLM, TextGenerationPipeline
from transformers.pipelines import PIPELINE_REGISTRY

from .attach import specbranch
from .mixin import SpecBranchMixin
from .model_state import draft_model, transformers_model
from .request import check_model, check_pair

TASK = "specbranch-text-generation"


class SpecBranchTextGenerationPipeline(TextGenerationPipeline):
    """A `TextGenerationPipeline` that drafts with a second model. It takes every argument of `text-generation` too.

    Args:
        draft: the draft model, its folder or its repository id. May be left out if `model` comes from
            `specbranch(model, draft=...)`. A name is loaded to the target's device, in its dtype.
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
        draft: nn.Module | str | Path | None = None,
        length_head: Any = None,
        **kwargs: Any,
    ) -> None:
        if draft is None and kwargs.get("assistant_model") is None and not _remembers_a_draft(model):
            raise ValueError(
                f"pipeline({TASK!r}) without a draft: pass draft= (a model, a folder or a repository id), or a model "
                f"from specbranch(model, draft=...)"
            )
        if isinstance(draft, nn.Module):
            _check(model, draft)
        super().__init__(*args, model=model, **kwargs)
        if isinstance(draft, (str, Path)):
            loaded = AutoModelForCausalLM.from_pretrained(draft, dtype=self.model.dtype)
            _check(model, loaded)
            draft = loaded.to(self.model.device).eval()
        specbranch(self.model, draft=cast(Any, draft), head=length_head)

    def check_model_type(self, supported_models: Any) -> None:
        if transformers_model(self.model) is self.model:  # transformers knows PEFT models only in its own tasks
            super().check_model_type(supported_models)


def _remembers_a_draft(model: Any) -> bool:
    model = transformers_model(model)
    return isinstance(model, SpecBranchMixin) and model._specbranch_memory.draft is not None


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
