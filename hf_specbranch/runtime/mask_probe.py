"""Tests once per model whether its attention obeys an explicit mask.

Branches of a text share one KV cache: each query of a pass attends to its own set of slots. Three checks show that a
model computes the right logits under such masks. The first two are exact in every dtype, because the passes that they
compare differ only in the contents of some slots:

1. A query does not depend on slots that the mask hides.
2. In every layer it depends on a slot that the mask shows, however far away.
3. Its logits are those of an ordinary run. In half precision they differ by rounding. So the difference is compared
   with the noise floor of this model: the difference between two ordinary runs, one over the whole text and one in
   two passes.

On a CPU attention takes less time without a mask. Where nothing is hidden, it is left out if the logits stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kept_checks import load_check, save_check
from ..kernels.attention_interface import original_attention
from ..layers.check import evaluating
from ..model_state import Found, adapter_state, agreed, state_of
from .eager import FULL, MASKED_ATTENTION, SLIDING, EagerRunner, MaskMaker, layer_kinds
from .ordinary_runs import CONTEXT, REFERENCES, Ordinary, first_line, ordinary_runs, query_texts, rms, together
from .recurrent_cache import is_recurrent, masked_kinds
from .rollback_probe import rollback_texts, rolled_back_logits

LAYERS_ON_CPU = 8  # layers that the second check tests on a CPU, where each query costs time; kinds of layers alternate
FEWEST_SLOTS = 320  # slots between the far and the near ones, at least
LARGEST_WINDOW = 8192  # larger windows are not tested
# How far our logits may be from those of an ordinary run, in units of the difference between two ordinary runs. The
# median of several queries stays near 1. In a mixture of experts, one run may route a single query to other experts.
MOST_BY_MEDIAN, MOST_ALONE = 4.0, 12.0
KEPT = "masks_by_layer_type", "masks_optional"  # results that are kept on disk


def mask_maker_for(model: PreTrainedModel, role: str) -> MaskMaker:
    """Return a mask maker in the form under which this model computes the right logits.

    Args:
        model: the model to test.
        role: "target" or "draft", for the error message.

    Raises:
        ValueError: if no form of mask gives the right logits, or if the model fails on an ordinary pass.
    """
    config = model.config.get_text_config(decoder=True)
    attention, (kinds, _) = original_attention(config), masked_kinds(layer_kinds(config))
    if kinds and attention not in MASKED_ATTENTION:
        raise ValueError(
            f"the {role} {type(model).__name__} uses attn_implementation={attention!r}, which takes no explicit "
            f"mask: load it with attn_implementation='sdpa' (or 'eager'), or pass specbranch=False"
        )
    if unknown := set(kinds) - {FULL, SLIDING}:
        raise ValueError(
            f"the {role} {type(model).__name__} has layers of type {', '.join(sorted(unknown))}, and only full and "
            f"sliding-window attention and recurrent layers can be rolled back: pass specbranch=False"
        )
    state, key = state_of(model), (adapter_state(model), model.dtype, attention)
    makers = state.mask_makers
    with state.kernel_lock:  # no other thread changes how the model runs while passes are compared
        kept = [] if key in makers else [load_check(model, check) for check in KEPT]
        if kept and all(isinstance(each, bool) for each in kept):
            makers[key] = MaskMaker(model, kept[0])
            makers[key].optional = kept[1]
        if key not in makers:
            with torch.no_grad(), evaluating(model):
                rolls_back = any(map(is_recurrent, layer_kinds(config)))
                texts = rollback_texts(CONTEXT) if rolls_back else query_texts()
                ordinary = ordinary_runs(model, role, texts, rolls_back)
                maker = MaskMaker(model, _find_form(model, role, hasattr(config, "layer_types"), ordinary))
                maker.optional = model.device.type == "cpu" and _runs_unmasked(model, maker, ordinary)
                makers[key] = maker
            for check, result in zip(KEPT, (maker.by_layer_type, maker.optional)):
                save_check(model, check, result)
    found: MaskMaker = makers[key]
    return found


def _find_form(model: PreTrainedModel, role: str, typed: bool, ordinary: Ordinary) -> bool:
    """Return whether the model takes its masks by layer type; raise if it obeys neither form."""
    rolls_back = any(map(is_recurrent, layer_kinds(model.config.get_text_config(decoder=True))))
    failure: Exception | None = None
    found: list[str] = []
    for by_layer_type in (True, False) if typed else (False, True):
        try:
            masks = MaskMaker(model, by_layer_type)
            with together(model):
                fault = (
                    _rollback_fault(model, masks, ordinary) if rolls_back else _Probe(model, masks, ordinary).fault()
                )
            if not fault:
                return by_layer_type
            found.append(fault)
        except torch.OutOfMemoryError:  # says nothing about the model
            raise
        except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, AssertionError) as error:
            failure = failure or error
    if not found:
        raise ValueError(
            f"the {role} {type(model).__name__} fails with an explicit attention mask and a cache that is addressed by "
            f"slot ({type(failure).__name__}: {first_line(failure)}): check its config, or pass specbranch=False"
        ) from failure
    raise ValueError(
        f"the {role} {type(model).__name__} does not compute the same logits under an explicit attention mask "
        f"({found[0]}), so {'drafts cannot be rolled back' if rolls_back else 'branches cannot share its cache'}: "
        f"choose another model, or pass specbranch=False"
    )


def _runs_unmasked(model: PreTrainedModel, masks: MaskMaker, ordinary: Ordinary) -> bool:
    """Whether the model computes the right logits without a mask, in passes over one token that sees all slots.

    The second pass reads a slot that the length of the cache does not count: a model that derives positions, or a mask
    of its own, from that length gets them wrong.
    """
    if masks.window is not None or masks.additive or masks.no_masks:
        return False
    runner, text = EagerRunner(model, masks), ordinary.texts[:1]
    positions = torch.arange(text.shape[1], device=text.device)[None]
    try:
        with together(model):
            runner.prefill(text[:, :CONTEXT], positions[:, :CONTEXT], None)
            for at in range(CONTEXT, text.shape[1]):
                here = slice(at, at + 1)
                step = runner.forward(text[:, here], positions[:, here], positions[:, here], at + 1)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError, AssertionError):
        return False
    return agreed(model, bool(rms(step.logits[0, 0].float() - ordinary.logits[0, 1]) <= MOST_ALONE * ordinary.noise))


def _rollback_fault(model: PreTrainedModel, masks: MaskMaker, ordinary: Ordinary) -> str:
    """Return what is wrong with a model with recurrent layers after a rollback; empty if nothing is."""
    distance = max(FEWEST_SLOTS, _largest_window(model))
    ours = rolled_back_logits(EagerRunner(model, masks), ordinary.texts, CONTEXT, distance)
    ratios = (ours - ordinary.logits).square().mean(-1).sqrt() / ordinary.noise
    return agreed(model, _too_far(float(ratios.flatten().median()), float(ratios.max())))


class _Probe:
    """Tests a model with one row in which each of many queries sees a context, a far slot, a near slot and itself.

    The first `REFERENCES` queries serve the first and the third check. Each further query serves the second check of
    one layer, so that one pass tests all layers.

    The slots in order: the context as first read, far slots, unused slots, near slots, queries, one more token.
    """

    def __init__(self, model: PreTrainedModel, masks: MaskMaker, ordinary: Ordinary) -> None:
        self.model, self.ordinary = model, ordinary
        self.device = ordinary.texts.device
        self.runner = EagerRunner(model, masks)
        self.runner.prefill(ordinary.texts[:1, :CONTEXT], torch.arange(CONTEXT, device=self.device)[None], None)
        self.layers: list[Any] = [layer for layer in self.runner.cache.layers if layer.is_initialized]
        self.probed = _some(self.layers) if self.device.type == "cpu" else self.layers
        self.count = REFERENCES + len(self.probed)
        every = torch.arange(self.count, device=self.device)
        size = CONTEXT + 4 * self.count + max(FEWEST_SLOTS, _largest_window(model))
        self.far = CONTEXT + 2 * every.flip(0)
        self.near = size - 2 * self.count - 1 + every
        self.own = size - self.count - 1 + every
        self.last = size - 1
        self.runner.reserve(1, size)
        self.visible = torch.zeros((1, self.count, size), dtype=torch.bool, device=self.device)
        self.visible[:, :, : CONTEXT - 2] = True
        for slots in (self.far, self.near, self.own):
            self.visible[0, every, slots] = True
        self.sees_far = masks.window is None or masks.window > 3
        self._fill(size)

    def fault(self) -> str:
        """Return what is wrong with this model under these masks; empty if nothing is."""
        if not self.layers:
            return "it keeps no keys and values between passes"
        queries, alone = self._queries(), self._alone()
        hidden = ~self.visible[0].any(0)
        hidden[self.last] = False
        unseen = hidden.nonzero()[:, 0]
        with self._changed(self.far, unseen):
            same = self._same(alone, self._alone(), self._alone)  # before the queries, whose keys it reads, run again
            changed = self._queries()
        if not self._agreed(torch.equal(queries[:REFERENCES], changed[:REFERENCES])):
            # In a mixture of experts, changed queries for single layers may have moved other queries to other experts.
            with self._changed(self.far[:0], unseen):
                same = same and self._same(queries, self._queries(), self._queries)
        if not same:
            return "a query depends on tokens that the mask hides"
        if self.sees_far and (blind := self._blind_layers(queries, changed)):
            return f"layers {', '.join(map(str, blind))} do not see a token that the mask shows, far from the query"
        return self._wrong_values(queries, alone)

    def _changed(self, slots: Tensor, everywhere: Tensor) -> AbstractContextManager[None]:
        """Change the contents of `everywhere` in all layers, and of each layer's own query's slot in that layer."""
        of_query = dict(zip(self.probed, torch.split(slots[REFERENCES:], 1)))
        return _changed({layer: torch.cat([everywhere, of_query.get(layer, slots[:0])]) for layer in self.layers})

    def _fill(self, size: int) -> None:
        """Copy the last two tokens of the context to their slots, and fill all other slots with random numbers."""
        context = torch.arange(CONTEXT, device=self.device)
        for layer in self.layers:
            for states in (layer.keys, layer.values):  # [1, heads, slots, head_dim]
                kept = states[:, :, :CONTEXT].clone()
                states[:, :, :size] = _noise_like(kept[:, :, :1])
                states[:, :, :CONTEXT] = kept
                states[:, :, self.far.to(states.device)] = kept[:, :, -2:-1]
                states[:, :, self.near.to(states.device)] = kept[:, :, -1:]
        self.runner.place(torch.zeros((1, size), dtype=torch.long, device=self.device))
        self.runner.place(context[None])
        self.runner.slot_positions[0, self.far] = CONTEXT - 2
        self.runner.slot_positions[0, self.near] = CONTEXT - 1

    def _queries(self) -> Tensor:
        """Return logits [count, V] of all queries in one pass."""
        tokens = self.ordinary.texts[:, CONTEXT].repeat(-(-self.count // REFERENCES))[None, : self.count]
        slots = self.own[None]
        logits = self.runner.forward(tokens, torch.full_like(slots, CONTEXT), slots, self.visible).logits
        return logits[0].float()

    def _alone(self) -> Tensor:
        """Return logits [V] after one more token after the first query, in a pass over that token alone."""
        slot = torch.full((1, 1), self.last, device=self.device)
        visible = self.visible[:, :1].clone()
        visible[:, :, self.last] = True
        token = self.ordinary.texts[:1, CONTEXT + 1 :]
        return self.runner.forward(token, torch.full_like(slot, CONTEXT + 1), slot, visible).logits[0, 0].float()

    def _same(self, before: Tensor, now: Tensor, again: Callable[[], Tensor]) -> bool:
        """Return whether the first queries kept their logits, up to the difference between two repeated passes."""
        first = slice(REFERENCES if before.ndim == 2 else None)
        difference = rms(now[first] - before[first])
        if not self._agreed(bool(difference > 0)):
            return True
        return self._agreed(bool(difference <= 2 * rms(again()[first] - again()[first])))

    def _blind_layers(self, before: Tensor, changed: Tensor) -> list[int]:
        """Return the layers in which a query does not depend on its far slot although it depends on its near slot."""
        if not (unmoved := self._unmoved(before, changed)):
            return []
        with self._changed(self.near, self.near[:0]):
            return sorted(unmoved - self._unmoved(before, self._queries()))

    def _unmoved(self, before: Tensor, after: Tensor) -> set[int]:
        """Return the layers whose query has the same logits before and after."""
        moved = self._agreed((before != after).any(1)[REFERENCES:].tolist())
        return {self.layers.index(layer) for layer, has in zip(self.probed, moved) if not has}

    def _wrong_values(self, queries: Tensor, alone: Tensor) -> str:
        """Return how far the logits are from an ordinary run; empty if they are within the limits."""
        ordinary = self.ordinary
        rows = zip(queries, ordinary.logits[:, 0])
        ratios = torch.stack([rms(ours - plain) for ours, plain in rows]) / ordinary.noise
        median, single = float(ratios.median()), float(rms(alone - ordinary.logits[0, 1]) / ordinary.noise)
        return self._agreed(_too_far(median, single))

    def _agreed(self, found: Found) -> Found:
        """Return what rank 0 has found, if the model is tensor parallel: what it decides, all ranks must decide."""
        return agreed(self.model, found)


def _too_far(median: float, single: float) -> str:
    """Return how far logits are from an ordinary run, in units of the noise; empty if they are within the limits."""
    if median <= MOST_BY_MEDIAN and single <= MOST_ALONE:
        return ""
    return (
        f"they differ from those of an ordinary run {max(median, single):.1f} times as much as two ordinary runs "
        f"differ from each other"
    )


def _some(layers: list[Any]) -> list[Any]:
    """Return the first few layers and the last two."""
    return layers if len(layers) <= LAYERS_ON_CPU else [*layers[: LAYERS_ON_CPU - 2], *layers[-2:]]


@contextmanager
def _changed(slots_by_layer: dict[Any, Tensor]) -> Iterator[None]:
    """Temporarily change the contents of some slots of some layers."""
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    for layer, slots in slots_by_layer.items():
        for states in (layer.keys, layer.values):
            there = slots.to(states.device)
            before = states[:, :, there]
            kept.append((states, there, before))
            states[:, :, there] = 2 * _noise_like(before[:, :, :1]) - 3 * before
    try:
        yield
    finally:
        for states, slots, before in kept:
            states[:, :, slots] = before


def _noise_like(states: Tensor) -> Tensor:
    """Return random numbers of the same shape and scale; the global generator is not used."""
    generator = torch.Generator(states.device).manual_seed(0)
    noise = torch.randn(states.shape, generator=generator, device=states.device)
    scale = rms(states.flatten())
    return (noise * torch.where(scale > 0, scale, 1.0)).to(states.dtype)


def _largest_window(model: PreTrainedModel) -> int:
    """Return the largest window in the config, in slots. Some models apply it by index, whatever the mask shows."""
    settings = model.config.get_text_config(decoder=True).to_dict()
    sizes = [size for name, size in settings.items() if "window" in name and isinstance(size, int)]
    return min(max(sizes, default=0), LARGEST_WINDOW)
