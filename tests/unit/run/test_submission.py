"""How many ranks a job gets, and whether more of them could go on."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import watch
from jobs import make_job

from distributor import ConfigurationError
from distributor.run import handle
from distributor.run.alarm import Alarm
from distributor.run.events import Room
from distributor.run.handle import Run
from distributor.run.margins import Margins
from distributor.run.submission import Submission
from distributor.values.job import Job, Widths


class Rooms:
    """A scheduler that has this room, one after the other; the last one stays."""

    slots_may_come = False
    on_driver = False

    def __init__(self, *rooms: int | Exception | None) -> None:
        self.rooms = [*rooms]

    def again(self, job: Job) -> Rooms:
        return self

    def room(self, job: Job) -> int | None:
        room = self.rooms.pop(0) if len(self.rooms) > 1 else self.rooms[0]
        if isinstance(room, Exception):
            raise room
        return room


def resize(job: Job, width: int) -> Job:
    """What a launch path does that cannot start five or seven ranks."""
    if width in (5, 7):
        raise ConfigurationError(f"{width} ranks do not fit")
    return replace(job, resources=replace(job.resources, num_processes=width))


def made(*rooms: int | Exception | None, least: int = 2, most: int = 8, now: int = 2, **fields: Any) -> Submission:
    job = make_job(num_processes=now, widths=Widths(least, most), **fields)
    scheduler: Any = Rooms(*rooms)
    return Submission(job, scheduler, Alarm(), Margins(), resize)


def fitted(submission: Submission) -> int:
    submission.fit(lambda: True)
    return submission.job.resources.num_processes


@pytest.mark.parametrize(
    ("rooms", "expected"), [((20,), 8), ((6,), 6), ((5,), 4), ((1, 0, 3), 3), ((None,), 2)], ids=str
)
def test_a_job_gets_as_many_ranks_as_there_is_room_for(
    rooms: tuple[int | None, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributor.run.submission._LOOK", 0.0)
    assert fitted(made(*rooms)) == expected


def test_more_slots_are_awaited_while_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("distributor.run.submission._LOOK", 0.0)
    submission = made(2, 2, 4, 4, 8)
    monkeypatch.setattr(Rooms, "slots_may_come", True)
    assert fitted(submission) == 8


def test_a_job_that_is_no_longer_wanted_stays_as_it_is() -> None:
    submission = made(20)
    submission.fit(lambda: False)
    assert submission.job.resources.num_processes == 2


def test_what_fits_no_number_of_ranks_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="5 ranks do not fit"):
        made(20, least=5, most=5, now=6).fit(lambda: True)


def test_an_error_of_the_scheduler_is_raised() -> None:
    with pytest.raises(RuntimeError, match="stopped"):
        fitted(made(RuntimeError("stopped")))


@pytest.mark.parametrize(
    ("now", "rooms", "further"), [(2, 0, 0), (2, 1, 1), (4, 1, 0), (4, 2, 2), (6, 20, 2), (8, 4, 0), (2, None, 0)]
)
def test_only_more_ranks_that_could_go_on_count(now: int, rooms: int | None, further: int) -> None:
    assert made(rooms, now=now).look_for_room() == Room(further)


def test_tasks_of_several_ranks_are_not_split() -> None:
    assert made(3, now=2, ranks_per_task=2).look_for_room() == Room(2)
    assert made(1, now=2, ranks_per_task=2).look_for_room() == Room(0)


def test_a_job_that_was_to_be_wider_and_is_not_does_not_try_again() -> None:
    following = made(4, now=4).following(make_job(num_processes=4, widths=Widths(2, 8)), wider=True)
    assert following.look_for_room() == Room(0)
    following.job = replace(following.job, resources=replace(following.job.resources, num_processes=6))
    assert following.look_for_room() == Room(2)


def test_a_run_that_waits_for_slots_lets_no_other_widen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would get those that the ranks of the other leave."""
    wants = Mock(_wants_slots=lambda on_driver: not on_driver)
    monkeypatch.setattr(handle, "_active", {wants: None})
    scheduler: Any = Rooms(2)
    job = make_job(num_processes=2, widths=Widths(2, 8))
    submission = Run(job, scheduler, resize=resize)._supervisor.submission
    assert submission.look_for_room() == submission.following(job).look_for_room() == Room(0)
    monkeypatch.setattr(Rooms, "on_driver", True)
    assert submission.look_for_room() == Room(2)


def test_a_scheduler_that_cannot_tell_widens_nothing() -> None:
    assert made(RuntimeError("stopping")).look_for_room() == Room(0)


def test_a_job_is_ended_again_until_it_has_ended() -> None:
    """The first time, Spark may not know the job yet, or the call may fail."""
    calls, ended = [], threading.Event()

    class Slow(Rooms):
        def cancel(self) -> bool:
            calls.append(len(calls))
            if len(calls) == 2:
                raise OSError("the connection broke")
            if len(calls) == 4:
                ended.set()
            return False

        def run(self, job: Job, server: Any) -> Any:
            assert ended.wait(watch.DEADLINE)

    alarm, scheduler = Alarm(), Slow(1)
    submission = Submission(make_job(), scheduler, alarm, Margins(insist=0.01))  # type: ignore[arg-type]
    alarm.start()
    submission.end()
    submission.run(None)  # type: ignore[arg-type]
    submission.end()
    alarm.after(0.1, ended.clear)
    watch.until(lambda: not ended.is_set())
    alarm.close()
    assert calls == [0, 1, 2, 3]
