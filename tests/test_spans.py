"""Spans say the same as masks, and one captured stage serves every length."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from hf_specbranch.decoding.assembly import has_holes
from hf_specbranch.kernels.attention import attend
from hf_specbranch.kernels.attention_reference import attend_reference
from hf_specbranch.kernels.blocks import block_size
from hf_specbranch.kernels.spans import SPANS
from hf_specbranch.model_state import state_of
from hf_specbranch.runtime.eager import leading_padding, make_spans, spans_to_mask, within_window

from .graphs import Comparison, tokens
from .kernels import DEVICE, assert_close, dtypes, on_kernels, randn, seeds
from .models import EOS, PAD, VOCABULARY, llama, noisy_copy, pairs, slowly

SLOTS = 40
# Of a query: first, end, own_first, own_end. Some are empty, in either of two ways.
QUERY = st.tuples(*[st.integers(0, SLOTS)] * 4)


def sees(span, slot):
    first, end, own_first, own_end = span
    return first <= slot < end or own_first <= slot < own_end


def mask_by_rule(spans):
    return torch.tensor([[[sees(span, slot) for slot in range(SLOTS)] for span in row] for row in spans.tolist()])


@given(st.lists(QUERY, min_size=1, max_size=4), st.integers(0, 99))
def test_spans_stand_for_a_mask(queries, seed):
    spans = torch.tensor([queries, queries[::-1]], dtype=SPANS)
    mask = mask_by_rule(spans)
    assert torch.equal(spans_to_mask(spans, SLOTS), mask)
    torch.manual_seed(seed)
    seen = torch.rand(2, SLOTS + 3) < 0.7
    assert torch.equal(spans_to_mask(spans, SLOTS - 5, seen), (mask & seen[:, None, :SLOTS])[..., : SLOTS - 5])


@given(st.lists(QUERY, min_size=1, max_size=3))
def test_make_spans(queries):
    first, end, own_first, own_end = torch.tensor([queries]).unbind(-1)
    spans = make_spans(first, end, own_first, own_end)
    assert spans.dtype == SPANS and spans.tolist() == [[list(query) for query in queries]]
    alone = make_spans(first[:, :1], end)
    assert torch.equal(spans_to_mask(alone, SLOTS), spans_to_mask(make_spans(first[:, :1], end, end, end), SLOTS))


@given(st.integers(0, 10), st.integers(1, 20), st.integers(0, 5), st.integers(0, 8), st.integers(6, 30))
def test_window_hides_what_is_too_far_away(padding, length, branch, gap, window):
    """Distances count tokens of the text and of the query's own branch, wherever that branch is stored."""
    end = padding + length
    own = end + gap
    span = (padding, end, own, own + branch)
    spans = torch.tensor([[span]], dtype=SPANS)
    place = end + branch - 1  # of the query, were its branch part of the text
    expected = [
        sees(span, slot) and place - (slot if slot < end else end + slot - own) < window for slot in range(SLOTS + 8)
    ]
    assert spans_to_mask(within_window(spans, window), SLOTS + 8)[0, 0].tolist() == expected


ROWS = st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=3)


@given(ROWS)
def test_holes_are_what_spans_cannot_say(rows):
    attention = torch.tensor(rows)
    assert has_holes(attention) == any(row != sorted(row) for row in rows)
    if not has_holes(attention):
        spans = make_spans(leading_padding(attention), torch.full((len(rows), 1), 5))
        assert torch.equal(spans_to_mask(spans, 5)[:, 0], attention)


def random_spans(rows, queries, slots, seed):
    """Some queries see text and a branch, some only one of them, and one nothing."""
    generator = torch.Generator().manual_seed(seed)
    spans = torch.randint(0, slots + 1, (rows, 1, queries, 4), generator=generator, dtype=SPANS)
    spans[..., :2] = spans[..., :2].sort(-1).values
    spans[..., 3] = (spans[..., 2] + 3).clamp(max=slots)
    spans[:, :, ::3, 2:] = 0
    spans[0, :, queries // 2] = torch.tensor([9, 2, 5, 5])
    return spans


@given(seeds, st.integers(1, 9), st.integers(1, 60), st.sampled_from([None, 5.0]), st.booleans())
def test_reference_takes_spans(seed, queries, slots, softcap, with_sinks):
    torch.manual_seed(seed)
    query, key, value = torch.randn(2, 4, queries, 8), torch.randn(2, 2, slots, 8), torch.randn(2, 2, slots, 8)
    spans = random_spans(2, queries, slots, seed)
    mask = spans_to_mask(spans[:, 0], slots)[:, None]
    more = (0.3, softcap, torch.randn(4) if with_sinks else None)
    got, expected = (attend_reference(query, key, value, each, *more) for each in (spans, mask))
    assert torch.equal(got, expected)


@on_kernels
@given(dtypes, seeds, st.integers(1, 3), st.sampled_from([(2, 2), (4, 2), (6, 1)]), st.integers(1, 64),
       st.integers(1, 900), st.sampled_from([64, 80, 256]), st.sampled_from([None, 5.0]), st.booleans())  # fmt: skip
def test_kernel_takes_spans(dtype, seed, rows, heads, queries, slots, size, softcap, with_sinks):
    """Keys after the last block that anybody sees are never read: there may be no memory."""
    queries, slots, size = (1 + queries % 12, 1 + slots % 150, 64) if DEVICE == "cpu" else (queries, slots, size)
    torch.manual_seed(seed)
    query = randn(rows, heads[0], queries, size, dtype=dtype)
    spans = random_spans(rows, queries, slots, seed).to(DEVICE)
    mask = spans_to_mask(spans[:, 0], slots)[:, None]
    sinks = randn(heads[0], dtype=dtype) if with_sinks else None
    key, value = (randn(rows, heads[1], slots, size, dtype=dtype) for _ in range(2))
    expected = attend_reference(query, key, value, mask, size**-0.5, softcap, sinks)
    block = block_size(query)
    read = -(-slots // block) * block
    longer = []
    for states in (key, value):
        spoilt = states.new_full((rows, heads[1], read + 2 * block, size), torch.nan)
        spoilt[:, :, :slots], spoilt[:, :, slots:read] = states, 0
        longer.append(spoilt)
    assert_close(attend(query, *longer, spans, size**-0.5, softcap, sinks), expected)


# ---- whole texts, on the runners of a GPU


def pair(model, **more):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return Comparison(model.eval(), noisy_copy(model, 0.1, 1), policy="vanilla", gamma=3, new_tokens=16, **more)


SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=1024, eos_token_id=EOS, pad_token_id=PAD, head_dim=8,
)  # fmt: skip
WINDOWED = {
    "mistral": lambda window: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window)),
    "gemma2": lambda window: Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=window)),
}


def takes_spans(compare):
    return [runner.takes_spans for model in (compare.model, compare.draft) for runner in state_of(model).idle_runners]


@pytest.mark.parametrize(("family", "window"), pairs(WINDOWED, [256, 255]))
def test_text_beyond_a_sliding_window(family, window, graph_runners):
    """A window that may be shorter than a branch is left to masks."""
    torch.manual_seed(0)
    compare = pair(WINDOWED[family](window), tree_leaves=3)
    for length in (300, 20, 250):
        compare(tokens(length, seed=length))
        assert takes_spans(compare) == [window == 256] * 2


@pytest.fixture
def compare(graph_runners):
    target = llama(seed=0, max_position_embeddings=1024)
    return Comparison(target, noisy_copy(target, 0.25, 1), new_tokens=10, policy="vanilla", gamma=3)


def masks(ids):
    """Padding on the left, on the right, in the middle, and none."""
    left, right, middle = (torch.ones_like(ids) for _ in range(3))
    for row in range(ids.shape[0]):
        left[row, :row], right[row, ids.shape[1] - 3 * row - 1 :], middle[row, 4 : 6 + row] = 0, 0, 0
    return {"left": left, "right": right, "middle": middle, "none": torch.ones_like(ids)}


@pytest.mark.parametrize("rows", [slowly(1), 3])
def test_padding_that_spans_cannot_say(rows, compare):
    """The call runs under masks. The next one takes spans again, and both keep their stages."""
    ids = tokens(20, rows=rows)
    captured = {}
    for _ in range(2):
        for name, mask in masks(ids).items():
            compare(ids, attention_mask=mask)
            by_spans = takes_spans(compare)
            assert by_spans == [name in ("left", "none")] * 2, name
            captured[name] = compare.stats.graphs_captured
    assert not any(captured.values())


@pytest.mark.parametrize(("kernels", "again"), [(True, False), (False, True)])
def test_stages_serve_every_length(kernels, again, compare):
    """With masks there is one stage for each of few sizes; with spans one for all."""
    compare.settings |= {"kernels": kernels}
    compare(tokens(600))
    for length in (10, 30, 270, 599):
        compare(tokens(length))
        assert (compare.stats.graphs_captured > 0) == (again and length in (10, 270)), length


def test_stages_serve_every_cached_length(compare):
    """The second turn of a chat begins after what was cached, which is another length each time."""
    compare(tokens(600))
    compare(tokens(30), cached=20)
    for length, cached in ((300, 40), (40, 31), (500, 300)):
        compare(tokens(length), cached=cached)
        assert compare.stats.graphs_captured == 0
