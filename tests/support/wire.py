"""A slow cable that loses packets: ``wire.py NAMESPACE INTERFACE CABLE DELAY LOSS``.

One end is an Ethernet interface (TAP) in a network namespace, the other one here; this process passes the frames on.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import random
import struct
import sys

#: linux/if_tun.h, linux/sched.h
_TUNSETIFF = 0x400454CA
_IFF_TAP, _IFF_NO_PI = 0x0002, 0x1000
_CLONE_NEWNET = 0x40000000

_FRAME = 1 << 16


def tap(name: str) -> int:
    """A new interface in the current namespace; it lives as long as its descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return descriptor


def enter(path: str) -> None:
    with open(path) as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {path}")


async def main(namespace: str, interface: str, cable: str, delay: float, loss: float) -> None:
    loop = asyncio.get_running_loop()
    here = tap(cable)
    enter(f"/run/netns/{namespace}")
    there = tap(interface)
    chance = random.Random(cable)

    def carry(source: int, target: int) -> None:
        try:
            while True:
                frame = os.read(source, _FRAME)
                if chance.random() >= loss:
                    loop.call_later(delay, deliver, target, frame)
        except BlockingIOError:
            pass
        except OSError:  # its interface is down
            pass

    def deliver(target: int, frame: bytes) -> None:
        try:
            os.write(target, frame)
        except OSError:  # its queue is full, or it is down: one more that is lost
            pass

    loop.add_reader(here, carry, here, there)
    loop.add_reader(there, carry, there, here)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], *map(float, sys.argv[4:])))
