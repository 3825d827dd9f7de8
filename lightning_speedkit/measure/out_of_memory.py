"""Tells an error that means "no memory left" from every other error, and frees what can be freed after one.

When it helps: a search for a batch size, or a step that is repeated in smaller pieces, may only act on such an error.
What it costs: nothing until something is raised. Source: the types of torch, and the messages of the allocators and
libraries as users reported them; Lightning's own ``is_oom_error`` looks for three texts only (Lightning #6819).
"""

from __future__ import annotations

import errno
import gc
import re
from collections.abc import Iterator

import torch

__all__ = ["is_out_of_memory", "out_of_memory_source", "release_memory"]

_SOURCES: tuple[tuple[str, str], ...] = (  # libraries before devices: their messages name the device too
    ("NCCL", r"\b[nr]ccl.*out of memory|Failed to (CUDA|HIP) (c|m)alloc|\b(Cuda|Hip) failure( \d+)? 'out of memory'"),
    ("cuDNN", r"CUDNN_STATUS(_INTERNAL_ERROR)?(_(HOST|DEVICE))?_ALLOC(ATION)?_FAILED|\bmiopenStatusAllocFailed\b"),
    ("cuBLAS", r"\b(CU|HIP)BLAS(LT)?_STATUS_ALLOC_FAILED|\brocblas_status_memory_error\b"),
    ("CUDA", r"\b(CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED|\bCUFFT_ALLOC_FAILED"),
    ("CUDA", r"\bCUDA[\w ]*:? out of memory|\bcudaErrorMemoryAllocation\b|\bCUDA_ERROR_OUT_OF_MEMORY\b"),
    ("HIP", r"\bHIP[\w ]*:? out of memory|\bhipErrorOutOfMemory\b|\bhipErrorMemoryAllocation\b"),
    ("MPS", r"\bMPS backend out of memory|\bkIOGPUCommandBufferCallbackErrorOutOfMemory\b"),
    ("XPU", r"\bXPU[\w ]*:? out of memory|\b(UR|PI|ZE)_(RESULT_)?ERROR_OUT_OF_(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)\b"),
    ("XLA", r"\bRESOURCE_EXHAUSTED\b.*(memory|allocat)"),
    ("CPU", r"CPUAllocator: (can't allocate|not enough) memory|\bCannot allocate memory\b|\bstd::bad_alloc\b"),
    ("device", r"\bout of memory\. (Tried|Trying) to allocate|\bbackend out of memory\b|^out of memory\W*$"),
)
_PATTERNS = tuple((source, re.compile(text, re.IGNORECASE | re.DOTALL)) for source, text in _SOURCES)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and its causes: what was raised *from* it. An error that merely came up while one was handled is
    a fault of its own."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__


def _source(error: BaseException) -> str | None:
    if not isinstance(error, (RuntimeError, MemoryError, OSError)):
        return None
    text = str(error)
    if not isinstance(error, OSError):
        for source, pattern in _PATTERNS:
            if pattern.search(text):
                return source
    if isinstance(error, torch.OutOfMemoryError):
        return "device"
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return "CPU"
    return None


def out_of_memory_source(error: BaseException) -> str | None:
    """What ran out of memory: ``"CUDA"``, ``"HIP"``, ``"MPS"``, ``"XPU"``, ``"XLA"``, ``"cuBLAS"``, ``"cuDNN"``,
    ``"NCCL"``, ``"CPU"``, or ``"device"`` where the error does not say which; ``None`` if the error means something
    else.

    Looks at the type first and at the text of a RuntimeError second, and at the errors that it was raised from, since
    a compiler wraps what it meets. A kernel that asks for more shared memory than a chip has (Triton's
    ``OutOfResources``) is none: less data does not mend it.

    >>> out_of_memory_source(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    'cuBLAS'
    >>> out_of_memory_source(torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB."))
    'HIP'
    >>> out_of_memory_source(ValueError("CUDA out of memory")) is None
    True
    """
    return next((source for source in map(_source, _chain(error)) if source is not None), None)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error means that memory ran out, of any device or of the host.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("CUDA error: invalid argument"))
    (True, False)
    """
    return out_of_memory_source(error) is not None


def release_memory(device: torch.device) -> None:
    """Collect garbage and give the allocator's unused blocks of this device back; never raises for want of memory.

    Call it outside the ``except`` block: inside, the traceback still holds the tensors of every frame.

    Args:
        device: The device; for the CPU only garbage is collected.

    >>> release_memory(torch.device("cpu"))
    """
    gc.collect()
    empty_cache = getattr(getattr(torch, device.type, None), "empty_cache", None)
    if empty_cache is not None:
        try:
            empty_cache()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
