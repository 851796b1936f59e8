"""Sends spools to an MLflow server, in a thread of its own: a server that is down or slow delays nobody."""

from __future__ import annotations

import getpass
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from distributor.machine.storage import open_storage
from distributor.text import notices
from distributor.text.wording import printable, without_user
from distributor.tracking.mlflow_files import log_files
from distributor.tracking.names import Names
from distributor.tracking.spool import Entry, LogFolder, Params, RunBegun, RunEnded, Spool, Tags, Values
from distributor.values import codec

_log = notices.logger

KEY = "distributor.key"  # the tag by which a run is found again

SUBMITTED = "distributor.submitted"  # the tag with the time of the last run that has gone on with it

ERROR = "distributor.error"  # the tag with why it has failed

_KEPT = "tracking.json"  # beside the checkpoints

_PAUSE, _LONGEST_PAUSE = 2.0, 15.0  # seconds between two requests: the server computes for each; longer after errors

_MOST_METRICS, _MOST_OTHERS = 800, 90  # in one request; MLflow takes 1,000, and 100 of the others

_LONGEST_NAME, LONGEST_PARAM, LONGEST_TAG = 250, 500, 5000  # characters that all versions of MLflow take

#: Codes with which MLflow refuses for good what is sent, and those that concern the whole run.
_REFUSED = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "MALFORMED_REQUEST"}
_GONE = {"RESOURCE_DOES_NOT_EXIST", "NOT_FOUND", "INVALID_STATE"}


@dataclass(frozen=True)
class TrackedTraining:
    """What is kept beside the checkpoints of a training with a name: which runs of which servers it is."""

    key: str
    runs: Mapping[str, str] = field(default_factory=dict)  # MLflow's id, by server and experiment


class Server:
    """An experiment of a server, and its runs."""

    def __init__(self, client: Any, where: str, experiment: str, id: str | None = None) -> None:
        self._client = client
        self._where = where
        self._name = experiment
        self._experiment = id  # until it is known: None
        self._studies: dict[str, str] = {}  # MLflow's id of the parent, by key

    def run_of(self, begin: RunBegun) -> tuple[str, bool]:
        """Return the id of a run, and whether it was there; create it if it was not."""
        experiment = self._experiment = self._experiment or self._find_experiment()
        at = f"{self._where} {experiment}"
        storage = None if begin.place is None else open_storage(begin.place, begin.key)
        kept = TrackedTraining(begin.key)
        if storage is not None:
            with suppress(ValueError):
                kept = codec.read(TrackedTraining, storage.read(_KEPT) or b"")
            storage.write(_KEPT, codec.pack(kept))  # before the run is created: the next driver looks for the key
        known = self._studies.get(kept.key) or self._alive(kept.runs.get(at)) or self._find(experiment, kept.key)
        run = known or self._create(experiment, replace(begin, key=kept.key))
        if storage is not None:
            storage.write(_KEPT, codec.pack(replace(kept, runs={**kept.runs, at: run})))
        return run, known is not None

    def _find_experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(self._name)
        if found is None:
            try:
                return str(self._client.create_experiment(self._name))
            except MlflowException as error:
                if error.error_code != "RESOURCE_ALREADY_EXISTS":
                    raise
                found = self._client.get_experiment_by_name(self._name)
        return str(found.experiment_id)

    def _alive(self, run: str | None) -> str | None:
        from mlflow.exceptions import MlflowException

        if run is None:
            return None
        try:
            return run if self._client.get_run(run).info.lifecycle_stage == "active" else None
        except MlflowException as error:
            if error.error_code in _GONE | _REFUSED:
                return None
            raise

    def _find(self, experiment: str, key: str) -> str | None:
        found = self._client.search_runs([experiment], f"tags.`{KEY}` = '{key}'", max_results=1)
        return str(found[0].info.run_id) if found else None

    def _create(self, experiment: str, begin: RunBegun) -> str:
        tags = {KEY: begin.key, "mlflow.source.name": _text(begin.title), "mlflow.source.type": "LOCAL"}
        with suppress(Exception):  # there is no name for this user's number
            tags["mlflow.user"] = getpass.getuser()
        if revision := revision_of(begin.folder):
            tags["mlflow.source.git.commit"] = revision
        if begin.study_key is not None:
            tags["mlflow.parentRunId"] = self._parent(experiment, begin)
        made = self._client.create_run(experiment, int(1000 * begin.time), tags, begin.name)
        return str(made.info.run_id)

    def _parent(self, experiment: str, begin: RunBegun) -> str:
        assert begin.study_key is not None and begin.study is not None
        if begin.study_key not in self._studies:
            study = RunBegun(begin.study_key, None, begin.study, begin.time, begin.folder, begin.title)
            found = self._find(experiment, begin.study_key)
            self._studies[begin.study_key] = found or self._create(experiment, study)
        return self._studies[begin.study_key]


class SpoolDelivery:
    """Brings one spool to its run."""

    def __init__(self, spool: Spool, *, is_left: bool = False) -> None:
        self.spool = spool
        self.done = threading.Event()
        self.is_awaited = not is_left
        self.is_left = is_left  # by another driver: without an end, this driver was killed
        self._last = spool.changed
        self._is_past = False  # what is left is of a run with which a later one has gone on: its tags and end stay
        self.run: str | None = None  # MLflow's id
        self._known = False  # whether the server may have metrics that this driver has not sent
        self._params: dict[str, str] = {}
        self._steps: dict[str, _Steps] = {}
        self._there: dict[str, set[tuple[int, float]]] = {}  # times and values that the server had before, by name
        self._unsure: list[tuple[_Steps, int, int]] = []  # of what is being sent: a step, and the last one before it
        self._names = Names()
        self._said: set[str] = set()

    def send(self, client: Any, server: Server) -> bool:
        """Send the next part, and return whether there was one. What fails may be sent again."""
        entries, end = self.spool.read()
        if not entries and not self.is_left:
            return False
        if self.run is None and not (self.spool.is_whole and not entries):
            run, self._known = server.run_of(self._begin)
            if self._known:
                data = client.get_run(run).data
                self._params = dict(data.params)
                self._is_past = self.is_left and self._has_gone_on(client, run)
                if not self.is_left:
                    client.update_run(run, status="RUNNING")
                    if ERROR in data.tags:
                        client.delete_tag(run, ERROR)
            self.run = run
        if not entries:
            self._finish(client, RunEnded("KILLED", self._last))
            return False
        try:
            self._send(client, entries)
        except BaseException:
            for steps, step, last in reversed(self._unsure):
                steps.give_back(step, last)
            raise
        finally:
            self._unsure.clear()
        if isinstance(entries[-1], RunEnded):
            self._finish(client, entries[-1])
            return False
        self.spool.acknowledge(end)
        return True

    @property
    def _begin(self) -> RunBegun:
        return codec.read(RunBegun, self.spool.begin)

    def _has_gone_on(self, client: Any, run: str) -> bool:
        """Whether a later run of ours has gone on with this one of MLflow's."""
        return float(client.get_run(run).data.tags.get(SUBMITTED, 0.0)) > self._begin.time

    def _finish(self, client: Any, end: RunEnded) -> None:
        if self.run is not None:
            with self._refusals("its end"):
                if not self._has_gone_on(client, self.run):
                    client.set_terminated(self.run, end.status, int(1000 * end.ended))
        self._steps.clear()
        self._there.clear()  # a trial stays until the end of its study
        self.spool.remove()
        self.done.set()

    def _send(self, client: Any, entries: Sequence[Entry]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        metrics: list[Any] = []
        others: list[Any] = []
        for entry in entries:
            match entry:
                case Values():
                    for name, value in entry.values.items():
                        clean = self._rename(name)
                        number, at = float(value), int(1000 * entry.at)
                        if (step := self._new_step(client, clean, entry.step, (at, number))) is not None:
                            metrics.append(Metric(clean, number, at, step))
                case Params() | Tags() if self._is_past:
                    pass
                case Params():
                    for name, value in entry.params.items():
                        clean, value = self._rename(name), _text(value)[:LONGEST_PARAM]
                        if self._params.setdefault(clean, value) == value:
                            others.append(Param(clean, value))
                        else:
                            others.append(RunTag(f"changed.{clean}"[:_LONGEST_NAME], value))
                case Tags():
                    others += [
                        RunTag(name[:_LONGEST_NAME], _text(text)[:LONGEST_TAG]) for name, text in entry.tags.items()
                    ]
                case LogFolder():
                    try:
                        log_files(client, str(self.run), entry.files, "logs")
                    except Exception as error:  # of the store for files, which may need another package
                        self._say(entry.files, f"does not take the files of {entry.files}: {error}")
        for items, most in ((others, _MOST_OTHERS), (metrics, _MOST_METRICS)):
            for first in range(0, len(items), most):
                self._send_batch(client, items[first : first + most])

    def _send_batch(self, client: Any, items: Sequence[Any]) -> None:
        """Send metrics, parameters and tags; of those that are refused, all that are not."""
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.exceptions import MlflowException

        kinds = [[item for item in items if isinstance(item, kind)] for kind in (Metric, Param, RunTag)]
        with self._refusals("what follows", _GONE):
            try:
                client.log_batch(self.run, *kinds, synchronous=True)
            except MlflowException as error:
                if error.error_code not in _REFUSED:
                    raise
                if len(items) == 1:
                    self._say(items[0].key, f"refuses {items[0].key!r}, which is left out: {error.message}")
                    return
                middle = len(items) // 2
                self._send_batch(client, items[:middle])
                self._send_batch(client, items[middle:])

    def _new_step(self, client: Any, name: str, step: int | None, sent: tuple[int, float]) -> int | None:
        """Return the step under which a value is sent; ``None`` if there is a value already.

        One without a step is there if its time and value are: a driver may have been killed once the server had it.
        """
        if name not in self._steps:
            history = client.get_metric_history(self.run, name) if self._known else ()
            self._steps[name] = _Steps({each.step for each in history})
            self._there[name] = {(each.timestamp, each.value) for each in history}
        if step is None and sent in self._there[name]:
            return None
        steps = self._steps[name]
        last = steps.last
        if (taken := steps.take(step)) is not None:
            self._unsure.append((steps, taken, last))
        return taken

    def _rename(self, name: str) -> str:
        clean = self._names(name)
        if clean != name:
            self._say(name, f"does not take the name {name[:100]!r}, which is {clean!r} there")
        return clean

    def _say(self, what: str, text: str) -> None:
        if what not in self._said:
            self._said.add(what)
            _log.warning("MLflow %s", text)

    @contextmanager
    def _refusals(self, what: str, codes: Collection[str] = _REFUSED | _GONE) -> Iterator[None]:
        """Say once what the server refuses for good; let pass other errors, after which it is sent again."""
        from mlflow.exceptions import MlflowException

        try:
            yield
        except MlflowException as error:
            if error.error_code not in codes:
                raise
            self._say(what, f"refuses {what}: {error.message}")

    def leave(self) -> None:
        """Leave what is unsent to the next callback for the server."""
        self.spool.release()
        self.done.set()


class _Steps:
    """The steps of a name that have a value. Values without a step get the next one, and are not kept one by one."""

    def __init__(self, taken: set[int]) -> None:
        self._taken = taken
        self.last = max(taken, default=-1)

    def take(self, step: int | None) -> int | None:
        """Return the step of a new value; ``None`` if there is one already.

        >>> steps = _Steps({1})
        >>> [steps.take(step) for step in (0, 1, None, 2, 3)]
        [0, None, 2, None, 3]
        """
        if step is not None and not self._taken:
            self._taken = set(range(self.last + 1))
        taken = self.last + 1 if step is None else step
        if taken in self._taken:
            return None
        if self._taken or step is not None:
            self._taken.add(taken)
        self.last = max(self.last, taken)
        return taken

    def give_back(self, step: int, last: int) -> None:
        """Undo the latest :meth:`take`, before which ``last`` was the last step.

        >>> steps = _Steps(set())
        >>> steps.take(None), steps.give_back(0, -1), steps.take(None), steps.take(5), steps.give_back(5, 0)
        (0, None, 0, 5, None)
        >>> steps.take(5), steps.take(None)
        (5, 6)
        """
        self._taken.discard(step)
        self.last = last


class Sender:
    """The thread that sends; it ends when there is nothing left to send."""

    def __init__(self, folder: Path, connect: Callable[[], tuple[Any, Server]], where: str) -> None:
        self._folder = folder
        self._connect = connect
        self._where = where
        self._deliveries: list[SpoolDelivery] = []
        self._changed = threading.Condition()
        self._woken = False
        self._awaited = 0  # calls of wait(), in which nothing pauses while there is something to send
        self._thread: threading.Thread | None = None
        self._client: tuple[Any, Server] | None = None
        self._adopted = False
        self._failed = False  # said
        self._refused = False  # said

    def add(self, spool: Spool) -> SpoolDelivery:
        """Begin to send a spool."""
        delivery = SpoolDelivery(spool)
        with self._changed:
            self._deliveries.append(delivery)
            self._adopted = False
            self._woken = True
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="distributor-mlflow", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return delivery

    def wait(self, deliveries: Sequence[SpoolDelivery], timeout: float) -> list[SpoolDelivery]:
        """Wait until spools have been sent, for ``timeout`` seconds at most, and return those that have not.

        These are left to the next callback when a request fails, not before: a request under way may still succeed.
        """
        deadline = time.monotonic() + timeout
        self._await(1)
        for delivery in deliveries:
            delivery.done.wait(max(0.0, deadline - time.monotonic()))
        late = [delivery for delivery in deliveries if not delivery.done.is_set()]
        for delivery in late:
            delivery.is_awaited = False
        self._await(-1)
        return late

    def _await(self, change: int) -> None:
        with self._changed:
            self._awaited += change
            self._woken = True
            self._changed.notify_all()

    def _serve(self) -> None:
        pause = _PAUSE
        while True:
            with self._changed:
                self._deliveries = [each for each in self._deliveries if not each.done.is_set()]
                if not self._deliveries:
                    self._thread = None
                    return
            try:
                busy = self._send()
                pause = _PAUSE
            except Exception as error:  # of the network, of the server, of its database
                self._tell(error)
                pause, busy = min(2 * pause, _LONGEST_PAUSE), False
                if not any(each.is_awaited for each in self._deliveries):
                    for delivery in self._deliveries:
                        delivery.leave()
                    continue
            if not (busy and self._awaited):
                with self._changed:
                    self._changed.wait_for(lambda: self._woken, pause)
                    self._woken = False

    def _tell(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            why = _first_line(error)
            _log.warning("MLflow at %s does not answer; reports wait in %s: %s", self._where, self._folder, why)

    def _tell_refused(self, error: Exception) -> None:
        if not self._refused:
            self._refused = True
            why = _first_line(error)
            _log.warning("MLflow at %s refuses runs; their reports stay in %s: %s", self._where, self._folder, why)

    def _send(self) -> bool:
        """Send a part of each spool, those of earlier drivers first, and return whether there was any."""
        client, server = self._client = self._client or self._connect()
        if not self._adopted:
            left = [SpoolDelivery(spool, is_left=True) for spool in Spool.left_in(self._folder)]
            with self._changed:
                self._deliveries = [*left, *self._deliveries]
            self._adopted = True
        busy, failed = False, []
        deliveries = list(self._deliveries)
        for delivery in deliveries:
            try:
                while not delivery.done.is_set() and delivery.send(client, server):
                    busy = True
                    if not delivery.is_left:
                        break
            except Exception as error:
                if _is_refusal(error):
                    delivery.leave()
                    self._tell_refused(error)
                else:
                    failed.append((delivery, error))
        if any(not delivery.is_left for delivery, _ in failed) or len(failed) == len(deliveries) > 0:
            raise failed[0][1]
        for delivery, why in failed:  # only what others have left: the server answers
            delivery.leave()
            _log.warning("MLflow: %s, of an earlier driver, is not sent: %s", delivery.spool.path, _first_line(why))
        return busy


def _text(text: str) -> str:
    """Return a text as all databases take it, such as the name of a file that is not UTF-8.

    >>> _text("a\\udcff\\0b")
    'a\\\\udcff\\\\0b'
    """
    return printable(text).replace("\0", "\\0")


def _is_refusal(error: Exception) -> bool:
    """Return whether the server refuses a whole run for good, as in an experiment that was deleted."""
    from mlflow.exceptions import MlflowException

    return isinstance(error, MlflowException) and error.error_code in _REFUSED


def _first_line(error: Exception) -> str:
    return without_user(str(error).partition("\n")[0][:300])


def revision_of(folder: str) -> str | None:
    """Return the commit of the repository that a folder is in; ``None`` without one."""
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None
