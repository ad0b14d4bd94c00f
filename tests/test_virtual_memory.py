"""Memory that grows in place: the address stays, and so do captured graphs and contents."""

import functools
import gc
import threading
import time

import pytest
import torch

from hf_specbranch.runtime.kv_cache import BUCKET, LONGEST_STEP, SlotCache
from hf_specbranch.runtime.virtual_memory import VirtualTensor, grow, is_available, postpone_unmapping

PAGE = 2 << 20
GPU = torch.device("cuda", 0)
gpu = pytest.mark.gpu


def mebibytes(entries=1, limit=1 << 16, dtype=torch.bfloat16):
    """A tensor whose entries take 1 MiB each."""
    return VirtualTensor((limit, 2, (1 << 19) // dtype.itemsize), dtype, GPU, entries)


def free_bytes():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info(GPU)[0]


def free_after_collection():
    gc.collect()
    torch.cuda.empty_cache()
    return free_bytes()


def steady_memory(test):
    """A test that gives back all memory that it takes.

    It runs twice, and the second run is measured: during the first, CUDA libraries load kernels, which stay. The
    driver's own needs are within the tolerance.
    """

    @functools.wraps(test)
    def twice(*args, **kwargs):
        assert is_available(GPU)
        test(*args, **kwargs)
        before = free_after_collection()
        test(*args, **kwargs)
        assert abs(free_after_collection() - before) <= 4 * PAGE

    return twice


def test_not_available_on_a_cpu():
    assert not is_available(torch.device("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_not_available_without_a_gpu():
    assert not is_available(GPU)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@steady_memory
def test_address_and_contents_survive_growth(dtype):
    virtual = mebibytes(3, dtype=dtype)
    tensor = virtual.tensor
    assert tensor.shape[0] == 1 << 16 and tensor.dtype == dtype and tensor.device == GPU and tensor.is_contiguous()
    address, kept = tensor.data_ptr(), torch.randn_like(tensor[:3])
    tensor[:3] = kept
    for entries in (4, 5, 100, 7):
        virtual.grow(entries)
        assert virtual.tensor is tensor and tensor.data_ptr() == address
        assert torch.equal(tensor[:3], kept)
        assert not tensor[3:entries].any()


@gpu
@steady_memory
def test_new_memory_is_zero():
    """Also where another tensor has just freed what it wrote."""
    for _ in range(4):
        virtual = mebibytes(2)
        virtual.grow(256)
        assert not virtual.tensor[:256].any()
        virtual.tensor[:256].fill_(float("nan"))
        del virtual


@gpu
@steady_memory
def test_mapped_bytes_are_what_was_asked_for():
    before = free_bytes()
    virtual = mebibytes(1)
    assert virtual.mapped_bytes == PAGE
    virtual.grow(2)
    assert virtual.mapped_bytes == PAGE
    virtual.grow(129)
    assert virtual.mapped_bytes == 65 * PAGE
    assert before - free_bytes() <= 256 << 20  # nothing is taken for the 64 GiB of addresses


@gpu
@steady_memory
def test_release_and_grow_again():
    virtual = mebibytes(1024)
    address, before = virtual.tensor.data_ptr(), free_bytes()
    virtual.tensor[:1024].fill_(float("nan"))
    virtual.release()
    assert virtual.mapped_bytes == 0 and free_bytes() >= before + (768 << 20)  # libraries may have loaded kernels
    virtual.release()  # nothing is left
    virtual.grow(100)
    assert virtual.tensor.data_ptr() == address and not virtual.tensor[:100].any()


@gpu
@steady_memory
def test_release_of_the_end_keeps_the_beginning():
    virtual = mebibytes(1024)
    virtual.tensor[:1024] = 3
    assert virtual.release(1000) == 992 and virtual.mapped_bytes == 992 << 20  # in pieces of 32 MiB
    assert virtual.release(992) == 992 and virtual.release(2000) == 992
    assert virtual.release(33) == 32 and (virtual.tensor[:32] == 3).all()
    virtual.grow(40)
    assert (virtual.tensor[:32] == 3).all() and not virtual.tensor[32:40].any()
    assert virtual.release(39) == 32  # a piece that is smaller
    assert virtual.release(31) == 0 and virtual.mapped_bytes == 0


@gpu
@steady_memory
def test_graph_replays_after_growth_and_after_release():
    """A graph with a kernel that reads the slots named on the device, and a copy within the memory."""
    virtual = mebibytes(4)
    slot, out = torch.tensor([3], device=GPU), torch.zeros_like(virtual.tensor[0])
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(GPU)

    def work():
        out.copy_(virtual.tensor.index_select(0, slot)[0] * 2)
        virtual.tensor[1].copy_(virtual.tensor[0])

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        graph.capture_begin(capture_error_mode="thread_local")
        work()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    for entries in (4, 50, 700):
        virtual.grow(entries)
        virtual.tensor[entries - 1] = entries
        virtual.tensor[0] = entries + 1
        slot.fill_(entries - 1)
        graph.replay()
        assert (out == 2 * entries).all() and (virtual.tensor[1] == entries + 1).all()
    virtual.release()
    virtual.grow(20)
    virtual.tensor[19] = 5
    slot.fill_(19)
    graph.replay()
    assert (out == 10).all() and (virtual.tensor[1] == 0).all()


@gpu
@steady_memory
def test_out_of_memory_leaves_the_tensor_usable():
    total = torch.cuda.mem_get_info(GPU)[1]
    virtual = mebibytes(2, limit=(total >> 20) + 1024)
    virtual.tensor[:2] = 7
    with pytest.raises(torch.cuda.OutOfMemoryError, match=r"MiB more were asked for on cuda:0, where \d+ of \d+ MiB"):
        virtual.grow(virtual.limit)
    assert virtual.mapped_bytes == PAGE and (virtual.tensor[:2] == 7).all()
    virtual.grow(10)
    assert (virtual.tensor[:2] == 7).all() and not virtual.tensor[2:10].any()
    assert torch.ones(1000, device=GPU).sum() == 1000  # torch works on
    with pytest.raises(ValueError, match=f"{virtual.limit + 1} entries were asked for"):
        virtual.grow(virtual.limit + 1)


@gpu
@steady_memory
def test_memory_that_torch_has_cached_is_used():
    """If the driver has none left, what torch keeps for later is given back to it."""
    free = free_bytes()
    cached = torch.empty(free - (1 << 30), dtype=torch.uint8, device=GPU)
    del cached  # torch keeps it
    assert free_bytes() < 2 << 30
    virtual = mebibytes(4096)
    assert virtual.mapped_bytes == 4 << 30
    del virtual


@gpu
@steady_memory
def test_memory_lives_as_long_as_a_view():
    before = free_bytes()
    view = mebibytes(1024).tensor[:1024]
    assert before - free_bytes() >= 768 << 20
    view.fill_(3)
    assert view.min() == 3 == view.max()  # a comparison would take half as much memory, which torch keeps
    del view
    assert free_bytes() >= before - (256 << 20)  # libraries may have loaded kernels


@gpu
@steady_memory
def test_freeing_waits_for_work_under_way():
    """A tensor goes while kernels that use it have not run yet, on a stream of their own."""
    stream = torch.cuda.Stream(GPU)
    for _ in range(5):
        virtual = mebibytes(100)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            virtual.tensor[:100].add_(1)
        del virtual
    torch.cuda.synchronize()


@gpu
@steady_memory
def test_two_tensors_side_by_side():
    first, second = mebibytes(3), mebibytes(5, dtype=torch.float32)
    for entries in (10, 40, 130):
        grow([first, second], entries)
        first.tensor[:entries], second.tensor[:entries] = entries, -entries
        assert (first.tensor[:entries] == entries).all() and (second.tensor[:entries] == -entries).all()
    del first
    assert (second.tensor[:130] == -130).all()


@gpu
@steady_memory
def test_growth_from_a_thread_without_a_context():
    virtual, failed = mebibytes(2), []

    def work():
        try:
            virtual.grow(100)
            virtual.tensor[:100] += 1
        except Exception as error:  # shown by the assertion below
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert not failed and (virtual.tensor[:100] == 1).all()


@gpu
@steady_memory
def test_captures_survive_growing_and_freeing_in_another_thread():
    """Memory is mapped at once; what is freed meanwhile is unmapped when the capture has ended."""
    virtual, doomed, failed = mebibytes(2), [mebibytes(1024)], []
    numbers = torch.zeros(1000, device=GPU)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(GPU)

    def work():
        try:
            virtual.grow(50)
            doomed.clear()
        except Exception as error:  # shown by the assertion below
            failed.append(error)

    before = free_bytes()
    with postpone_unmapping(), torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        numbers += 1
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            virtual.grow(500)
        numbers += 1
        graph.capture_end()
    assert not failed and virtual.mapped_bytes == 25 * PAGE
    assert free_bytes() >= before + (512 << 20)
    graph.replay()
    assert (numbers == 2).all() and not virtual.tensor[:50].any()


def states(rows=1, heads=8, count=3, seed=0):
    generator = torch.Generator(GPU).manual_seed(seed)
    return torch.randn((rows, heads, count, 128), generator=generator, device=GPU).bfloat16()


@gpu
@pytest.mark.parametrize("rows", [1, 3])
@steady_memory
def test_cache_grows_in_place(rows):
    cache = SlotCache(limit=32 * 1024)
    assert not cache.reserve(100)
    for layer in range(3):
        cache.update(states(rows, seed=layer), states(rows, seed=layer + 3), layer)
    before = [(layer.keys, layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
    for slots in (BUCKET, BUCKET + 1, 3000, 32 * 1024):
        assert not cache.reserve(slots)
        assert slots <= cache.address.capacity <= slots + LONGEST_STEP
        for index, (layer, (keys, *addresses)) in enumerate(zip(cache.layers, before)):
            assert layer.keys is keys and [layer.keys.data_ptr(), layer.values.data_ptr()] == addresses
            assert torch.equal(layer.keys[:, :, :3], states(rows, seed=index))
            assert torch.equal(layer.values[:, :, :3], states(rows, seed=index + 3))
            assert not layer.keys[:, :, 3:slots].any() and not layer.values[:, :, 3:slots].any()
    assert cache.num_bytes == 3 * 2 * 32 * 1024 * rows * 8 * 128 * 2
    assert cache.reserve(32 * 1024 + 1)  # beyond the limit it moves
    assert torch.equal(cache.layers[2].values[:, :, :3], states(rows, seed=5))


@gpu
@steady_memory
def test_released_cache_keeps_its_addresses():
    cache = SlotCache(limit=8192)
    cache.update(states(), states(), 0)
    cache.reserve(8192)
    address = cache.layers[0].keys.data_ptr()
    cache.release()
    assert cache.num_bytes == 0
    assert not cache.reserve(1000) and cache.layers[0].keys.data_ptr() == address
    cache.update(states(seed=1), states(seed=2), 0)
    assert torch.equal(cache.layers[0].values[:, :, :3], states(seed=2))
    assert not cache.layers[0].keys[:, :, 3:1000].any()


@gpu
@steady_memory
def test_cache_gives_up_its_end_only():
    cache = SlotCache(limit=64 * 1024)
    for layer in range(2):
        cache.update(states(), states(), layer)
    cache.reserve(64 * 1024)
    held, address = cache.num_bytes, cache.layers[0].keys.data_ptr()
    cache.release(1)
    assert cache.num_bytes == held - 4 * (30 << 20) and cache.address.capacity == 49 * 1024  # a piece of each tensor
    cache.release(100 << 20)
    assert cache.num_bytes == 4 * (66 << 20) and cache.address.capacity == 33 * 1024
    assert not cache.reserve(64 * 1024) and cache.num_bytes == held and cache.layers[0].keys.data_ptr() == address
    cache.update(states(seed=1), states(seed=2), 0)
    assert torch.equal(cache.layers[0].values[:, :, :3], states(seed=2))
    cache.release(held + 1)
    assert cache.num_bytes == cache.address.capacity == 0


@gpu
@steady_memory
def test_many_rows_grow_in_small_steps():
    cache = SlotCache(limit=8192)
    cache.update(states(rows=16, heads=32), states(rows=16, heads=32), 0)
    cache.reserve(BUCKET + 1)
    assert cache.address.capacity == 2 * BUCKET


@gpu
@steady_memory
def test_growth_takes_milliseconds():
    """64 pieces of 8 MiB: 1,024 slots for 32 layers of a model with 7 billion parameters."""
    tensors = [VirtualTensor((1 << 15, 32, 128), torch.bfloat16, GPU, 1) for _ in range(64)]
    seconds = []
    for slots in range(1024, 9 * 1024, 1024):
        begin = time.perf_counter()
        grow(tensors, slots)
        seconds.append(time.perf_counter() - begin)
    print("growth by 512 MiB in 64 pieces:", ", ".join(f"{1000 * each:.1f} ms" for each in seconds))
    assert sorted(seconds)[len(seconds) // 2] < 0.1
