"""Exchange bytes between the ranks of a run over torch's rendezvous store, without collectives.

Collectives of two threads would disturb each other. Since values are exchanged without collectives, a thread can commit
a checkpoint while the main thread trains, and even after ``destroy_process_group()``. Only :func:`connect_group` uses a
collective, once, when it makes the connection.
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

#: Numbers of seconds after which a rank that waits for another rank logs a warning, and after which it raises an error.
#: A patient wait raises no such error, and its warning comes later, because writing a large checkpoint takes long.
TELL_AFTER, GIVE_UP_AFTER = 30.0, 1800.0
TELL_PATIENTLY_AFTER = 600.0

#: Maximum number of seconds between two checks of whether another rank's value is there or that rank has ended.
_LOOK = 0.1

#: The end of the warning about a patient wait. The other rank has begun the call.
_PATIENTLY = "it may still be writing or reading, or waiting for another rank, so there is no time limit"

#: Maximum number of bytes under one key of the store. Longer values are split. Torch's limit is 8 MiB.
_PIECE = 4 << 20

_ENDED = "ended/{}"

#: The key of the text with which a rank says that it has failed in a call: the call's key, and the rank.
_HAS_FAILED = "failed/{}/{}"

#: The end of the error of a rank that waits for another rank, which has failed.
_SEE = "the exception raised there says why"

#: Maximum number of characters of an error in the text of another rank's error.
_LONGEST = 1000

#: Each message begins with one of these bytes: the first if a value follows, the second if the text of rank 0's
#: ``ConfigurationError`` follows, the third if a rank has failed, and the text of a ``RuntimeError`` follows.
_GIVEN, _REFUSED, _FAILED = b"+", b"!", b"-"


class Store(Protocol):
    """The methods of torch's stores that this module uses."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...


class Exchange:
    """Sends bytes from one rank to the other ranks, and receives bytes from them. Only one thread at a time may use it.

    Args:
        store: the store that the ranks share; ``None`` if there is only one rank.
        rank: this rank.
        world_size: number of ranks.
    """

    def __init__(self, store: Store | None, rank: int, world_size: int) -> None:
        self._store = store
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
        """Send a value to rank 0. Rank 0 waits for the values of all ranks, and returns them in the order of ranks.

        Only rank 0 waits for values; the other ranks return an empty list at once. If rank 0 raises one of the errors
        below, the other ranks raise the same error in :meth:`share`, which they call next to get the answer of rank 0.

        Args:
            key: name of this exchange, the same on all ranks: the user's call (see :meth:`fail`), a slash, and a name
                that no other exchange of the call has.
            value: this rank's value.
            what: the user's call. Ranks that make different calls get an error.
            patient: whether to wait for the values of other ranks without a time limit, for steps that may take a long
                time, such as writing files. If ``True``, the wait fails only if another rank ends, or fails in the
                user's call, without sending its value.

        Raises:
            ConfigurationError: a rank makes a different call, has ended without this call, or (unless ``patient`` is
                set) has not made this call within half an hour.
            RuntimeError: a rank has failed in the user's call (see :meth:`fail`).
        """
        if self._store is None:
            return [value]
        if self.rank > 0:
            self._put(f"{key}/{self.rank}", _GIVEN + what.encode() + b"\0" + value)
            return []
        return [value, *(self._receive(key, rank, what, patient=patient) for rank in range(1, self.world_size))]

    def _receive(self, key: str, rank: int, what: str, *, patient: bool) -> bytes:
        """Return the value of another rank on rank 0. If there is none, make all ranks raise the same error."""
        try:
            told = self._take(f"{key}/{rank}", rank, what, patient=patient)
        except ConfigurationError as error:
            self.refuse(key, str(error))
        if told[:1] == _FAILED:
            self._send(key, [told])
            raise RuntimeError(told[1:].decode())
        call, _, value = told[1:].partition(b"\0")
        if call != what.encode():
            self.refuse(
                key,
                f"rank 0 calls {what}, but rank {rank} calls {call.decode()}: every rank must make the same calls in "
                "the same order",
            )
        return value

    def share(self, key: str, values: Sequence[bytes], what: str, *, patient: bool = False) -> bytes:
        """Send values from rank 0: one for each rank, or the same one to all. Return the value for this rank.

        Args:
            key: the key of the :meth:`gather` that this call answers.
            values: on rank 0, a value for each rank, or one value; ignored on other ranks.
            what: the user's call, which errors quote.
            patient: whether to wait for rank 0 without a time limit, as for :meth:`gather`.

        Raises:
            ConfigurationError: rank 0 has called :meth:`refuse`, has ended without this call, or (unless ``patient`` is
                set) has not made this call within half an hour.
            RuntimeError: rank 0 has failed in the user's call (see :meth:`fail`), or waited for a rank that has.
        """
        if self._store is None:
            return values[0]
        if self.rank > 0:
            told = self._take(f"{key}/for-{self.rank}", 0, what, patient=patient)
            kind, value = told[:1], told[1:]
            if kind == _REFUSED:
                raise ConfigurationError(value.decode())
            if kind == _FAILED:
                raise RuntimeError(value.decode())
            return value
        self._send(key, [_GIVEN + each for each in values])
        return values[0]

    def refuse(self, key: str, why: str) -> NoReturn:
        """On rank 0, raise an error, and make :meth:`share` raise the same error on all other ranks.

        Raises:
            ConfigurationError: always.
        """
        if self._store is not None:
            self._send(key, [_REFUSED + why.encode()])
        raise ConfigurationError(why)

    @contextmanager
    def taking_part(self, call: str, what: str, where: str = "in the call") -> Iterator[None]:
        """Tell the other ranks if this rank fails in the ``with`` block, so that they do not wait for it in this call.

        Any exception counts as a failure, including ``KeyboardInterrupt``.

        Args:
            call: identifies the call, as for :meth:`fail`.
            what: the user's call, which errors quote.
            where: where this rank fails, for the error of the ranks that wait for it.
        """
        try:
            yield
        except BaseException as error:
            # Lines of code come before the text of a SyntaxError, and notes come after the text of any error.
            text = next(line for line in traceback.format_exception_only(error) if not line.startswith(" "))
            told = text.partition("\n")[0][:_LONGEST]
            self.fail(call, f"{what}: {who([self.rank])} failed {where} ({told}); {_SEE}")
            raise

    def fail(self, call: str, why: str) -> None:
        """Say that this rank has failed in a call of the user, so that no other rank waits for it there.

        Ranks that wait for this rank in an exchange of the call raise a ``RuntimeError`` instead, unless this rank has
        already sent its value. This method does not wait for them, and raises no error.

        Args:
            call: a text that identifies the call, the same on all ranks. The keys of the call's exchanges begin with it
                and a slash.
            why: the text of the error.
        """
        if self._store is not None:
            with suppress(Exception):  # the error with which this rank has failed is raised, and not one of the store
                self._store.set(_HAS_FAILED.format(call, self.rank), _FAILED + why.encode())

    def _send(self, key: str, values: Sequence[bytes]) -> None:
        for rank in range(1, self.world_size):
            self._put(f"{key}/for-{rank}", values[rank] if len(values) > 1 else values[0])

    def agree(self, key: str, value: str) -> str:
        """Return the value of the first rank that calls this method for ``key``. No rank waits for another rank."""
        if self._store is None:
            return value
        return bytes(self._store.compare_set(key, "", value)).decode()

    def agreed(self, key: str) -> str | None:
        """Return the value that was set for ``key`` with :meth:`agree`; ``None`` if no rank has set one.

        If there is only one rank, return ``None``, because :meth:`agree` then stores nothing.
        """
        if self._store is None or not self._store.check([key]):
            return None
        return bytes(self._store.get(key)).decode()

    def _put(self, key: str, value: bytes) -> None:
        assert self._store is not None
        packed = zlib.compress(value, 1)
        pieces = [packed[start : start + _PIECE] for start in range(0, len(packed), _PIECE)]
        for number, piece in enumerate(pieces):
            self._store.set(f"{key}/{number}", piece)
        self._store.set(key, str(len(pieces)).encode())

    def _take(self, key: str, rank: int, what: str, *, patient: bool) -> bytes:
        """Wait for a rank's message, remove it from the store, and return it. Only one rank reads each message.

        If the rank has failed in the user's call, return what it has said with :meth:`fail`.
        """
        assert self._store is not None
        if not self._await(key, rank, what, patient=patient):
            return bytes(self._store.get(_failed_at(key, rank)))
        names = [f"{key}/{number}" for number in range(int(self._store.get(key)))]
        value = zlib.decompress(b"".join(bytes(self._store.get(name)) for name in names))
        for name in (*names, key):
            self._store.delete_key(name)
        return value

    def _await(self, key: str, rank: int, what: str, *, patient: bool) -> bool:
        """Wait for a rank's message. Return whether it is there; ``False`` if the rank has failed instead."""
        assert self._store is not None
        start, told, pause = time.monotonic(), False, _LOOK / 100
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
            if waited > (TELL_PATIENTLY_AFTER if patient else TELL_AFTER) and not told:
                told = True
                why = _PATIENTLY if patient else "every rank must call it"
                _log.warning("%s waits for %s: %s", what, who([rank]), why)
            time.sleep(pause)  # the store's own wait writes two lines to stderr whenever its time-out passes
            pause = min(2 * pause, _LOOK)
            # A rank sends its message before it fails, and fails before it ends. So this is checked in reverse order.
            has_ended = self._store.check([_ENDED.format(rank)])
            has_failed = self._store.check([_failed_at(key, rank)])
        return True


def _failed_at(key: str, rank: int) -> str:
    """Return the key under which a rank says that it has failed in the call to which an exchange belongs."""
    return _HAS_FAILED.format(key.partition("/")[0], rank)


def connect(rank: int, world_size: int, prefix: str, what: str) -> Exchange:
    """Connect a rank of a ``distributor`` run to the other ranks, over the store of torch's elastic agent.

    Args:
        rank: this rank.
        world_size: number of ranks.
        prefix: a text, different in each attempt. Every key that the ranks write to torch's store begins with
            ``distributor/exchange/`` and this text.
        what: the user's call, which errors quote.

    Raises:
        ConfigurationError: there are several ranks, but no store of torch's elastic agent.
    """
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
    """Connect this rank to the other ranks, over the store of the default process group.

    This function is for ranks that a launcher other than this package has started, such as torchrun. All ranks must
    call it together. The launcher may use the same store and the same restart count for several attempts. Keys in the
    store therefore contain the token of rank 0, a random text that is different in each attempt.

    Args:
        rank: this rank.
        world_size: number of ranks.
        token: a random text. Only rank 0's text is used.
        what: the user's call, which errors quote.

    Returns:
        The connection to the other ranks, and the token (random text) of rank 0.

    Raises:
        ConfigurationError: there are several ranks, and ``init_process_group`` has not been called.
    """
    if world_size == 1:
        return Exchange(None, rank, world_size), token
    import torch.distributed as dist

    if not dist.is_initialized():
        raise ConfigurationError(
            f"{what} needs a process group, since all {world_size} ranks take part in it: call "
            "torch.distributed.init_process_group() first"
        )
    told: list[Any] = [token]
    dist.broadcast_object_list(told, src=0, device=group.device())
    store: Any = dist.distributed_c10d._get_default_store()
    store = store.clone()  # a connection of its own: a waiting thread blocks a connection for all others
    return _exchange(store, rank, world_size, told[0]), told[0]


def _client(address: str, port: int) -> Any:
    import torch.distributed as dist

    patience = timedelta(seconds=GIVE_UP_AFTER)
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=patience)  # type: ignore[attr-defined]


def _exchange(store: Any, rank: int, world_size: int, prefix: str) -> Exchange:
    import torch.distributed as dist

    prefixed: Any = dist.PrefixStore(f"distributor/exchange/{prefix}", store)  # type: ignore[attr-defined]
    return Exchange(prefixed, rank, world_size)
