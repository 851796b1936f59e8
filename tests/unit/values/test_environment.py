"""Which network interfaces ranks are told to use."""

import pytest

from distributor.values.environment import nccl_knows_better, sockets


@pytest.mark.parametrize(
    ("environ", "interface", "leave_nccl", "names"),
    [
        ({}, "eth1", False, {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}),
        ({}, "eth1", True, {"GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}),
        ({"GLOO_SOCKET_IFNAME": "ens5"}, "eth1", False, {"NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}),
        ({}, None, False, set()),
    ],
)
def test_variables_name_the_interface_unless_the_user_does(environ, interface, leave_nccl, names):
    assert set(sockets(environ, interface, leave_nccl)) == names


@pytest.mark.parametrize(
    ("settings", "knows"), [("NCCL_SOCKET_IFNAME=bond0\n", True), ("NCCL_DEBUG=WARN\n", False), (None, False)]
)
def test_nccls_own_file_wins_over_our_variable(settings, knows, tmp_path):
    """Variables of the environment would win over it."""
    path = tmp_path / "nccl.conf"
    if settings is not None:
        path.write_text(settings)
    assert nccl_knows_better({"NCCL_CONF_FILE": str(path)}, lambda name: False) == knows


@pytest.mark.parametrize(
    ("interfaces", "knows"),
    [(["lo", "eth0"], False), (["lo", "eth0", "ib0"], True), (["lo", "eth0", "ibs1"], False)],
)
def test_nccl_chooses_where_there_is_ip_over_infiniband(interfaces, knows, monkeypatch):
    monkeypatch.setattr("os.listdir", lambda path: {"/sys/class/net": interfaces}[path])
    assert nccl_knows_better({}, lambda name: name != "ibs1") == knows  # which has no address
