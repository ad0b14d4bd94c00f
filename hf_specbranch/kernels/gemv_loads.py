"""Loads of a GEMV beside W, and its stores, by the threads that use or have the elements.

`tl.load` loads in an order of its own, and then exchanges the elements between threads: in shared memory, with several
barriers. Assembly loads in the layout of what it is used with, so on CUDA x, the weights of a norm, the scales of
groups and residuals are loaded in that way, and results are stored in that way. The compiler may move such a load like
arithmetic: the address of what is not constant must include `zero_after_wait`.
"""

from __future__ import annotations

from .backend import Value, constexpr, jit, tl


@jit
def load_states(pointer: Value, word: Value, rest: Value, EVEN: constexpr, BITS: constexpr, PLAIN: constexpr) -> Value:
    """Load the elements of a row that are multiplied with the words of W at `word` [1, WORDS], for `wide_states`.

    Args:
        pointer: to the first element of the row.
        word: place of each word.
        rest: words left in the row. What lies beyond is zero, or anything where a whole step is (EVEN).
        EVEN: see `rest`.
        BITS: of an element of W.
        PLAIN: load in plain code.

    Returns:
        A tuple of [1, WORDS]: an element each, or the 32-bit words that hold them.
    """
    PLACES: tl.constexpr = 32 // BITS
    if EVEN:
        inside = (word >= 0) & (rest > 0)
    else:
        inside = word < rest
    first = pointer + word * PLACES
    if PLAIN:
        parts: Value = ()
        for place in tl.static_range(PLACES):
            parts += (tl.load(first + place, mask=inside, other=0.0),)
        return parts
    else:
        REGISTERS: tl.constexpr = PLACES * pointer.dtype.element_ty.primitive_bitwidth // 32
        address, given = first.to(tl.int64), inside.to(tl.int32)
        if REGISTERS == 2:
            return _load_two(address, given)
        elif REGISTERS == 4:
            return _load_four(address, given)
        else:
            return _load_four(address, given) + _load_four(address + 16, given)


@jit
def all_loaded(parts: Value, zero: Value, THREADS: constexpr) -> Value:
    """Return zeros [1, WORDS] that a thread has only when all its `parts` are loaded.

    The assembler would otherwise make each load just before its first use, at the latency of the memory each time.

    Args:
        parts: of `load_states`.
        zero: 0, which the compiler must not know.
        THREADS: of a program.
    """
    WORDS: tl.constexpr = parts[0].shape[1]
    mixed = parts[0]
    for part in tl.static_range(1, len(parts)):
        mixed |= parts[part]
    own = tl.reshape(mixed, (WORDS // (4 * THREADS), THREADS, 4))  # a thread has all with the same middle index
    own = tl.reduce(tl.reduce(own, 2, _either), 0, _either) & zero
    return tl.reshape(tl.broadcast_to(own[None, :, None], (WORDS // (4 * THREADS), THREADS, 4)), (1, WORDS))


@jit
def _either(one: Value, other: Value) -> Value:
    return one | other


@jit
def wide_states(parts: Value, loaded: Value, pointer: Value, BITS: constexpr, PLAIN: constexpr) -> Value:
    """Return what `load_states` has loaded by its place in a word: four or eight of [1, WORDS] in float32.

    `loaded` are zeros, which may come from `all_loaded`.
    """
    KIND: tl.constexpr = pointer.dtype.element_ty
    wide: Value = ()
    for place in tl.static_range(32 // BITS):
        if PLAIN:
            wide += (parts[place].to(tl.float32),)
        elif KIND == tl.float32:
            wide += (number(parts[place] | loaded),)
        elif KIND == tl.bfloat16:
            if place % 2 == 0:
                wide += (number(parts[place // 2] << 16 | loaded),)
            else:
                wide += (number(parts[place // 2] & -65536 | loaded),)
        else:
            wide += (
                (parts[place // 2] >> (place % 2 * 16) | loaded)
                .to(tl.int16)
                .to(tl.float16, bitcast=True)
                .to(tl.float32),
            )
    return wide


@jit
def load_one(pointers: Value, given: Value, PLAIN: constexpr) -> Value:
    """Load single elements by the threads that use them, or zeros."""
    KIND: tl.constexpr = pointers.dtype.element_ty
    if PLAIN:
        return tl.load(pointers, mask=given, other=0)
    elif KIND.primitive_bitwidth == 32:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p ld.global.b32 $0, [$1]; }", "=&r,l,r",
            (pointers.to(tl.int64), given.to(tl.int32)), tl.int32, is_pure=True, pack=1,
        ).to(KIND, bitcast=True)  # fmt: skip
    elif KIND.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b16 $0, 0; @p ld.global.b16 $0, [$1]; }", "=&h,l,r",
            (pointers.to(tl.int64), given.to(tl.int32)), tl.int16, is_pure=True, pack=1,
        ).to(KIND, bitcast=True)  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b16 $0, 0; @p ld.global.u8 $0, [$1]; }", "=&h,l,r",
            (pointers.to(tl.int64), given.to(tl.int32)), tl.int16, is_pure=True, pack=1,
        )  # fmt: skip


@jit
def store_one(pointers: Value, values: Value, given: Value, PLAIN: constexpr) -> None:
    """Store single elements by the threads that have them; several may store the same."""
    KIND: tl.constexpr = pointers.dtype.element_ty
    if PLAIN:
        tl.store(pointers, values, mask=given)
    elif KIND.primitive_bitwidth == 32:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }", "=r,l,r,r",
            (pointers.to(tl.int64), values.to(tl.int32, bitcast=True), given.to(tl.int32)), tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b16 [$1], $2; mov.b32 $0, 0; }", "=r,l,h,r",
            (pointers.to(tl.int64), values.to(tl.int16, bitcast=True), given.to(tl.int32)), tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip


@jit
def _load_two(address: Value, given: Value) -> Value:
    """Load two 32-bit words for each of four consecutive addresses, or zeros where the first of `given` is 0.

    A thread has W in four consecutive words, so it has four such addresses too.
    """
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $12, 0;"
        " mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        " mov.b32 $4, 0; mov.b32 $5, 0; mov.b32 $6, 0; mov.b32 $7, 0;"
        " @p ld.global.v4.b32 {$0, $4, $1, $5}, [$8]; @p ld.global.v4.b32 {$2, $6, $3, $7}, [$8+16]; }",
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l,l,l,l,r,r,r,r", (address, given), (tl.int32, tl.int32), is_pure=True, pack=4,
    )  # fmt: skip


@jit
def _load_four(address: Value, given: Value) -> Value:
    """Load four 32-bit words from each address, or zeros where `given` is 0."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0;"
        " @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
        "=&r,=&r,=&r,=&r,l,r", (address, given), (tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip


@jit
def sum_of_loads(values: Value, words: Value, LOADS: constexpr, PLAIN: constexpr) -> Value:
    """Add up `values` [1, WORDS] over the words of each load, and repeat the sums for each row of `words`: [STRIP, L].

    Each thread adds up those for its own words.
    """
    if PLAIN:
        values = tl.broadcast_to(values, words.shape)
    else:
        values = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f,r", (values, words), tl.float32, True, 1)
    return sum_of_own_loads(values, LOADS)


@jit
def sum_of_own_loads(values: Value, LOADS: constexpr) -> Value:
    return tl.sum(tl.reshape(values, (values.shape[0], LOADS, values.shape[1] // LOADS)), 2)


@jit
def number(bits: Value) -> Value:
    """Return the float32 with these bits."""
    return bits.to(tl.float32, bitcast=True)
