"""Checksums of tensors change with every bit, and with nothing else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hf_specbranch.kernels.checksum import COLUMNS, ROWS, checksum, checksum_reference

from .kernels import DEVICE, on_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)
sizes = st.sampled_from([0, 1, 3, 17, COLUMNS, ROWS * COLUMNS, 3 * ROWS * COLUMNS + 5])


def bits(tensor):
    """Return the bytes of a contiguous tensor, as a view."""
    return tensor.reshape(-1).view(torch.uint8)


def example(dtype=torch.float32, shape=(3, 5)):
    return torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(1)).to(dtype).to(DEVICE)


def changes(tensor, change):
    """Return whether a change in place changes the checksum, with another tensor before and after it."""
    others = example(torch.bfloat16), example()
    every = [others[0], tensor, others[1]]
    before = checksum(every)
    change(tensor)
    after = checksum(every)
    assert torch.equal(after[::2], before[::2])
    return bool(after[1] != before[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bit_anywhere_counts(dtype):
    tensor = example(dtype)
    changed = []
    for place in range(tensor.nbytes):
        for bit in (1,) if dtype == torch.bool else (1, 16, 128):
            changed.append(tensor.clone())
            bits(changed[-1])[place].bitwise_xor_(bit)
    found = checksum([tensor, *changed])
    assert found.unique().numel() == found.numel() == len(changed) + 1


@pytest.mark.parametrize("size", [COLUMNS - 1, COLUMNS + 1, ROWS * COLUMNS, ROWS * COLUMNS + 1, 2 * ROWS * COLUMNS + 7])
def test_first_and_last_words_of_large_tensors_count(size):
    tensor = example(torch.int32, (size,))
    for place in {0, 1, COLUMNS - 2, size // COLUMNS * COLUMNS - 1, size - 2, size - 1}:
        assert changes(tensor, lambda each: each[place].add_(1)), place  # noqa: B023


@pytest.mark.parametrize(
    "one, other", [(0, 1), (0, COLUMNS), (5, 7 + 3 * COLUMNS), (2, 2 + ROWS * COLUMNS), (1, 1 + 4 * COLUMNS)]
)
@pytest.mark.parametrize("values", [(1.0, -1.0), (0.0, -0.0), (1.0, 2.0), (3.0, 3.0000002)])
def test_swaps_count(one, other, values):
    tensor = torch.zeros(ROWS * COLUMNS + 100, device=DEVICE)
    places = torch.tensor([one, other], device=DEVICE)
    tensor[places] = torch.tensor(values, device=DEVICE)
    assert changes(tensor, lambda each: each.__setitem__(places, each[places].flip(0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "change",
    [
        lambda each: each.neg_(),
        lambda each: each.mul_(2),
        lambda each: each.data.add_(1),
        lambda each: each.zero_(),
        lambda each: each.copy_(each.flip(0)),
        lambda each: each.copy_(each.roll(1, 1)),
        lambda each: bits(each).bitwise_not_(),
        lambda each: bits(each).bitwise_xor_(128),
    ],
    ids=["sign", "double", "add through data", "zero", "reverse rows", "roll columns", "every bit", "top bits"],
)
def test_changes_of_everything_count(change, dtype):
    assert changes(example(dtype, (64, 256)), change)


@pytest.mark.parametrize("size", [1, 2, 64, 5000])
def test_negative_zeros_count(size):
    assert changes(torch.zeros(size, device=DEVICE), lambda each: each.neg_())


def test_two_tensors_that_change_places_count():
    one, other = example(), example() + 1
    assert not torch.equal(checksum([one, other]), checksum([other, one]))


def test_dtype_and_shape_count():
    zeros = torch.zeros(4, 6, device=DEVICE)
    views = [zeros, zeros.view(torch.int32), zeros.view(torch.bfloat16), zeros.view(24), zeros.view(6, 4), zeros[:3]]
    assert checksum(views).unique().numel() == len(views)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_alone_count(dtype):
    """Memory layout, alignment and earlier calls do not matter."""
    tensor = example(dtype, (7, 9))
    strided = tensor.t().contiguous().t()
    shifted = torch.cat((tensor.new_zeros(1), tensor.view(-1)))[1:].view(7, 9)
    expected = checksum([tensor])
    assert expected.dtype == torch.int64 and expected.device == tensor.device
    for same in (tensor, tensor.clone(), strided, shifted, nn.Parameter(tensor, requires_grad=False)):
        assert torch.equal(checksum([same]), expected)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(True),
        torch.tensor(3.0),
        torch.zeros(0),
        torch.zeros(3, 0),
        torch.zeros(1).half()[1:],
        torch.ones(5, dtype=torch.bool),
    ],
    ids=str,
)
def test_odd_tensors(tensor):
    tensor = tensor.to(DEVICE)
    once = checksum([tensor])
    assert once.shape == (1,) and torch.equal(once, checksum([tensor.clone()]))
    if tensor.numel():
        assert changes(tensor, lambda each: bits(each)[-1].bitwise_xor_(1))


def test_lazy_conjugates_are_read_as_numbers():
    tensor = torch.randn(6, dtype=torch.complex64, device=DEVICE)
    assert torch.equal(checksum([tensor.conj()]), checksum([tensor.conj().resolve_conj()]))
    assert torch.equal(checksum([tensor.conj().imag]), checksum([tensor.conj().imag.resolve_neg()]))


def test_nothing_has_an_empty_checksum():
    assert checksum([]).shape == (0,)


def test_unreadable_tensors_are_refused():
    for tensor in (torch.zeros(3, device="meta"), torch.zeros(3, 3).to_sparse(), torch.zeros(3).as_subclass(Labelled)):
        with pytest.raises(TypeError, match="cannot be read: expected a plain strided tensor"):
            checksum([tensor])


class Labelled(torch.Tensor):
    pass


@pytest.mark.gpu
def test_tensors_on_several_devices_are_refused():
    with pytest.raises(ValueError, match="call checksum once per device"):
        checksum([torch.zeros(3), torch.zeros(3, device="cuda")])


@on_kernels
@given(st.lists(st.tuples(st.sampled_from(DTYPES), sizes, st.booleans()), min_size=1, max_size=12))
def test_kernel_checksum(many):
    tensors = [example(dtype, (size,))[shifted:] for dtype, size, shifted in many]
    assert torch.equal(checksum(tensors), checksum_reference(tensors))


@on_kernels
@given(st.just(1030))
def test_kernel_checksum_of_very_many_tensors(number):
    tensors = list(example(torch.int32, (number, 3)).unbind())
    assert torch.equal(checksum(tensors), checksum_reference(tensors))


@pytest.mark.gpu
def test_checksum_does_not_wait_for_the_device():
    weights = [torch.randn(64, 64, device="cuda") for _ in range(300)] + [torch.ones(3, device="cuda").bool()]
    checksum(weights)
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = checksum(weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(found, checksum_reference(weights))


@pytest.mark.gpu
@pytest.mark.slow
def test_checksum_of_more_than_two_billion_words():
    tensor = torch.zeros((1 << 31) + 5, dtype=torch.int32, device="cuda")
    before = checksum([tensor])
    tensor[-1] = 1
    assert checksum([tensor]) != before and torch.equal(checksum([tensor]), checksum([tensor]))


@pytest.mark.gpu
@pytest.mark.slow
def test_checksum_takes_about_one_read():
    weights = [torch.ones(32 << 20, dtype=torch.bfloat16, device="cuda") for _ in range(100)]  # 6.7 GB
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def seconds(work):
        work()
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000

    read = seconds(lambda: [weight.view(torch.int64).sum() for weight in weights])
    assert seconds(lambda: checksum(weights)) < 1.3 * read
