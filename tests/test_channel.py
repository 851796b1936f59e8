"""Where the driver listens, and a run whose channel breaks."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import trainings
import watch
from sessions import Make, Sessions

from distributor import Status, TorchDistributor


@pytest.mark.spark
@pytest.mark.slow
def test_the_driver_listens_on_sparks_address_only(sessions: Sessions, tmp_path: Any) -> None:
    import psutil

    sessions.get("local[2]", **{"spark.driver.host": "127.0.0.1"})
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = TorchDistributor(2, False, False, driver_ports=(port, port)).submit(trainings.wait_for, str(tmp_path / "go"))
    watch.until(lambda: run.status is Status.RUNNING)
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    (tmp_path / "go").touch()
    run.result()
    assert {connection.laddr.ip for connection in listening} == {"127.0.0.1"}
    assert port in {connection.laddr.port for connection in listening}


@pytest.mark.slow
def test_a_run_whose_channel_breaks_goes_on(make_local: Make, tmp_path: Any) -> None:
    """On one machine there is no way back for a connection: its end is that of the node."""
    run = make_local(1).submit(trainings.wait_for, str(tmp_path / "never"))
    watch.until(lambda: run.status is Status.RUNNING)
    assert run._supervisor.server is not None
    for peer in list(run._supervisor.server._peers.values()):
        run._supervisor.server._loop.call_soon_threadsafe(peer.writer.transport.abort)
    with pytest.raises(Exception, match="lost the node on .*its agent ended without giving a reason"):
        run.result(timeout=watch.DEADLINE)
    watch.gone(run.id)
