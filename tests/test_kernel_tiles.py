"""Products of few rows by tiles in registers: kernels equal references."""

import pytest
import torch

from hf_specbranch.kernels import attention, tiles
from hf_specbranch.kernels import tile_plans as tile_plans_module
from hf_specbranch.kernels.attention import attend_in_splits
from hf_specbranch.kernels.attention_reference import attend_reference
from hf_specbranch.kernels.backend import AT_END, EARLY, LATE
from hf_specbranch.kernels.combine import MOST_FOR_PRODUCT, Reader, SplitHeads, combine_reference, combined
from hf_specbranch.kernels.few_rows import combines, few_rows, few_rows_plans
from hf_specbranch.kernels.gated import gated_reference
from hf_specbranch.kernels.gemv import GEMV_PLANS
from hf_specbranch.kernels.gemv_rotary import Turn, rotary_fits, rotary_gemv
from hf_specbranch.kernels.linear import PLANS, Plan
from hf_specbranch.kernels.norm import GEMMA, PLAIN, Norm, norm_reference
from hf_specbranch.kernels.packed import Packed, dense
from hf_specbranch.kernels.quantised import quantised_reference
from hf_specbranch.kernels.rotary import Slots, rotary
from hf_specbranch.kernels.spans import SPANS
from hf_specbranch.kernels.tile_plans import (
    MOST_ROWS,
    WIDEST,
    fits,
    kernel_takes,
    tile_plans,
)
from hf_specbranch.kernels.tiles import tile_product
from hf_specbranch.layers.product import FewRows, Tuned
from hf_specbranch.layers.products import PlainProduct
from hf_specbranch.layers.quantised import Operands, candidate_plans

from .kernels import DEVICE, assert_close, randn, where_triton_runs
from .quantised import random_packed

KINDS = ("dense", "float8", "symmetric", "asymmetric", "shift")
ONE, TAKEN_IN_TURN, STEPS = Plan(1, 0, 16, 2, 2), Plan(1, 1, 16, 1, 3), Plan(1, 0, 16, 2, 1)
NARROW, NARROW_IN_TURN, NARROW_STEPS = Plan(1, 0, 8, 2, 2), Plan(1, 1, 8, 1, 4), Plan(1, 0, 8, 1, 2)
WHOLE = 384  # elements of a row, with one scale


@where_triton_runs
@pytest.mark.parametrize(
    ("kind", "group", "rows", "plan"),
    [
        ("dense", WHOLE, 1, ONE),
        ("dense", WHOLE, 5, TAKEN_IN_TURN),
        ("dense", WHOLE, 3, STEPS),
        ("float8", 128, 1, ONE),
        ("float8", 128, 3, TAKEN_IN_TURN),
        ("symmetric", WHOLE, 1, STEPS),
        ("symmetric", 128, 8, ONE),
        ("asymmetric", 128, 2, TAKEN_IN_TURN),
        ("asymmetric", WHOLE, 1, ONE),
        ("shift", 128, 4, STEPS),
        ("shift", WHOLE, 1, TAKEN_IN_TURN),
        ("dense", WHOLE, 1, NARROW),
        ("dense", WHOLE, 1, NARROW_IN_TURN),
        ("float8", 128, 1, NARROW_STEPS),
        ("float8", WHOLE, 1, NARROW),
    ],
)
def test_kernel_tile_product(kind, group, rows, plan):
    """The last tile is not full, and warps have different numbers of spans."""
    torch.manual_seed(0)
    packed, _ = random_packed(kind, 72, 384, group, torch.float16, DEVICE)
    x, bias, residual = (randn(*shape, dtype=torch.float16) for shape in ((rows, 384), (72,), (rows, 72)))
    assert fits(x, packed, bias, plan)
    expected = residual + quantised_reference(x, packed, bias)
    assert_close(tile_product(x, packed, bias, plan, residual=residual), expected)


@where_triton_runs
@pytest.mark.parametrize(
    ("kind", "rows", "form", "plan", "activation"),
    [
        ("dense", 1, PLAIN, ONE, None),
        ("dense", 3, GEMMA, STEPS, "silu"),
        ("float8", 1, PLAIN, ONE, "silu"),
        ("float8", 4, GEMMA, STEPS, None),
        ("symmetric", 2, PLAIN, TAKEN_IN_TURN, "gelu_tanh"),
        ("symmetric", 8, PLAIN, STEPS, "silu"),
        ("asymmetric", 1, GEMMA, ONE, None),
        ("dense", 1, GEMMA, NARROW_STEPS, None),
        ("dense", 1, PLAIN, NARROW, "silu"),
    ],
)
def test_kernel_tile_product_normalises(kind, rows, form, plan, activation):
    """Rows differ by orders of magnitude, as residuals do; each has a factor of its own."""
    torch.manual_seed(0)
    packed, _ = random_packed(kind, 48, 384, 128, torch.float16, DEVICE)
    x = (randn(rows, 384) * 3.0 ** torch.arange(-2, rows - 2, device=DEVICE)[:, None]).half()
    norm = Norm(randn(384, dtype=torch.float16), 1e-6, form)
    wide = Norm(norm.weight.float(), 1e-6, form)
    expected = quantised_reference(norm_reference(x.float(), wide), packed, None)
    if activation is not None:
        expected = gated_reference(expected, activation)
    assert_close(tile_product(x, packed, None, plan, activation, norm), expected.half())


@where_triton_runs
@pytest.mark.parametrize("form", [PLAIN, GEMMA])
def test_tiles_take_a_norm_with_weights_in_float32(form):
    """Some models keep them so. A norm that does not round at its end then returns float32."""
    torch.manual_seed(0)
    packed, _ = random_packed("symmetric", 24, 256, 128, torch.float16, DEVICE)
    x, norm = randn(3, 256, dtype=torch.float16), Norm(randn(256), 1e-6, form)
    expected = quantised_reference(norm_reference(x, norm).half(), packed, None)
    assert_close(tile_product(x, packed, None, ONE, norm=norm), expected)


@where_triton_runs
@pytest.mark.parametrize(
    ("kind", "batch", "tokens", "plan"),
    [("symmetric", 1, 1, ONE), ("symmetric", 2, 2, STEPS), ("symmetric", 1, 3, ONE), ("dense", 2, 2, ONE)],
)
def test_kernel_tiles_rotate_and_write_to_the_cache(kind, batch, tokens, plan):
    torch.manual_seed(0)
    size, heads, shared = 24, 3, 2  # a tile may hold dimensions of two heads
    packed, _ = random_packed(kind, size * (heads + 2 * shared), 256, 128, torch.float16, DEVICE)
    x, norm = randn(batch, tokens, 256, dtype=torch.float16), Norm(randn(256, dtype=torch.float16), 1e-6)
    bias = randn(size * (heads + 2 * shared), dtype=torch.float16)
    angles = torch.rand(1, tokens, size // 2, device=DEVICE).repeat(1, 1, 2) * 6
    places = torch.tensor([[7, 2, 5], [0, 9, 4]], device=DEVICE)[:batch, :tokens]
    caches = [
        Slots(*torch.zeros(2, batch, shared, 10, size, device=DEVICE, dtype=torch.float16), places) for _ in range(2)
    ]
    turn = Turn(angles.cos(), angles.sin(), caches[0], size)
    assert fits(x, packed, bias, plan) and rotary_fits(x, turn)
    got, pending = rotary_gemv(x, packed, bias, plan, norm, turn)
    assert pending is None
    product = quantised_reference(norm_reference(x, norm).flatten(0, 1), packed, bias)
    parts = product.view(batch, tokens, -1, size).transpose(1, 2).split([heads, shared, shared], 1)
    expected, _ = rotary(*parts, turn.cos, turn.sin, slots=caches[1], dtype=torch.float16)
    for ours, reference in ((got, expected), *zip(caches[0][:2], caches[1][:2])):
        assert_close(ours, reference)


@where_triton_runs
def test_tiles_refuse_what_they_cannot_compute(monkeypatch):
    packed, _ = random_packed("symmetric", 16, 256, 128, torch.float16, DEVICE)
    x = randn(1, 256, dtype=torch.float16)
    assert fits(x, packed, None, ONE) and kernel_takes(packed)
    assert not fits(x.float(), packed, None, ONE)  # tensor cores take half precision
    assert not fits(randn(MOST_ROWS + 1, 256, dtype=torch.float16), packed, None, ONE)
    assert not any(fits(x, packed, None, plan) for plan in (*PLANS, *GEMV_PLANS))
    assert not fits(randn(1, 257, dtype=torch.float16)[:, 1:], packed, None, ONE)
    assert not fits(randn(1, 258, dtype=torch.float16)[:, 2:], packed, None, ONE)  # loads of eight elements
    assert not kernel_takes(packed._replace(data=packed.data.T.contiguous().T))
    for kind, depth, group in (("int8", 256, 128), ("symmetric", 256, 32), ("mxfp4", 256, 128), ("float8", 192, 192)):
        assert not kernel_takes(random_packed(kind, 16, depth, group, torch.float16, DEVICE)[0]), kind
    monkeypatch.setattr("hf_specbranch.kernels.tile_plans.multiplies_tiles", lambda device: False)  # ROCm, old GPUs
    assert not fits(x, packed, None, ONE) and not tile_plans(x, packed)


@where_triton_runs
def test_plans_of_few_rows():
    """One row may be multiplied by either kernel, more by tiles; registers suffice for every plan."""
    packed, _ = random_packed("float8", 16, 896, 128, torch.float16, DEVICE)
    one, two = (randn(rows, 896, dtype=torch.float16) for rows in (1, 2))
    assert set(tile_plans(one, packed)) < set(few_rows_plans(one, packed, None))
    assert set(few_rows_plans(two, packed, None)) == set(tile_plans(two, packed))
    assert {plan.warps for plan in tile_plans(one, packed)} == {1, 2, 4}
    assert set(few_rows_plans(one, packed, None)) < set(candidate_plans(one, [Operands([packed], [None])], "whole"))
    for rows in (1, 2):  # wide layers: tiles alone with 4 bits, and none with others
        x, (wide, narrow) = randn(rows, WIDEST + 128, dtype=torch.float16), (WIDEST + 128, 16)
        four_bits, eight_bits = (
            random_packed(kind, wide, wide, 128, torch.float16, DEVICE)[0] for kind in ("symmetric", "float8")
        )
        assert not tile_plans(x, eight_bits) and set(few_rows_plans(x, eight_bits, None)) <= set(GEMV_PLANS)
        assert few_rows_plans(x, four_bits, None) == tile_plans(x, four_bits) != []
        assert tile_plans(x, random_packed("float8", narrow, wide, 128, torch.float16, DEVICE)[0])
    long, _ = random_packed("float8", 16, 28672, 128, torch.float16, DEVICE)
    for rows in (1, 2, 4, 8):
        plans = tile_plans(randn(rows, 28672, dtype=torch.float16), long)
        usual, narrow = ([plan for plan in plans if plan.strip == strip] for strip in (16, 8))
        assert usual and all(16 * plan.spans <= 64 and 4 * rows * plan.spans <= 64 for plan in usual)
        whole = [tile_plans_module.needed(28672, plan.warps) <= plan.spans for plan in narrow]
        assert all(8 * plan.spans <= (112 if at_once else 64) for plan, at_once in zip(narrow, whole))
    x = randn(1, 896, dtype=torch.float16)
    for plan in (tile_plans(x, packed)[0], GEMV_PLANS[0]):
        assert_close(few_rows(x, packed, None, plan), quantised_reference(x, packed, None))


@where_triton_runs
def test_narrow_tiles_are_for_products_with_few_programs(monkeypatch):
    """With eight rows of W each. They take one row of x, whole pairs of spans, and elements of 8 or 16 bits."""
    packed, _ = random_packed("float8", 64, 896, 128, torch.float16, DEVICE)
    x = randn(1, 896, dtype=torch.float16)
    monkeypatch.setattr(tile_plans_module, "multiprocessors", lambda device: 4)
    assert {plan.strip for plan in tile_plans(x, packed)} == {16}
    monkeypatch.setattr(tile_plans_module, "multiprocessors", lambda device: 5)
    assert {plan.strip for plan in tile_plans(x, packed)} == {8, 16}
    by_kind = {kind: candidate_plans(x, [Operands([packed], [None])], kind) for kind in ("whole", "normed", "gated")}
    strips = {kind: {plan.strip for plan in plans if plan.spans > 0} for kind, plans in by_kind.items()}
    assert strips == {"whole": {8, 16}, "normed": {16}, "gated": {16}}  # the others need pairs of rows
    assert fits(x, packed, None, NARROW) and not fits(x, packed, None, NARROW._replace(spans=3))
    assert not fits(randn(2, 896, dtype=torch.float16), packed, None, NARROW)
    assert not fits(x, random_packed("symmetric", 64, 896, 128, torch.float16, DEVICE)[0], None, NARROW)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
def test_error_of_tile_products(kind, gated, rows):
    """Against the exact product at most 1.1 times the error of bfloat16 weights and products, for all plans."""
    torch.manual_seed(0)
    for columns, depth in ((512, 896), (8192, 896), (1024, 4096)):
        packed, dense = random_packed(kind, columns, depth, 128, torch.bfloat16, "cuda")
        dense, norm = dense.cuda(), Norm(torch.rand(depth, device="cuda", dtype=torch.bfloat16) + 0.5, 1e-6)
        x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16) * 3
        if kind != "dense":  # such states are rounded once, and the largest one would decide the error
            x[:, 7] *= 1000  # as some states are
        width = columns // 2 if gated else columns
        residual = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
        wide = norm_reference(x.double(), Norm(norm.weight.double(), 1e-6)) @ dense.double().T
        usual = norm_reference(x, norm) @ dense.to(torch.bfloat16).T
        if gated:
            wide = torch.nn.functional.silu(wide[:, :width]) * wide[:, width:]
            usual = gated_reference(usual, "silu")
        for plan in tile_plans(x, packed)[rows % 3 :: 3]:
            got = tile_product(x, packed, None, plan, "silu" if gated else None, norm, None if gated else residual)
            errors = (got.double() - wide).norm() if gated else (got.double() - wide - residual.double()).norm()
            bound = (usual.double() - wide if gated else (residual + usual).double() - wide - residual.double()).norm()
            assert errors <= 1.1 * bound, (columns, depth, plan, errors, bound)


@where_triton_runs
@pytest.mark.parametrize("plan", [Plan(1, 0, 16, 2, 2), Plan(1, 1, 16, 1, 4)])
def test_tiles_read_every_float8_number(plan):
    """Each finite number is in a row of its own, and the result is exact."""
    numbers = torch.arange(256, dtype=torch.uint8)
    numbers[numbers & 0x7F == 0x7F] = 0  # not a number
    data = torch.zeros((256, 512), dtype=torch.uint8)
    data[torch.arange(256), torch.arange(256) * 37 % 512] = numbers
    packed = Packed(data.view(torch.float8_e4m3fn).to(DEVICE), torch.ones((256, 4), device=DEVICE), "float8", 128)
    got = tile_product(torch.ones((1, 512), device=DEVICE, dtype=torch.float16), packed, None, plan)
    assert torch.equal(got[0].cpu().float(), numbers.view(torch.float8_e4m3fn).float())


@where_triton_runs
@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4])
def test_tiles_take_states_of_any_size(scale):
    """x is brought into the range of float16; states of bfloat16 may be far outside it."""
    torch.manual_seed(0)
    packed, dense = random_packed("symmetric", 16, 256, 128, torch.float32, DEVICE)
    x = (randn(1, 256) * scale).to(torch.bfloat16)
    x[0, 3] = 0
    got = tile_product(x, packed, None, ONE)
    exact = x.double() @ dense.double().to(DEVICE).T
    assert (got.double() - exact).norm() <= 0.01 * exact.norm()


@where_triton_runs
@pytest.mark.parametrize(("heads", "shared", "size", "length", "plan"), [
    (4, 2, 64, 300, Plan(1, 0, 16, 2, 1)), (2, 1, 128, 1, Plan(1, 0, 16, 1, 2)), (4, 1, 96, 1300, Plan(1, 1, 16, 2, 2)),
    (2, 1, 64, 90, Plan(1, 0, 16, 4, 2)), (4, 2, 64, 300, Plan(1, 0, 8, 1, 2)), (4, 1, 96, 1300, Plan(1, 0, 8, 1, 4)),
])  # fmt: skip
@pytest.mark.parametrize("seen", ["text", "text and sinks", "nothing"])
def test_tiles_combine_the_splits_of_attention(monkeypatch, heads, shared, size, length, plan, seen):
    """They compute what they compute from combined heads. Splits that are not in use hold anything."""
    torch.manual_seed(0)
    monkeypatch.setattr("hf_specbranch.kernels.attention.multiprocessors", lambda device: 16)
    weight, _ = random_packed("dense", 72, heads * size, 128, torch.float16, DEVICE)
    query = randn(1, heads, 1, size, dtype=torch.float16)
    key, value = randn(2, 1, shared, length + 20, size, dtype=torch.float16)
    span = [0, 0, 0, 0] if seen == "nothing" else [length // 30, length, length + 5, length + 7]
    spans = torch.tensor([[[span]]], dtype=SPANS, device=DEVICE)
    sinks = randn(heads, dtype=torch.float16) if seen == "text and sinks" else None
    given = query, key, value, spans, size**-0.5, None, sinks
    in_splits = attend_in_splits(*given, reader=Reader(combines=True))
    assert isinstance(in_splits, SplitHeads) and combines(in_splits, weight, plan)
    expected_heads = attend_reference(*given).flatten(2)
    used = splits_used(spans, in_splits)
    assert_close(combine_reference(in_splits, torch.tensor([used], device=DEVICE)), expected_heads)
    in_splits.results[:, :, used:], in_splits.sums[..., used:] = torch.nan, torch.nan
    whole = combined(in_splits)
    assert_close(whole, expected_heads)
    bias, residual = randn(72, dtype=torch.float16), randn(1, 1, 72, dtype=torch.float16)
    got, expected = (few_rows(x, weight, bias, plan, residual=residual) for x in (in_splits, whole))
    assert_close(got, expected)


def splits_used(spans, heads):
    """Return how many splits are in use, as the kernels do."""
    first, end, own, own_end = spans.flatten().tolist()
    blocks = 0 if end == 0 else -(-max(end, own_end) // heads.block) - min(first, own) // heads.block
    return min(max(min(blocks, 64 // heads.least), -(-blocks // heads.least), 1), heads.sums.shape[3])


@where_triton_runs
def test_splits_that_a_product_leaves_to_the_kernel():
    """Of several tokens or tiny heads, of quantised weights, of more splits, and for plans that do not keep x."""
    plan = Plan(1, 0, 16, 2, 1)
    weight, _ = random_packed("dense", 24, 256, 128, torch.float16, DEVICE)
    float8, _ = random_packed("float8", 24, 256, 128, torch.float16, DEVICE)

    def heads(queries, splits, size=64):
        spans = torch.tensor([0, 64 * splits, 0, 0], dtype=SPANS, device=DEVICE).expand(1, 1, queries, 4)
        results, sums = randn(1, queries, splits, 256), randn(1, queries, 256 // size, splits)
        return SplitHeads(results, sums, spans, 64, 2, torch.float16)

    usual = heads(1, 3)
    assert combines(usual, weight, plan) and not combines(usual._replace(spans=None), weight, plan)
    left = [
        (heads(2, 3), weight, plan),
        (heads(1, 3, size=2), weight, plan),
        (usual, float8, plan),
        (heads(1, MOST_FOR_PRODUCT + 1), weight, plan),
        (usual, weight, Plan(1, 0, 16, 1, 1)),
        (usual, float8, GEMV_PLANS[0]),
    ]
    for x, packed, each in left:
        assert not combines(x, packed, each)
        residual = randn(*x.shape[:2], 24, dtype=torch.float16)
        got = few_rows(x, packed, None, each, residual=residual)
        assert_close(got, few_rows(x.combined(), packed, None, each, residual=residual))


@where_triton_runs
@pytest.mark.parametrize("kind", ["dense", "symmetric", "float8"])
def test_launch_options_of_a_plan_change_no_bit(kind):
    torch.manual_seed(0)
    weight, _ = random_packed(kind, 72, 384, 128, torch.float16, DEVICE)
    x, residual = randn(1, 384, dtype=torch.float16), randn(1, 72, dtype=torch.float16)
    for plan in (ONE, *(plan for plan in GEMV_PLANS[:1] if kind != "dense")):
        usual = few_rows(x, weight, None, plan, residual=residual)
        for options in ({"next": EARLY}, {"next": LATE}, {"next": AT_END}, {"registers": 128}):
            assert torch.equal(few_rows(x, weight, None, plan._replace(**options), residual=residual), usual)


@where_triton_runs
def test_products_are_launched_as_plans_say(monkeypatch):
    """Without a plan that says so, the kernel after a product of 4 bits waits unless attention left the L1 cache."""
    torch.manual_seed(0)
    launched, usual = [], tiles.dependent_launch
    monkeypatch.setattr(tiles, "dependent_launch", lambda *given: (launched.append(given[1]), usual(*given))[1])
    plan, (weight, _) = Plan(1, 0, 16, 1, 1), random_packed("symmetric", 72, 128, 128, torch.float16, DEVICE)
    x = randn(1, 128, dtype=torch.float16)
    for next in (0, EARLY, LATE, AT_END):
        few_rows(x, weight, None, plan._replace(next=next))
    assert launched == [EARLY, EARLY, LATE, AT_END]
    launched.clear()
    monkeypatch.setattr(tile_plans_module, "WIDEST", 64)
    spans = torch.tensor([[[[0, 90, 0, 0]]]], dtype=SPANS, device=DEVICE)
    query, key = randn(1, 2, 1, 64, dtype=torch.float16), randn(1, 2, 100, 64, dtype=torch.float16)
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 16)
    heads = attend_in_splits(query, key, key, spans, 0.125, reader=Reader(needs_l1=True))
    assert isinstance(heads, SplitHeads) and not heads.leaves_l1
    for leaves_l1 in (False, True):
        few_rows(heads._replace(leaves_l1=leaves_l1), weight, None, plan)
        few_rows(heads._replace(leaves_l1=leaves_l1), weight, None, plan._replace(next=LATE))
    few_rows(combined(heads), weight, None, plan)
    assert launched == [AT_END, LATE, EARLY, LATE, EARLY]


@where_triton_runs
@pytest.mark.parametrize(("size", "stages"), [(64, 3), (96, 2), (128, 2), (256, 3)])
def test_attention_leaves_l1_and_few_splits_to_a_product_that_reads_it(monkeypatch, size, stages):
    """With three stages it would take over 48 KiB of shared memory. Small heads take less, large ones need them."""
    torch.manual_seed(0)
    taken, built, kernel = [], [], attention._split_kernel
    monkeypatch.setattr(attention, "multiprocessors", lambda device: 132)

    class Recorded:
        def __getitem__(self, grid):
            def launch(*given, **options):
                taken.append(options["num_stages"])
                built.append(kernel.jitted[grid](*given, **options))

            return launch

    monkeypatch.setattr(attention, "_split_kernel", Recorded())
    spans = torch.tensor([[[[0, 90, 0, 0]]]], dtype=SPANS, device=DEVICE)
    query, key = randn(1, 2, 1, size, dtype=torch.float16), randn(1, 1, 100, size, dtype=torch.float16)
    usual, in_splits = (
        attend_in_splits(query, key, key, spans, 0.125, reader=reader)
        for reader in (Reader(), Reader(combines=True, needs_l1=True))
    )
    assert_close(combined(in_splits), combined(usual))
    assert taken == [3, stages]
    if DEVICE == "cuda":
        assert (built[1].metadata.shared <= 48 << 10) == (size <= 128)
    assert usual.sums.shape[3] == attention.MOST_SPLITS and in_splits.sums.shape[3] == MOST_FOR_PRODUCT


def test_products_by_tiles_need_l1(monkeypatch):
    monkeypatch.setattr(tile_plans_module, "can_run", lambda *tensors: True)
    product, x = PlainProduct([torch.nn.Linear(384, 72, bias=False).half()], Tuned()), torch.randn(1, 2, 384).half()
    assert product.as_reader(x) == Reader()  # without a plan
    monkeypatch.setattr(Tuned, "fused", lambda *given: ONE)
    assert product.as_reader(x) == Reader(combines=False, needs_l1=True)
    assert product.as_reader(x[:, :1]) == Reader(combines=True, needs_l1=True)
    one_launch = FewRows(dense(product.layers[0].weight), None, GEMV_PLANS[0])  # by the other kernel
    monkeypatch.setattr(product, "few_rows", lambda *given: one_launch)
    assert product.as_reader(x[:, :1]) == Reader()


def test_programs_in_turn_keep_a_whole_row():
    """A plan with fewer spans would leave the rest of x out."""
    weight, _ = random_packed("dense", 72, 384, 128, torch.float16, "cpu")
    assert tile_plans_module.needed(384, TAKEN_IN_TURN.warps) == TAKEN_IN_TURN.spans
    x = torch.randn(1, 384).half()
    whole, part = (fits_if_triton_ran(x, weight, TAKEN_IN_TURN._replace(spans=spans)) for spans in (3, 2))
    assert whole and not part


def fits_if_triton_ran(x, weight, plan):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_plans_module, "can_run", lambda *tensors: True)
        return fits(x, weight, None, plan)
