"""Check once per model that padded batches give the logits of plain `generate()`.

Padding changes positions and masks, and some models handle them in a way of their own. So before the first padded batch
a small one is generated both ways, two tokens long, and the logits of the second token are compared. That a model has
passed is kept on disk.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from .config import SpecBranchConfig
from .fallback import FallBack
from .kept_checks import load_check, save_check
from .kernels.attention_interface import original_attention
from .model_state import adapter_state, agreed, state_of

CHECK = "padding"  # under which the result is kept
LENGTH, PADDING = 6, 2
# Root mean square difference of the logits, in units of their spread. Padding that is read differently gives about 1.
MOST, MOST_IN_FLOAT32 = 0.3, 1e-3


_is_checking: ContextVar[bool] = ContextVar("checks_padding", default=False)  # in this thread


def check_padded_batches(model: PreTrainedModel) -> None:
    """Leave padded batches to transformers where a model reads them differently under plain `generate()`.

    Args:
        model: a model with SpecBranch attached.
    """
    if _is_checking.get():  # the batch of the check itself
        return
    plain = reads_padding_as_plain(model)
    if plain is None:
        raise FallBack(f"there is no memory to check how {type(model).__name__} reads padded batches")
    if not plain:
        raise FallBack(f"{type(model).__name__} reads padded batches in a way of its own")


def reads_padding_as_plain(model: PreTrainedModel) -> bool | None:
    """Return whether a model reads padded batches as it does under plain `generate()`.

    That is found out once per model, dtype, attention and set of adapters. None for a lack of memory, which is not
    remembered.
    """
    attention = original_attention(model.config.get_text_config(decoder=True))
    known, key = state_of(model).padding_is_plain, (adapter_state(model), model.dtype, attention)
    if key not in known:
        checking = _is_checking.set(True)
        try:
            known[key] = load_check(model, CHECK) is True or agreed(model, _passes(model))
        except torch.OutOfMemoryError:
            return None
        finally:
            _is_checking.reset(checking)
    return known[key]


def _passes(model: Any) -> bool:
    """Compare both ways to read a padded batch; keep on disk that they agree."""
    device, vocabulary = model.device, model.get_input_embeddings().weight.shape[0]
    ids = (7 * torch.arange(2 * LENGTH, device=device).view(2, LENGTH) + 1) % vocabulary
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    brief = GenerationConfig(
        max_new_tokens=2, do_sample=False, pad_token_id=0, output_logits=True, return_dict_in_generate=True
    )

    def second_logits(specbranch: SpecBranchConfig | bool) -> Tensor:
        out = model.generate(input_ids=ids, attention_mask=mask, generation_config=brief, specbranch=specbranch)
        logits: Tensor = out.logits[-1]
        return logits.float()

    try:
        plain = second_logits(False)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError):
        return True  # a prompt of tokens alone says nothing about this model
    ours = second_logits(SpecBranchConfig(policy="autoregressive", runtime="eager"))
    most = MOST_IN_FLOAT32 if model.dtype in (torch.float32, torch.float64) else MOST
    passes = bool((ours - plain).square().mean().sqrt() <= most * plain.std())
    if passes and model.specbranch_stats is not None:  # otherwise transformers has decoded both
        save_check(model, CHECK, True)
    return passes
