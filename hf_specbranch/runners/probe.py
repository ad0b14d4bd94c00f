"""Does this model's attention obey an explicit mask? Asked once of each model, by trying."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.asked import own_attention
from ..kernels.trial import evaluating
from .eager import EagerRunner
from .masks import FULL, MASKED_ATTENTION, SLIDING, MaskMaker, layer_kinds

_KNOWN: WeakKeyDictionary[PreTrainedModel, bool] = WeakKeyDictionary()  # model -> by_layer_type


def mask_maker_for(model: PreTrainedModel, role: str) -> MaskMaker:
    """The mask maker under which this model computes what it should.

    Two branches are packed into scattered slots of one row; their logits must be those of a plain run of both.

    Args:
        model: the model to ask.
        role: "target" or "draft", for the error message.

    Raises:
        ValueError: if no form of mask gives the right logits; speculation with this model would be wrong.
    """
    config = model.config.get_text_config(decoder=True)
    attention = own_attention(config)
    if attention not in MASKED_ATTENTION:
        raise ValueError(
            f"the {role} {type(model).__name__} uses attn_implementation={attention!r}, which takes no explicit "
            f"mask: load it with attn_implementation='sdpa' (or 'eager'), or pass specbranch=False"
        )
    if unknown := set(layer_kinds(config)) - {FULL, SLIDING}:
        raise ValueError(
            f"the {role} {type(model).__name__} has layers of type {', '.join(sorted(unknown))}, and only full and "
            f"sliding-window attention can be rolled back: pass specbranch=False"
        )
    if model not in _KNOWN:
        _KNOWN[model] = _find_form(model, role, hasattr(config, "layer_types"))
    return MaskMaker(model, by_layer_type=_KNOWN[model])


def _find_form(model: PreTrainedModel, role: str, typed: bool) -> bool:
    failure: Exception | None = None
    for by_layer_type in (True, False) if typed else (False, True):
        try:
            if _obeys(model, MaskMaker(model, by_layer_type)):
                return by_layer_type
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as error:
            failure = error
    raise ValueError(
        f"the {role} {type(model).__name__} does not compute the same logits under an explicit attention mask, so "
        f"branches cannot share its cache: choose another model, or pass specbranch=False"
    ) from failure


@torch.no_grad()
def _obeys(model: PreTrainedModel, masks: MaskMaker) -> bool:
    device = model.get_input_embeddings().weight.device
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    ids = (torch.arange(8, device=device) * 7 + 1) % vocabulary
    prefix, one, two, three = ids[None, :5], ids[5:6], ids[6:7], ids[7:8]
    # Equally long: nothing that is compared sees the last token of the first row.
    rows = torch.stack([torch.cat([prefix[0], one, one]), torch.cat([prefix[0], two, three])])
    with evaluating(model):
        plain = model(input_ids=rows, use_cache=False).logits
        runner = EagerRunner(model, masks)
        runner.prefill(prefix, torch.arange(5, device=device)[None], None)
        slots = torch.tensor([[9, 7]], device=device)
        sees = torch.zeros((1, 2, 12), dtype=torch.bool, device=device)
        sees[:, :, :5] = True
        sees[0, 0, 9] = sees[0, 1, 7] = True
        packed = runner.forward(torch.stack([one, two], 1), torch.full_like(slots, 5), slots, sees)
        last = torch.tensor([[11]], device=device)
        sees = sees[:, 1:].clone()
        sees[0, 0, 11] = True
        deeper = runner.forward(three[None], torch.full_like(last, 6), last, sees)
    # In units of the logits' spread: rounding is about 1e-6 in float32 and 1e-2 in bf16, a mask not obeyed about 1.
    tolerance = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    return _alike(plain[0, 5], packed.logits[0, 0], tolerance) and _alike(plain[1, 6], deeper.logits[0, 0], tolerance)


def _alike(plain: Tensor, masked: Tensor, tolerance: float) -> bool:
    plain, masked = plain.double(), masked.double()
    return bool((plain - masked).abs().max() <= tolerance * plain.std())
