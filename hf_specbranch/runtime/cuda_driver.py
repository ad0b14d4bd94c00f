"""The calls of the CUDA driver that manage virtual memory: address ranges, physical memory, and the mapping of both.

torch has no interface to them. Structures and constants are those of `cuda.h`, unchanged since CUDA 10.2.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_ulonglong, c_ushort, c_void_p
from functools import lru_cache
from typing import Any

OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED: memory that stays where it is
ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
MINIMUM = 0  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class AllocationFlags(ctypes.Structure):
    """The structure `allocFlags` inside CUmemAllocationProp."""

    _fields_ = [
        ("compression_type", c_ubyte),
        ("gpu_direct_rdma_capable", c_ubyte),
        ("usage", c_ushort),
        ("reserved", c_ubyte * 4),
    ]


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", c_int),
        ("requested_handle_types", c_int),
        ("location", Location),
        ("win32_handle_meta_data", c_void_p),
        ("flags", AllocationFlags),
    ]


class AccessDescription(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


SIGNATURES: dict[str, tuple[Any, ...]] = {  # addresses and handles are 64-bit integers
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuInit": (c_uint,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamSynchronize": (c_void_p,),
    "cuMemsetD8Async": (c_ulonglong, c_ubyte, c_size_t, c_void_p),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(AllocationProperties), c_int),
    "cuMemAddressReserve": (POINTER(c_ulonglong), c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemAddressFree": (c_ulonglong, c_size_t),
    "cuMemCreate": (POINTER(c_ulonglong), c_size_t, POINTER(AllocationProperties), c_ulonglong),
    "cuMemRelease": (c_ulonglong,),
    "cuMemMap": (c_ulonglong, c_size_t, c_size_t, c_ulonglong, c_ulonglong),
    "cuMemSetAccess": (c_ulonglong, c_size_t, POINTER(AccessDescription), c_size_t),
    "cuMemUnmap": (c_ulonglong, c_size_t),
}


class DriverError(RuntimeError):
    """A call of the driver failed with this code."""

    def __init__(self, name: str, code: int, reason: str) -> None:
        super().__init__(f"{name} failed with error {code} ({reason})")
        self.code = code


class Driver:
    """Calls the driver for one device. All methods but the constructor need `current`.

    Args:
        device: the device's index, as torch counts them.
    """

    def __init__(self, device: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")  # the library that torch has loaded
        for name, arguments in SIGNATURES.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = arguments, c_int
        ordinal, self._context, self._stream = c_int(), c_void_p(), c_void_p()
        self._call("cuInit", 0)  # does nothing if torch has done it
        self._call("cuDeviceGet", byref(ordinal), device)
        location = Location(ON_DEVICE, ordinal.value)
        self._properties = AllocationProperties(type=PINNED, location=location)
        self._access = AccessDescription(location, READ_WRITE)
        self._call("cuDevicePrimaryCtxRetain", byref(self._context), ordinal.value)
        with self.current():
            # A stream of our own: those of torch come from a pool, and another thread may be capturing on any of them.
            self._call("cuStreamCreate", byref(self._stream), NON_BLOCKING)
            granularity = c_size_t()
            self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._properties), MINIMUM)
        self.granularity: int = granularity.value  # sizes are multiples of this; 2 MiB on all GPUs so far

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's primary context, which torch uses, the current one of this thread while this lasts."""
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", byref(c_void_p()))

    def reserve(self, size: int) -> int:
        """Reserve a range of addresses, and return the first."""
        address = c_ulonglong()
        self._call("cuMemAddressReserve", byref(address), size, 0, 0, 0)
        return address.value

    def free(self, address: int, size: int) -> None:
        """Give back a reserved range, in which nothing is mapped."""
        self._call("cuMemAddressFree", address, size)

    def map(self, address: int, size: int) -> None:
        """Allocate physical memory, map it at this address, and start to fill it with zeros; see `wait`."""
        handle = c_ulonglong()
        self._call("cuMemCreate", byref(handle), size, byref(self._properties), 0)
        try:
            self._call("cuMemMap", address, size, 0, handle.value, 0)
        finally:
            self._call("cuMemRelease", handle.value)  # a mapping keeps the memory until it is unmapped
        try:
            self._call("cuMemSetAccess", address, size, byref(self._access), 1)
            self._call("cuMemsetD8Async", address, 0, size, self._stream)
        except DriverError:
            self._call("cuMemUnmap", address, size)
            raise

    def wait(self) -> None:
        """Wait until all mapped memory is filled with zeros, and for nothing else."""
        self._call("cuStreamSynchronize", self._stream)

    def unmap(self, address: int, size: int) -> None:
        """Undo one call of `map`, and free the memory."""
        self._call("cuMemUnmap", address, size)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            reason = c_char_p()
            self._library.cuGetErrorString(code, byref(reason))
            raise DriverError(name, code, (reason.value or b"unknown").decode())


@lru_cache
def driver_of(device: int) -> Driver:
    """Return the driver of a device. There is one per device, which lives as long as the process."""
    return Driver(device)
