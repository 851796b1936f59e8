"""What local mode refuses before it starts anything."""

from __future__ import annotations

import pytest
from jobs import make_job

from distributor.errors import ConfigurationError
from distributor.launch.ray.path import Ray
from distributor.machine import network
from distributor.schedulers import local
from distributor.schedulers.local import LocalScheduler
from distributor.values.job import Widths


@pytest.mark.parametrize(
    ("reachable", "remedy"),
    [
        pytest.param((), "bring loopback up", id="down"),
        pytest.param(("::1",), "ip addr add 127.0.0.1/8 dev lo", id="only-ipv6"),
    ],
)
def test_without_an_ipv4_loopback_the_error_says_what_is_missing(
    reachable: tuple[str, ...], remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "address_towards", lambda host: host if host in reachable else None)
    with pytest.raises(ConfigurationError, match=remedy):
        LocalScheduler().check(make_job())


@pytest.mark.parametrize("options", [{}, {"launch": Ray()}])
def test_a_range_may_have_its_largest_number_of_ranks(options):
    assert LocalScheduler().room(make_job("3f2a", 2, widths=Widths(2, 4), **options)) == 4


def test_a_range_takes_the_gpus_that_no_other_run_has(monkeypatch):
    monkeypatch.setattr(local, "_held", {"0", "1"})
    job = make_job("3f2a", 1, use_gpu=True, widths=Widths(1, 4))
    assert LocalScheduler(1, ("0", "1", "2", "3")).room(job) == 2


def test_a_range_that_waits_for_gpus_says_so(monkeypatch):
    monkeypatch.setattr(local, "_held", {"0", "1", "2"})
    job = make_job("3f2a", 2, use_gpu=True, widths=Widths(2, 4))
    scheduler = LocalScheduler(1, ("0", "1", "2", "3"))
    assert scheduler.room(job) == 1
    assert str(scheduler.waiting_for()) == "waiting for GPUs of other runs"
    monkeypatch.setattr(local, "_held", set())
    assert scheduler.room(job) == 4
    assert str(scheduler.waiting_for()) == "starting a process on this machine"
