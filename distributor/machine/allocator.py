"""Makes the C library's allocator in CPU ranks keep freed memory for the next training step, and use huge pages.

By default, glibc returns large blocks to the kernel as soon as they are freed. The gradients and buffers of a training
step are such blocks, so each step requests the same pages again, 4 KiB at a time, which costs time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from contextlib import suppress

KEEP_MEMORY = "DISTRIBUTOR_KEEP_MEMORY"  # with the value 0, the allocator stays unchanged

#: M_MMAP_THRESHOLD and M_TRIM_THRESHOLD of mallopt(3). Blocks up to the first value, the largest that glibc allows,
#: come from the heap. The free end of the heap goes back to the kernel only if it is larger than the second value.
_SETTINGS = {-3: 32 << 20, -1: (1 << 31) - 1}

#: Variables with which users configure the allocator.
_MALLOC = "MALLOC_"
_TUNABLES, _MALLOC_TUNABLES = "GLIBC_TUNABLES", "glibc.malloc."

#: Makes glibc 2.35 and later use huge pages (madvise(2), MADV_HUGEPAGE). It is read only when a program starts.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


def is_left_alone(environ: Mapping[str, str]) -> bool:
    """Return whether ``environ`` already configures the C library's allocator, which then stays unchanged.

    >>> is_left_alone({"MALLOC_ARENA_MAX": "2"}), is_left_alone({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
    (True, True)
    >>> is_left_alone({"DISTRIBUTOR_KEEP_MEMORY": "0"}), is_left_alone({"PATH": "/bin"})
    (True, False)
    """
    return (
        environ.get(KEEP_MEMORY) == "0"
        or any(name.startswith(_MALLOC) for name in environ)
        or _MALLOC_TUNABLES in environ.get(_TUNABLES, "")
    )


def huge_pages(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which a process of this environment, and its forks, use huge pages.

    >>> huge_pages({"GLIBC_TUNABLES": "glibc.rtld.nns=8"})
    {'GLIBC_TUNABLES': 'glibc.rtld.nns=8:glibc.malloc.hugetlb=1'}
    """
    if is_left_alone(environ):
        return {}
    others = environ.get(_TUNABLES)
    return {_TUNABLES: f"{others}:{_HUGE_PAGES}" if others else _HUGE_PAGES}


def is_glibcs() -> bool:
    """Return whether this process uses glibc's allocator rather than jemalloc, tcmalloc or another C library's."""
    with suppress(OSError, AttributeError):
        return _address(ctypes.CDLL(None)) == _address(ctypes.CDLL("libc.so.6"))
    return False


def _address(library: ctypes.CDLL) -> int | None:
    return ctypes.cast(library.malloc, ctypes.c_void_p).value


def keep_memory(environ: Mapping[str, str]) -> bool:
    """Make this process's glibc keep freed memory, unless ``environ`` configures it. Return whether this has worked."""
    if is_left_alone(environ) or not is_glibcs():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return [mallopt(parameter, value) for parameter, value in _SETTINGS.items()] == [1] * len(_SETTINGS)
