"""How a run goes from one attempt to the next."""

from __future__ import annotations

import time
from unittest.mock import Mock

from jobs import make_job

from distributor.outcomes.causes import RankFailed
from distributor.run import events
from distributor.run.margins import Margins
from distributor.run.supervisor import Supervisor
from distributor.values import messages
from distributor.values.outcome import Failure

KILLED = Failure(1, 1, "host-a", "signal", "killed by SIGKILL", signal="SIGKILL", time=5.0)
RESET = Failure(0, 0, "host-a", "RuntimeError", "RuntimeError: Connection closed by peer", "Traceback", time=4.0)
WRONG = Failure(2, 2, "host-a", "ValueError", "ValueError: no", "Traceback", time=6.0)


def test_a_restart_shows_no_traceback_of_ranks_that_only_lost_their_peer() -> None:
    display = Mock()
    supervisor = Supervisor(make_job(num_processes=4, max_restarts=1), Mock(), display, Margins())
    for failure in (RESET, KILLED, WRONG):
        supervisor.on(events.Heard("a", messages.Failed(failure)))
    assert isinstance(supervisor.state.cause, RankFailed)
    supervisor._leave(supervisor.state, "restarting its ranks", "rank 1 failed")
    display.logs.release.assert_called_once_with([0])
    supervisor._alarm.close()


def test_a_rank_that_alone_failed_is_shown_even_if_it_lost_a_connection() -> None:
    display = Mock()
    supervisor = Supervisor(make_job(num_processes=4, max_restarts=1), Mock(), display, Margins())
    supervisor.state.on(events.Heard("a", messages.Failed(RESET)), time.monotonic())
    supervisor._leave(supervisor.state, "restarting its ranks", "rank 0 failed")
    display.logs.release.assert_called_once_with([])
    assert supervisor.state.reason == "rank 0 failed: RuntimeError: Connection closed by peer"
    supervisor._alarm.close()
