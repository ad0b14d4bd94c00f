"""Right operands of `tiles.py` from the splits of attention over one token, combined as they are loaded.

Each thread combines the elements that it multiplies: that takes no launch, and nothing is exchanged. But every program
loads all splits in use. `combine.py` has a kernel for others, and the reference.
"""

from __future__ import annotations

from .backend import Value, constexpr, jit, tl
from .gemv_loads import number
from .tile_fragments import narrow
from .tile_loads import column_of_right, load_here, load_words

ELEMENTS = 4  # of one head, that a thread loads at once
LOADS = 16  # of so many elements by a thread at a time


@jit
def combine_right(
    results: Value,
    sums: Value,
    used: Value,
    splits: Value,
    warp: Value,
    g: Value,
    q: Value,
    HEADS: constexpr,
    SIZE: constexpr,
    FLOAT16: constexpr,
    BITS: constexpr,
    WARPS: constexpr,
    SPANS: constexpr,
    LOADS: constexpr,
    PLAIN: constexpr,
    NARROW: constexpr = False,
) -> Value:
    """Return what `load_right` returns for one row of x, all spans of it, from its splits.

    Args:
        results: the splits, as words.
        sums: of the splits.
        used: how many of them are in use.
        splits: how many there are.
        HEADS: of the attention; with SIZE, that of a head, it makes a constant of the distance between two splits.
        LOADS: of a thread at a time.
    """
    AT_A_TIME: tl.constexpr = LOADS // SPANS if SPANS < LOADS else 1
    none, zero = g.to(tl.float32) * 0.0, splits >> 24  # 0, which the compiler does not know
    total: Value = ()
    for _i in tl.static_range(SPANS):
        total += ((none - float("inf"), none, none, none, none, none),)
    for begin in range(0, used, AT_A_TIME):
        tops: Value = ()
        parts: Value = ()
        loaded = g * 0
        for i in tl.static_range(SPANS):
            column = column_of_right(i, warp, g, q, BITS, WARPS, NARROW)
            limit = tl.where(column < HEADS * SIZE, used, 0) - begin
            of_tops: Value = ()
            of_parts: Value = ()
            for split in tl.static_range(AT_A_TIME):
                top = load_here(sums + column // SIZE * splits + begin + split, split < limit, PLAIN)
                of_tops += (tl.where(split < limit, top, float("-inf")),)
                place = results + begin * (HEADS * SIZE) + column + split * (HEADS * SIZE)
                words = load_words(place, split < limit, False, PLAIN)
                loaded |= words[0]
                of_parts += (words,)
            tops += (of_tops,)
            parts += (of_parts,)
        new_total: Value = ()
        for i in tl.static_range(SPANS):
            new_total += (_combined(total[i], tops[i], parts[i], loaded & zero),)
        total = new_total
    right: Value = ()
    for i in tl.static_range(SPANS):
        factor = 1.0 / tl.where(total[i][1] == 0.0, 1.0, total[i][1])
        low = narrow(total[i][2] * factor, total[i][3] * factor, not FLOAT16, PLAIN)
        right += ((low, narrow(total[i][4] * factor, total[i][5] * factor, not FLOAT16, PLAIN)),)
    return right


@jit
def _combined(total: Value, tops: Value, parts: Value, loaded: Value) -> Value:
    """Add splits to a total: the highest logarithm of a sum, the sum of shares under it, and four elements.

    `loaded` is 0, which is known when all is loaded, and the shares wait for it: the compiler would otherwise make each
    load just before its use, at the latency of the memory each time.
    """
    highest = total[0]
    for i in tl.static_range(len(tops)):
        highest = tl.maximum(highest, tops[i])
    base = tl.where(highest == float("-inf"), 0.0, highest)
    rescale = tl.exp2(total[0] - base)
    whole, one, two = total[1] * rescale, total[2] * rescale, total[3] * rescale
    three, four = total[4] * rescale, total[5] * rescale
    for i in tl.static_range(len(tops)):
        share = number(tl.exp2(tops[i] - base).to(tl.int32, bitcast=True) | loaded)
        whole += share
        one, two = one + share * number(parts[i][0]), two + share * number(parts[i][1])
        three, four = three + share * number(parts[i][2]), four + share * number(parts[i][3])
    return highest, whole, one, two, three, four
