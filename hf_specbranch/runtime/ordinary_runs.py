"""Runs a model as transformers runs it, for the probes to compare with."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.backend import HALF_PRECISION
from ..model_state import agreed, ranks_of
from .eager import quiet_arguments
from .kv_cache import cache_argument
from .rollback_probe import logits_token_by_token

CONTEXT = 4  # tokens before the queries; the last two are copied to a far and to a near slot for each query
REFERENCES = 4  # queries whose logits are compared with an ordinary run
# The difference between two ordinary runs, in units of the standard deviation of the logits. In float32 it is about
# 1e-6 and need not be measured. Unrelated logits reach 1.4.
NOISE_IN_FLOAT32, MOST_NOISE = 1e-4, 0.7


class Ordinary(NamedTuple):
    """The logits of two runs of the model as transformers runs it."""

    texts: Tensor  # [R, L] the same context in each, and something else after it
    logits: Tensor  # [R, L - CONTEXT, V] after the tokens that follow the context
    noise: Tensor  # root mean square difference between the two runs


def query_texts() -> Tensor:
    """Return texts [R, CONTEXT + 2]: the same context, a different query in each, and one more token."""
    texts = torch.empty((REFERENCES, CONTEXT + 2), dtype=torch.long)
    texts[:, :CONTEXT] = _tokens(0, CONTEXT)
    texts[:, CONTEXT] = _tokens(CONTEXT, REFERENCES)
    texts[:, CONTEXT + 1] = _tokens(CONTEXT + 1, REFERENCES)
    return texts


def ordinary_runs(model: PreTrainedModel, role: str, texts: Tensor, token_by_token: bool) -> Ordinary:
    """Run a model over texts [R, L], as a whole and where needed a second time after their context.

    Args:
        model: the model.
        role: "target" or "draft", for the error message.
        texts: the tokens; they are taken modulo the vocabulary.
        token_by_token: compare with passes over single tokens.

    Raises:
        ValueError: if the model fails, or if its logits make no sense.
    """
    embedding = model.get_input_embeddings().weight
    vocabulary = min(model.config.get_text_config(decoder=True).vocab_size, embedding.shape[0])
    texts, cache = texts.to(embedding.device) % vocabulary, cache_argument(model)
    extra = quiet_arguments(model)
    try:
        with together(model):
            whole = model(input_ids=texts, use_cache=False, **extra).logits
            noise = NOISE_IN_FLOAT32 * whole.float().std()
            logits = whole[:, CONTEXT:].float()
            rounded = next((dtype for dtype in (whole.dtype, model.dtype) if dtype in HALF_PRECISION), None)
            if token_by_token or rounded:
                past = {cache: model(input_ids=texts[:, :CONTEXT], use_cache=True, **extra)[cache]}
                if token_by_token:
                    second = logits_token_by_token(model, texts, CONTEXT, past | extra)
                else:
                    second = model(input_ids=texts[:, CONTEXT:-1], **past, **extra).logits
                if rounded:  # two runs may agree to the last bit, although their logits are rounded
                    least = 2 * torch.finfo(rounded).eps * rms(whole)
                    noise = torch.maximum(rms(logits[:, 0] - second[:, 0]), least)
                if token_by_token:  # a recurrent layer has another algorithm for them, which rounds differently
                    logits = second
    except (ConnectionError, torch.OutOfMemoryError):  # of another rank; neither says anything about the model
        raise
    except Exception as error:  # any error here is the model's own
        raise ValueError(
            f"the {role} {type(model).__name__} fails on an ordinary pass over {texts.shape[1]} tokens "
            f"({type(error).__name__}: {first_line(error)}): check its config, or pass specbranch=False"
        ) from error
    if not agreed(model, bool(torch.isfinite(whole).all())):
        raise ValueError(
            f"the {role} {type(model).__name__} computes logits that are not finite: check its weights and its dtype "
            f"({model.dtype})"
        )
    if agreed(model, bool(noise > MOST_NOISE * whole.float().std())):
        raise ValueError(
            f"the {role} {type(model).__name__} computes with its cache other logits than without: check its config, "
            f"or pass specbranch=False"
        )
    return Ordinary(texts, logits, noise)


def together(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Do what all ranks of a tensor parallel model do now: an error that one of them alone raises ends all of them."""
    ranks = ranks_of(model)
    return nullcontext() if ranks is None else cast(AbstractContextManager[None], ranks.together())


def rms(values: Tensor) -> Tensor:
    """Return the root mean square of all values, a scalar."""
    return values.float().square().mean().sqrt()


def _tokens(first: int, count: int) -> Tensor:
    return 7 * torch.arange(first, first + count) + 1


def first_line(error: Exception | None) -> str:
    """Return the first line of an error's message."""
    return (str(error).splitlines() or [""])[0]
