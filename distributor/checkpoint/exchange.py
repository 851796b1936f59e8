"""Exchange bytes between the ranks of a run over torch's rendezvous store, without collectives.

Collectives of two threads would disturb each other. Over the store, a thread can commit a checkpoint while the main
thread trains, and even after ``destroy_process_group()``. Only :func:`connect_group` uses a collective.
"""

from __future__ import annotations

import atexit
import os
import time
import traceback
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NoReturn, Protocol

from distributor.errors import ConfigurationError
from distributor.rank import group
from distributor.text import notices
from distributor.text.wording import who

_log = notices.logger

#: Seconds after which a rank that waits logs a warning, and raises an error. A patient wait only warns, and later.
TELL_AFTER, GIVE_UP_AFTER = 30.0, 1800.0
TELL_PATIENTLY_AFTER = 600.0

_LOOK = 0.1  # seconds between two looks at the store, at most

_PATIENTLY = "it may still be writing or reading, or waiting for another rank, so there is no time limit"

_PIECE = 4 << 20  # bytes under one key of the store; torch's limit is 8 MiB

_ENDED = "ended/{}"

_HAS_FAILED = "failed/{}/{}"  # the call's key, and the rank

_SEE = "the exception raised there says why"

_LONGEST = 1000  # characters of an error in another rank's error

#: The first byte of a message: a value follows, or the text of a ConfigurationError, or of a RuntimeError.
_GIVEN, _REFUSED, _FAILED = b"+", b"!", b"-"


class KeyValueStore(Protocol):
    """The methods of torch's stores that this module uses."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Exchange:
    """Sends bytes to the other ranks, and receives theirs. Only one thread at a time may use it."""

    def __init__(self, store: KeyValueStore | None, rank: int, world_size: int) -> None:
        self._store = store  # None if there is only one rank
        self.rank = rank
        self.world_size = world_size
        if store is not None:
            owner = os.getpid()
            atexit.register(lambda: self._end(owner))

    def _end(self, owner: int) -> None:
        if os.getpid() == owner:
            try:
                assert self._store is not None
                self._store.set(_ENDED.format(self.rank), b"")
            except Exception:  # the store has ended, so no other rank waits for this one
                return

    def gather(self, key: str, value: bytes, what: str, *, patient: bool = False) -> list[bytes]:
        """Send a value to rank 0, which waits for the values of all ranks, and returns them in the order of ranks.

        Other ranks return an empty list at once; in :meth:`share`, which they call next, they raise the errors of rank
        0: ConfigurationError if a rank makes another call than ``what``, ends or is late, RuntimeError if it fails.
        ``key`` is the call's key, a slash and a name. A ``patient`` wait, for files to be written, has no time limit.
        """
        if self._store is None:
            return [value]
        if self.rank > 0:
            self._put(f"{key}/{self.rank}", zlib.compress(_GIVEN + what.encode() + b"\0" + value, 1))
            return []
        return [value, *(self._receive(key, rank, what, patient=patient) for rank in range(1, self.world_size))]

    def _receive(self, key: str, rank: int, what: str, *, patient: bool) -> bytes:
        """Return another rank's value on rank 0. If there is none, make all ranks raise the same error."""
        try:
            message = self._take(f"{key}/{rank}", rank, what, patient=patient)
        except ConfigurationError as error:
            self.refuse(key, str(error))
        if message[:1] == _FAILED:
            self._send(key, [message])
            raise RuntimeError(message[1:].decode())
        call, _, value = message[1:].partition(b"\0")
        if call != what.encode():
            self.refuse(
                key,
                f"rank 0 calls {what}, but rank {rank} calls {call.decode()}: every rank must make the same calls in "
                "the same order",
            )
        return value

    def share(self, key: str, values: Sequence[bytes], what: str, *, patient: bool = False) -> bytes:
        """Answer a :meth:`gather` from rank 0, with a value for each rank or one for all; return this rank's."""
        if self._store is None:
            return values[0]
        if self.rank > 0:
            message = self._take(f"{key}/for-{self.rank}", 0, what, patient=patient)
            kind, value = message[:1], message[1:]
            if kind == _REFUSED:
                raise ConfigurationError(value.decode())
            if kind == _FAILED:
                raise RuntimeError(value.decode())
            return value
        self._send(key, [_GIVEN + each for each in values])
        return values[0]

    def refuse(self, key: str, why: str) -> NoReturn:
        """On rank 0, raise a ConfigurationError, and make :meth:`share` raise it on all other ranks."""
        if self._store is not None:
            self._send(key, [_REFUSED + why.encode()])
        raise ConfigurationError(why)

    @contextmanager
    def taking_part(self, call: str, what: str, where: str = "in the call") -> Iterator[None]:
        """Tell the other ranks if this rank fails in the ``with`` block, so that they do not wait for it."""
        try:
            yield
        except BaseException as error:
            # Lines of code come before the text of a SyntaxError, and notes come after the text of any error.
            text = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
            reason = text.partition("\n")[0][:_LONGEST]
            self.fail(call, f"{what}: {who([self.rank])} failed {where} ({reason}); {_SEE}")
            raise

    def fail(self, call: str, why: str) -> None:
        """Say that this rank has failed in a call of the user, so that no other rank waits for it there.

        Ranks that wait for it raise a RuntimeError, unless it has already sent its value. This method does not wait for
        them, and raises no error. The keys of the call's exchanges begin with ``call`` and a slash.
        """
        if self._store is not None:
            with suppress(Exception):  # the error with which this rank has failed is raised, and not one of the store
                self._store.set(_HAS_FAILED.format(call, self.rank), _FAILED + why.encode())

    def _send(self, key: str, values: Sequence[bytes]) -> None:
        packed = [zlib.compress(value, 1) for value in values]
        for rank in range(1, self.world_size):
            self._put(f"{key}/for-{rank}", packed[rank] if len(packed) > 1 else packed[0])

    def agree(self, key: str, value: str) -> str:
        """Return the value of the first rank that calls this method for ``key``. No rank waits for another rank."""
        if self._store is None:
            return value
        return bytes(self._store.compare_set(key, "", value)).decode()

    def agreed(self, key: str) -> str | None:
        """Return the value that :meth:`agree` has set for ``key``; ``None`` if none, as always with one rank."""
        if self._store is None or not self._store.check([key]):
            return None
        return bytes(self._store.get(key)).decode()

    def _put(self, key: str, packed: bytes) -> None:
        assert self._store is not None
        pieces = [packed[start : start + _PIECE] for start in range(0, len(packed), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{number}", piece)
        self._store.set(key, str(len(pieces)).encode())

    def _take(self, key: str, rank: int, what: str, *, patient: bool) -> bytes:
        """Wait for a rank's message, or for what it says with :meth:`fail`. Remove the message from the store."""
        assert self._store is not None
        if not self._await(key, rank, what, patient=patient):
            return bytes(self._store.get(_failed_at(key, rank)))
        names = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
        value = zlib.decompress(b"".join(bytes(self._store.get(name)) for name in names))
        for name in (*names, key):  # no other rank reads this message
            self._store.delete_key(name)
        return value

    def _await(self, key: str, rank: int, what: str, *, patient: bool) -> bool:
        """Wait for a rank's message; ``False`` if the rank has failed instead."""
        assert self._store is not None
        start, warned, pause = time.monotonic(), False, _LOOK / 100
        has_failed = has_ended = False
        while not self._store.check([key]):
            if has_failed:
                return False
            if has_ended:
                raise ConfigurationError(f"every rank must call {what}, but {who([rank])} has ended without calling it")
            waited = time.monotonic() - start
            if waited > GIVE_UP_AFTER and not patient:
                raise ConfigurationError(
                    f"every rank must call {what}, but {who([rank])} did not call it within {waited:.0f} s"
                )
            if waited > (TELL_PATIENTLY_AFTER if patient else TELL_AFTER) and not warned:
                warned = True
                why = _PATIENTLY if patient else "every rank must call it"
                _log.warning("%s waits for %s: %s", what, who([rank]), why)
            time.sleep(pause)  # the store's own wait writes two lines to stderr whenever its time-out passes
            pause = min(2 * pause, _LOOK)
            # A rank sends its message before it fails, and fails before it ends. So this is checked in reverse order.
            has_ended = self._store.check([_ENDED.format(rank)])
            has_failed = self._store.check([_failed_at(key, rank)])
        return True


def _failed_at(key: str, rank: int) -> str:
    return _HAS_FAILED.format(key.partition("/")[0], rank)


def connect(rank: int, world_size: int, prefix: str, what: str) -> Exchange:
    """Connect a rank over the store of torch's elastic agent. ``prefix`` is different in each attempt."""
    if world_size == 1:
        return Exchange(None, rank, world_size)
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not address or not port:
        raise ConfigurationError(
            f"all {world_size} ranks take part in {what}, but they have no store of torch's elastic agent: do not "
            "change the environment variables MASTER_ADDR, MASTER_PORT and TORCHELASTIC_USE_AGENT_STORE of ranks"
        )
    return _exchange(_client(address, int(port)), rank, world_size, prefix)


def connect_group(rank: int, world_size: int, token: str, what: str) -> tuple[Exchange, str]:
    """Connect a rank that another launcher has started, over the store of the default process group.

    All ranks must call this together. The launcher may use the same store and the same restart count for several
    attempts. Keys therefore contain a random text, the token of rank 0, which is returned too.
    """
    if world_size == 1:
        return Exchange(None, rank, world_size), token
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigurationError(
            f"{what} needs a process group, since all {world_size} ranks take part in it: call "
            "torch.distributed.init_process_group() first"
        )
    tokens: list[Any] = [token]
    dist.broadcast_object_list(tokens, src=0, device=group.device())
    store: Any = dist.distributed_c10d._get_default_store()
    store = store.clone()  # a connection of its own: a waiting thread blocks a connection for all others
    return _exchange(store, rank, world_size, tokens[0]), tokens[0]


def _client(address: str, port: int) -> Any:
    import torch.distributed as dist

    patience = timedelta(seconds=GIVE_UP_AFTER)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)  # type: ignore[attr-defined]


def _exchange(store: Any, rank: int, world_size: int, prefix: str) -> Exchange:
    import torch.distributed as dist

    prefixed: Any = dist.PrefixStore(f"distributor/exchange/{prefix}", store)  # type: ignore[attr-defined]
    return Exchange(prefixed, rank, world_size)
