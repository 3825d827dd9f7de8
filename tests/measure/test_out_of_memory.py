"""Messages as the libraries print them, and messages that only look alike."""

from __future__ import annotations

import errno
import gc
import weakref

import numpy
import pytest
import torch

from lightning_speedkit.measure.out_of_memory import is_out_of_memory, out_of_memory_source, release_memory

TEXTS = (
    ("CUDA", "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 79.10 GiB"),
    ("CUDA", "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"),
    ("CUDA", "CUDA driver error: out of memory"),
    ("CUDA", "CUDA error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    ("CUDA", "cuFFT error: CUFFT_ALLOC_FAILED"),
    ("HIP", "HIP out of memory. Tried to allocate 2.00 GiB (GPU 0; 31.98 GiB total capacity)"),
    ("HIP", "HIP error: out of memory"),
    ("MPS", "MPS backend out of memory (MPS allocated: 5.05 GB, other allocations: 2.29 GB, max allowed: 6.77 GB)."),
    ("XPU", "XPU out of memory. Tried to allocate 8.11 GiB. GPU 0 has a total capacity of 16.54 GiB"),
    ("XPU", "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    ("XPU", "UR backend failed. UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    ("XPU", "Native API failed. Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES)"),
    ("XLA", "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1024 bytes."),
    ("cuBLAS", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ("cuBLAS", "HIP error: HIPBLAS_STATUS_ALLOC_FAILED when calling `hipblasCreate(handle)`"),
    ("cuDNN", "cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ("cuDNN", "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    ("NCCL", "NCCL error in: NCCLUtils.hpp:275, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"),
    ("NCCL", "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 4 bytes"),
    ("CPU", "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "),
    ("CPU", "[enforce fail at alloc_cpu.cpp:81] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8"),
    ("CPU", "unable to mmap 64 bytes from file </torch_1_2>: Cannot allocate memory (12)"),
    ("CPU", "std::bad_alloc"),
    ("device", "NPU out of memory. Tried to allocate 1.00 GiB"),
    ("device", "out of memory"),
)


@pytest.mark.parametrize(("source", "text"), TEXTS, ids=lambda value: value[:40])
def test_messages_of_the_libraries(source: str, text: str) -> None:
    assert out_of_memory_source(RuntimeError(text)) == source
    assert out_of_memory_source(torch.OutOfMemoryError(text)) == source
    assert not is_out_of_memory(ValueError(text))  # a text proves nothing on an error of another type


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a view"),
        RuntimeError("out of resource: shared memory, Required: 131072, Hardware limit: 101376."),
        RuntimeError("the replay buffer ran out of memory slots"),
        RuntimeError("NCCL error: remote process exited or there was a network error"),
        RuntimeError(),
        OSError(errno.ENOSPC, "No space left on device"),
        KeyError("out of memory"),
        KeyboardInterrupt(),
    ],
    ids=repr,
)
def test_errors_that_are_something_else(error: BaseException) -> None:
    assert not is_out_of_memory(error)


def test_types_that_say_it_without_a_text() -> None:
    assert out_of_memory_source(torch.OutOfMemoryError("x")) == "device"
    assert out_of_memory_source(MemoryError()) == "CPU"
    assert out_of_memory_source(OSError(errno.ENOMEM, "no")) == "CPU"


def test_what_really_happens_on_this_host() -> None:
    with pytest.raises(RuntimeError) as of_torch:
        torch.empty(2**60, dtype=torch.uint8)
    assert out_of_memory_source(of_torch.value) == "CPU"
    with pytest.raises(MemoryError) as of_numpy:
        numpy.empty(2**60, dtype=numpy.uint8)
    assert out_of_memory_source(of_numpy.value) == "CPU"


def test_a_cause_counts_and_a_bystander_does_not() -> None:
    wrapped = RuntimeError("backend='inductor' raised")
    wrapped.__cause__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert out_of_memory_source(wrapped) == "CUDA"
    beside = AttributeError("no such thing")
    beside.__context__ = torch.OutOfMemoryError("CUDA out of memory.")
    assert not is_out_of_memory(beside)
    first, second = RuntimeError("a"), RuntimeError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_release_collects_cycles_and_lets_other_errors_through(monkeypatch: pytest.MonkeyPatch) -> None:
    class Node:
        pass

    node = Node()
    node.itself = node  # type: ignore[attr-defined]
    gone = weakref.ref(node)
    gc.disable()
    try:
        del node
        assert gone() is not None
        release_memory(torch.device("cpu"))
        assert gone() is None
    finally:
        gc.enable()

    def raises(text: str) -> None:
        def empty_cache() -> None:
            raise RuntimeError(text)

        monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)

    raises("CUDA error: out of memory")
    release_memory(torch.device("cuda"))
    raises("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match="assert"):
        release_memory(torch.device("cuda"))
