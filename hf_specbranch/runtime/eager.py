"""The runner that works wherever transformers does: one ordinary forward per call, with an explicit mask."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.attention_interface import original_attention
from ..kernels.parallel_build import is_dry_run
from ..kernels.spans import SPANS
from .base import Step
from .kv_cache import SlotCache, cache_argument
from .positions import LengthDependentRotary, learned_positions
from .recurrent_cache import RecurrentCache, masked_kinds
from .recurrent_modules import owners_of
from .static_buffers import Buffers

SMALLEST = 256  # fewest slots that a captured forward reads; larger sizes are powers of two


class Remembered(NamedTuple):
    """A text of one row whose keys and values are in a cache, token `i` in slot `i`."""

    tokens: list[int]
    weights: Tensor | None = None  # checksum of the weights that computed them, if it matters; see `prefix_reuse`

    def common_prefix(self, prompt: Sequence[int], with_last: bool = False) -> int:
        """Return how many tokens a prompt has in common with this text.

        Args:
            prompt: its tokens.
            with_last: count the last token of the prompt too. A target always reads it, because its logits are wanted.

        Example:
            >>> Remembered([1, 2, 3, 4]).common_prefix([1, 2, 5]), Remembered([1, 2, 3]).common_prefix([1, 2, 3])
            (2, 2)
        """
        most = max(0, min(len(self.tokens), len(prompt) - (not with_last)))
        return next((index for index in range(most) if self.tokens[index] != prompt[index]), most)


NOTHING = Remembered([])


class PlanRun(NamedTuple):
    """Names the captured stages of a plan."""

    settings: tuple[Hashable, ...]  # of the call: sampling and processors
    plan: tuple[Hashable, ...]


class EagerRunner:
    """Runs a model eagerly on a slot-addressed KV cache, and keeps the position of the token in each slot.

    Args:
        model: any decoder-only model whose attention takes explicit masks.
        masks: makes masks in the form that this model takes; see `mask_probe.mask_maker_for`.
        limit: reserve addresses for this many slots, where the device can; see `SlotCache`.
    """

    captures = False  # whether `buffers` captures whole stages as CUDA graphs
    takes_spans = False  # whether attention runs through our kernels, which read spans in place of masks
    graphs_captured = 0  # graphs captured so far
    capture_seconds = 0.0  # time that this took
    joint_graphs = 0  # names the graphs that all ranks of a tensor parallel model have captured together; 0: none
    runtime = "eager"
    why_eager = ""  # why there are no graphs on a GPU, unless the settings say so
    skips_autograd = False  # passes run in torch's inference mode, which takes less time on a CPU; see `selection`

    def __init__(self, model: PreTrainedModel, masks: MaskMaker, limit: int | None = None) -> None:
        self.model = model
        self.masks = masks
        config = model.config.get_text_config(decoder=True)
        self.is_recurrent = bool(masks.no_masks)
        self.cache = RecurrentCache(model, limit) if self.is_recurrent else SlotCache(limit)
        self.owners = owners_of(model) if self.is_recurrent else None
        self.cache_argument = cache_argument(model)
        embedding = model.get_input_embeddings().weight
        self.device: torch.device = embedding.device
        self.vocabulary: int = embedding.shape[0]
        self.slot_positions = torch.zeros((0, 0), dtype=torch.long, device=self.device)  # [B, capacity]
        self.position_limit: int | None = getattr(config, "max_position_embeddings", None)
        self.learned_positions = learned_positions(model)
        self.rotary = LengthDependentRotary(model)
        self.has_rotary = bool(self.rotary)  # some rotary embedding depends on the length of the text
        self.lag: Tensor | int = 0  # [B, 1] positions between each row and the longest one
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.last_logits_only: dict[str, Any] = {"logits_to_keep": 1} if keeps else {}  # computes only the last logits
        self.quiet = quiet_arguments(model)
        self.remembered = NOTHING  # the text in the cache, if there is one row
        self.plans_run: set[PlanRun] = set()  # whose stages have run; `Assembly` names them

    def reserve(self, rows: int, slots: int) -> bool:
        """Make room for `slots` slots in each of `rows` rows. Return whether memory that existed has moved."""
        moved = self.cache.reserve(slots)
        address, (known_rows, known) = self.cache.address, self.slot_positions.shape
        if known >= address.capacity:
            return moved
        width = max(address.capacity, address.limit or 0)
        grown = torch.zeros((rows, width), dtype=torch.long, device=self.device)
        grown[:known_rows, :known] = self.slot_positions
        self.slot_positions = grown
        return moved or known > 0

    def prefill(self, tokens: Tensor, positions: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Run tokens [B, P] through the model's own causal path and return the last logits [B, V]."""
        self.place(positions)
        self.cache.append()
        output = self.model(
            input_ids=tokens,
            attention_mask=attention_mask,
            use_cache=True,
            **self._placed(positions),
            **self.quiet,
            **self.last_logits_only,
        )
        self.cache.mark(tokens.shape[1])
        logits: Tensor = output.logits[:, -1]
        return logits

    def _placed(self, positions: Tensor) -> dict[str, Any]:
        """Return the cache and the positions as the model takes them. Models of recurrent layers alone take none."""
        if self.cache_argument != "past_key_values":
            return {self.cache_argument: self.cache}
        return {"past_key_values": self.cache, "position_ids": positions}

    def place(self, positions: Tensor, first: int = 0) -> None:
        """Record that slots `first` onward hold tokens at these positions, [B, N]."""
        self.reserve(positions.shape[0], first + positions.shape[1])
        self.slot_positions[:, first : first + positions.shape[1]] = positions

    def buffers(self, settings: Hashable) -> Buffers:
        """Return the memory for stages with these settings: what all of these stages depend on (see `Buffers.run`)."""
        return Buffers(self.device)

    def drop_graphs(self) -> None:
        """Drop what is captured; it is captured again when it is needed."""

    def bucket(self, slots: int) -> int:
        """Return how many slots a captured pass reads if this many are needed; 0 if the spans say so."""
        return 0 if self.takes_spans else round_up(slots)

    def columns(self, needed: int) -> int:
        """Return the width of buffers that are indexed by column if this many columns are needed."""
        return needed

    def visible(self, spans: Tensor, shown: int, seen: Tensor) -> Tensor:
        """Return what queries see, in the form that this runner takes: the spans themselves, or a mask.

        Args:
            spans: [B, Q, 4].
            shown: how many slots the pass reads.
            seen: [B, S] bool: slots that are not hidden from all queries.
        """
        return spans if self.takes_spans else spans_to_mask(spans, min(shown, seen.shape[1]), seen)

    def forward(self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor | int, **extra: Any) -> Step:
        """Run one forward; see `Runner.forward`. A `GraphRunner` replays it as a CUDA graph of its own.

        Args:
            tokens: [B, Q].
            positions: [B, Q]; models of images have [axes, B, Q], with the positions in the text first.
            slots: [B, Q] where the keys and values are written.
            visible: [B, Q, S] which slots each query attends to, or spans [B, Q, 4] if the runner takes them. A number:
                one query per row attends to so many slots, all of them; only if `masks.optional`.
            extra: more arguments of the model, such as `output_hidden_states`.
        """
        return self.forward_uncaptured(tokens, positions, slots, visible, **extra)

    def forward_uncaptured(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor | int, **extra: Any
    ) -> Step:
        """Run one forward, launched kernel by kernel in every runner. Takes the same arguments as `forward`.

        Stages call it, because a stage is captured as a whole and a graph cannot be replayed inside a capture.
        """
        in_text = positions if positions.ndim == 2 else positions[0]
        by_spans = not isinstance(visible, int) and visible.dtype == SPANS
        # Spans bound what a pass reads. A captured one must not contain the present capacity, which grows.
        shown = visible if isinstance(visible, int) else self.cache.address.most if by_spans else visible.shape[2]
        if self.masks.window is not None and not by_spans and not is_dry_run():
            self.slot_positions.scatter_(1, slots, in_text)
        self.cache.point_at(slots, shown)
        # Further outputs may be the caller's, and the first pass creates the cache.
        skips = self.skips_autograd and not extra and len(self.cache.layers) > 0 and not self.is_recurrent
        mode = torch.inference_mode() if skips else nullcontext()
        with (
            self.rotary.for_lengths(in_text + self.lag + 1) if self.has_rotary else mode,
            nullcontext() if self.owners is None else self.owners.stepping(),
        ):
            output = self.model(
                input_ids=tokens,
                attention_mask=self.masks(visible, in_text[:, -tokens.shape[1] :], self.slot_positions[:, :shown]),
                use_cache=True,
                **self._placed(positions),
                **self.quiet,
                **extra,
            )
        # Nothing may be changed in place that was made in inference mode, as processors change scores.
        logits = output.logits.clone() if output.logits.is_inference() else output.logits
        return Step(logits, output.get("hidden_states"), output.get("attentions"))

    def move(self, source: Tensor, destination: Tensor) -> None:
        self.slot_positions.scatter_(1, destination, self.slot_positions.gather(1, source))
        self.cache.move(source, destination)


def quiet_arguments(model: PreTrainedModel) -> dict[str, Any]:
    """Return arguments that switch off what no generation uses: router losses, which need a mask of two dimensions."""
    known = inspect.signature(model.forward).parameters
    return {"output_router_logits": False} if "output_router_logits" in known else {}


def round_up(slots: int) -> int:
    """Return the next power of two, so that few sizes are captured."""
    return max(SMALLEST, 1 << (slots - 1).bit_length())


FULL, SLIDING = "full_attention", "sliding_attention"
# Attention implementations that take an explicit mask: a boolean one, and one that is added to the scores.
MASKED_ATTENTION = ("sdpa", "eager")


class MaskMaker:
    """Turns visibility [B, Q, S] into masks [B, 1, Q, S], one for each kind of layer in the model.

    Args:
        model: the model the masks are for.
        by_layer_type: return a dict keyed by layer type, as hybrid models take it; otherwise one mask.
    """

    optional = False  # a pass over one token per row that sees all slots is the same without a mask; see `mask_probe`

    def __init__(self, model: PreTrainedModel, by_layer_type: bool) -> None:
        config = model.config.get_text_config(decoder=True)
        self.by_layer_type = by_layer_type
        self.kinds, self.no_masks = masked_kinds(layer_kinds(config))
        self.window: int | None = getattr(config, "sliding_window", None)
        self.additive = original_attention(config) == "eager"
        self.dtype = model.dtype

    def __call__(self, visible: Tensor | int, positions: Tensor, slot_positions: Tensor) -> Any:
        """Return the masks of one pass: a tensor, or a dict of them by layer type. Recurrent layers have none.

        Args:
            visible: [B, Q, S] which slots each query attends to, or spans [B, Q, 4]; a number: all slots, and there is
                no mask.
            positions: [B, Q] positions of the queries.
            slot_positions: [B, S] positions of the tokens in the slots.
        """
        if isinstance(visible, int):
            return dict.fromkeys(self.kinds) if self.by_layer_type else None
        masks = {
            kind: self._to_mask(self._within_window(kind, visible, positions, slot_positions)) for kind in self.kinds
        }
        return self.no_masks | masks if self.by_layer_type else next(iter(masks.values()), None)

    def _within_window(self, kind: str, visible: Tensor, positions: Tensor, slot_positions: Tensor) -> Tensor:
        if kind == FULL or self.window is None:
            return visible
        if visible.dtype == SPANS:
            return within_window(visible, self.window)
        return visible & (positions[:, :, None] - slot_positions[:, None, :] < self.window)

    def _to_mask(self, visible: Tensor) -> Tensor:
        mask = visible[:, None]  # [B, 1, Q, S], or [B, 1, Q, 4]
        if not self.additive or visible.dtype == SPANS:
            return mask
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(~mask, lowest)


def layer_kinds(config: Any) -> list[str]:
    """Return the kinds of attention among a model's layers, each once."""
    if (types := getattr(config, "layer_types", None)) is not None:
        return sorted(set(types))
    return [FULL if getattr(config, "sliding_window", None) is None else SLIDING]


# ---- spans; see `kernels.spans`


def make_spans(first: Tensor, end: Tensor, own_first: Tensor | None = None, own_end: Tensor | None = None) -> Tensor:
    """Return spans [B, Q, 4] of queries that see `first` to `end` (exclusive), and `own_first` to `own_end` if given.

    Args:
        first: [B, 1] or [B, Q].
        end: [B, Q].
        own_first: [B, Q], or None where queries have no slots of their own.
        own_end: as `own_first`.

    Example:
        >>> columns = torch.tensor([[5, 6]])  # two tokens of a text whose first two slots are padding
        >>> make_spans(torch.tensor([[2]]), columns + 1).tolist()
        [[[2, 6, 0, 0], [2, 7, 0, 0]]]
    """
    none = torch.zeros_like(end)
    own_first, own_end = none if own_first is None else own_first, none if own_end is None else own_end
    return torch.stack([first.expand_as(end), end, own_first, own_end], dim=-1).to(SPANS)


def leading_padding(attention: Tensor) -> Tensor:
    """Return [B, 1] how many slots are hidden before the first visible one, given attention [B, S] of bool.

    Example:
        >>> leading_padding(torch.tensor([[False, True, False, True], [True, True, True, True]])).tolist()
        [[1], [0]]
    """
    return (attention.cumsum(1) == 0).sum(1, keepdim=True)


def spans_to_mask(spans: Tensor, width: int, seen: Tensor | None = None) -> Tensor:
    """Return the mask [B, Q, width] of these spans.

    Args:
        spans: [B, Q, 4].
        width: how many slots.
        seen: [B, width or more] bool: slots that are not hidden from all queries.

    Example:
        >>> spans = torch.tensor([[[1, 3, 4, 5]]], dtype=torch.int32)
        >>> spans_to_mask(spans, 6).int().tolist()
        [[[0, 1, 1, 0, 1, 0]]]
    """
    slots = torch.arange(width, device=spans.device, dtype=SPANS)
    first, end, own_first, own_end = (each[..., None] for each in spans.unbind(-1))
    visible = ((slots >= first) & (slots < end)) | ((slots >= own_first) & (slots < own_end))
    return visible if seen is None else visible & seen[:, None, :width]


def within_window(spans: Tensor, window: int) -> Tensor:
    """Return what is left of spans [B, Q, 4] in a layer that sees the last `window` positions only.

    A query comes after the text before it and after its own slots, itself included. So its place in the text is
    `end + own_end - own_first - 1`. A branch is shorter than any window.

    Example:
        >>> within_window(torch.tensor([[[0, 10, 0, 0], [0, 10, 20, 22]]], dtype=torch.int32), 4).tolist()
        [[[6, 10, 0, 0], [8, 10, 20, 22]]]
    """
    first, end, own_first, own_end = spans.unbind(-1)
    earliest = end + own_end - own_first - window
    return torch.stack([torch.maximum(first, earliest), end, own_first, own_end], dim=-1)
