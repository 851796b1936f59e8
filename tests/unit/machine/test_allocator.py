"""What of the C library's allocator is changed, and where it is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distributor.machine import allocator

#: Touches 24 MiB ten times; prints whether memory is kept, and how many pages came in after the first time.
TOUCH = """
import ctypes, os, resource, sys
from distributor.machine import allocator

kept = allocator.keep_memory(os.environ)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def touch():
    at = libc.malloc(24 << 20)
    ctypes.memset(at, 1, 24 << 20)
    libc.free(at)

touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(9):
    touch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""

#: An allocator that is another one, and yet works.
OTHER = "void *__libc_malloc(unsigned long); void *malloc(unsigned long size) { return __libc_malloc(size); }"

_PAGES = (24 << 20) // 4096


def touch(**environ: str) -> tuple[bool, int]:
    told = subprocess.run(
        [sys.executable, "-c", TOUCH],
        env={**os.environ, **environ},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    kept, faults = told.split()
    return kept == "True", int(faults)


def test_freed_memory_is_kept_for_the_next_step() -> None:
    kept, faults = touch()
    assert kept
    assert faults < _PAGES  # of the 9 x 6144 that are touched


@pytest.mark.parametrize(
    "said",
    [
        {"DISTRIBUTOR_KEEP_MEMORY": "0"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.check=0"},
    ],
)
def test_users_settings_leave_the_allocator_unchanged(said: dict[str, str]) -> None:
    assert allocator.is_left_alone(said)
    assert allocator.huge_pages(said) == {}
    kept, _ = touch(**said)
    assert not kept


def test_another_allocator_is_left_alone(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(OTHER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    kept, _ = touch(LD_PRELOAD=str(library))
    assert not kept


def test_huge_pages_are_asked_for_beside_other_tunables() -> None:
    assert allocator.huge_pages({}) == {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
