"""A Spark standalone cluster over several hosts of this one machine: network namespaces on a bridge.

The driver and the master stay outside, at the bridge's own address. Needs root. A host has its own addresses, loopback,
name and temporary folder; processes and files are the machine's, so that tests see them.

The hosts hold the traps of real ones: a host's own name means loopback there, the interface that leads to the others
is called differently on each, another one has the same address everywhere, and there is no name server.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from importlib.util import find_spec
from ipaddress import IPv4Network, IPv6Network
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import watch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds until a daemon is up: a JVM each, on a busy machine.
START_DEADLINE = 180.0

#: Names of bridges, and beginnings of all other names: the owner's pid, and a number of its own. 15 characters at most.
_PREFIX = "hosts"
_NAMESPACES = Path("/run/netns")
_NAMESPACES_ETC = Path("/etc/netns")
_POOL = IPv4Network("10.64.0.0/10")
_PREFIX_LENGTH = 24
_numbers = itertools.count()

_DEPLOY = "org.apache.spark.deploy"

#: The end of names that belong to the driver's own network to the hosts, if it has one.
_SEPARATE = "d"

#: What interfaces are called on the first host, the second, ...
INTERFACES = ("eth0", "ens5", "enp3s0", "net1")

#: An interface that each host has for itself, as Docker makes one.
_DECOY = ("docker0", "172.17.0.1/16")

#: Where hosts look for their name server.
NAME_SERVER = "172.17.0.1"


@cache
def why_not() -> str | None:
    """The reason why hosts cannot be made here, ``None`` if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command in ("ip", "unshare", "setpriv", "java"):
        if shutil.which(command) is None:
            return f"no {command} here"
    if find_spec("pyspark") is None:
        return "no pyspark here"
    trial = f"{_PREFIX}{os.getpid()}-trial"
    try:
        _ip("netns", "add", trial)
        try:
            _ip("-n", trial, "link", "add", "bridge", "type", "bridge")
            _ip("-n", trial, "link", "add", "one", "type", "veth", "peer", "name", "two")
            _ip("netns", "exec", trial, "unshare", "--uts", "hostname", "trial")
        finally:
            _ip("netns", "delete", trial)
    except RuntimeError as error:
        return str(error)
    return None


class Hosts:
    """A master and one worker on each host. Use as a context manager.

    Args:
        names: what the hosts call themselves; only they resolve these names.
        cores: of each host, all of which its one executor gets.
        memory: of each host.
        executor_memory: of each executor, if a host's memory is not for one.
        shm: size of /dev/shm on some hosts, by host, as mount(8) has it; others have the machine's.
        gpus: what each host's discovery script reports, by host.
        separate: hosts reach the driver over one network, on which they do not reach each other, and each other over
            another, whose addresses are those of the workers.
        ipv6: addresses are of IPv6, and of no other kind.
        environ: environment variables of the daemons on some hosts, by host.
        conf: Spark settings of the master and the workers, such as ``spark.worker.timeout``.
    """

    def __init__(
        self,
        names: Sequence[str] = ("host-a", "host-b"),
        cores: int | Mapping[str, int] = 2,
        memory: str = "1g",
        executor_memory: str | None = None,
        shm: Mapping[str, str] | None = None,
        gpus: Mapping[str, Sequence[str]] | None = None,
        separate: bool = False,
        ipv6: bool = False,
        environ: Mapping[str, Mapping[str, str]] | None = None,
        conf: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self.folder = _folder(self.name)
        self.master = ""
        self.driver_address = ""
        self.addresses: dict[str, str] = {}
        self._names = names
        self._cores = dict.fromkeys(names, cores) if isinstance(cores, int) else dict(cores)
        self._memory = memory
        self._executor_memory = executor_memory or memory
        self._shm = dict(shm or {})
        self._gpus = dict(gpus or {})
        self._separate = separate
        self._ipv6 = ipv6
        self._prefix_length = 64 if ipv6 else _PREFIX_LENGTH
        self._at_once = ("nodad",) if ipv6 else ()
        self._environ = dict(environ or {})
        self._conf = dict(conf or {})
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._session: SparkSession | None = None

    def __enter__(self) -> Hosts:
        for folder in Path(tempfile.gettempdir()).iterdir():
            stale = re.fullmatch(rf"spark-({_PREFIX}(\d+)-\d+)", folder.name)
            if stale and not psutil.pid_exists(int(stale[2])):
                with suppress(RuntimeError, OSError):  # others may be removing it as well
                    _remove(stale[1])
        _remove(self.name)  # of a process that had this pid
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop_session()
        finally:
            for process in self._daemons.values():
                process.kill()
                process.wait()
            _remove(self.name)

    def session(self, **settings: str) -> SparkSession:
        """A classic session from this process, stopped on leaving at the latest; there must be no other one.

        Args:
            settings: Spark's, the master's address and everything else that is needed beside.
        """
        from pyspark import SparkContext
        from pyspark.sql import SparkSession

        assert SparkContext._active_spark_context is None, "a process has one Spark context at a time: stop it first"
        os.environ["PYSPARK_PYTHON"] = sys.executable
        # The settings that a JVM is started with stay those of all its later sessions: start it with none.
        SparkContext._ensure_initialized()
        builder = SparkSession.builder.master(self.master).appName("distributor tests")
        defaults = {
            "spark.driver.host": self.driver_address,
            "spark.driver.bindAddress": self.driver_address,
            "spark.executor.memory": self._executor_memory,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        for key, value in {**defaults, **settings}.items():
            builder = builder.config(key, value)
        self._session = builder.getOrCreate()
        self._session.sparkContext.setLogLevel("OFF")
        return self._session

    @property
    def active(self) -> SparkSession:
        """The session that is there."""
        assert self._session is not None
        return self._session

    def stop_session(self) -> None:
        if self._session is not None:
            self._session.stop()
            self._session = None

    def within(self, name: str) -> list[str]:
        """What to put before a command to have it run on a host."""
        first = f"hostname {name}"
        if name in self._shm:  # `ip netns exec` has given it mounts of its own
            first += f" && mount -t tmpfs -o size={self._shm[name]} shm /dev/shm"
        return [
            *("ip", "netns", "exec", self._namespace(name), "unshare", "--uts"),
            *("sh", "-c", f'{first} && exec "$@"', "sh"),
        ]

    @contextmanager
    def dead_name_server(self, name: str) -> Iterator[Callable[[], list[str]]]:
        """Gives a host a name server that never answers; yields what tells which names it was asked for so far."""
        script = Path(__file__).with_name("dead_name_server.py")
        log = self.folder / name / "names"
        with open(log, "wb") as out:
            server = subprocess.Popen([*self.within(name), sys.executable, str(script), NAME_SERVER], stdout=out)
        try:
            watch.until(lambda: log.read_text().startswith("ready"), START_DEADLINE)
            yield lambda: log.read_text().splitlines()[1:]
        finally:
            server.kill()
            server.wait()

    def kill(self, name: str) -> None:
        """Kills a host's worker daemon, or the ``"master"``."""
        self._daemons[name].kill()
        self._daemons[name].wait()

    def connect_server(self, **settings: str) -> str:
        """Starts a Spark Connect server beside the master; returns its URL."""
        defaults = {
            "spark.driver.host": self.driver_address,
            "spark.driver.bindAddress": self.driver_address,
            "spark.connect.grpc.binding.address": self.driver_address,
            "spark.connect.grpc.binding.port": "0",
            "spark.executor.memory": self._executor_memory,
            "spark.ui.enabled": "false",
        }
        confs = [item for key, value in {**defaults, **settings}.items() for item in ("--conf", f"{key}={value}")]
        daemon = self._daemon(
            "connect",
            [],
            [
                *(f"{_DEPLOY}.SparkSubmit", "--master", self.master, *confs),
                *("--class", "org.apache.spark.sql.connect.service.SparkConnectServer", "spark-internal"),
            ],
        )
        port = self._logged("connect", daemon, r"Spark Connect server started at: \S*?:(\d+)")
        return f"sc://{self.driver_address}:{port}"

    def java_environ(self) -> dict[str, str]:
        """What every JVM needs to be one of this cluster: Java prefers addresses of IPv4 unless it is told."""
        return {
            "JAVA_TOOL_OPTIONS": "-Djava.net.preferIPv6Addresses=true" if self._ipv6 else "",
            "SPARK_PREFER_IPV6": "true" if self._ipv6 else "",
        }

    def cut(self, name: str) -> None:
        """Pulls a host's cable: packets vanish in both directions, and no connection is told."""
        _ip("link", "set", self._cable(name), "down")

    def mend(self, name: str) -> None:
        """Puts the cable back."""
        _ip("link", "set", self._cable(name), "up")

    def part(self) -> None:
        """Lets no host reach another; all still reach the driver. Cables that are put back end it."""
        for name in self.addresses:
            _ip("link", "set", self._cable(name), "type", "bridge_slave", "isolated", "on")

    def processes(self, name: str) -> list[int]:
        """The pids on a host: the worker daemon's, executors', their Python workers' and whatever these started."""
        return _pids(self._namespace(name))

    def temporary(self, name: str) -> Path:
        """A host's folder for temporary files."""
        return self.folder / name / "tmp"

    def memory(self, name: str) -> Path:
        """A host's shared memory: its own, or the machine's."""
        return Path("/proc", str(self._daemons[name].pid), "root/dev/shm")

    def _namespace(self, name: str) -> str:
        return f"{self.name}-{name}"

    def _cable(self, name: str) -> str:
        """The bridge's end of a host's link; names of links are short."""
        return f"v{self.name.removeprefix(_PREFIX)}-{list(self.addresses).index(name)}"

    def _interface(self, name: str) -> str:
        return INTERFACES[list(self.addresses).index(name)]

    def _start(self) -> None:
        self.folder.mkdir(mode=0o700)  # first made, last removed: what else there is can be found by its name
        network: IPv4Network | IPv6Network = _free_network()
        if self._ipv6:
            number = int(network.network_address)  # as free as its twin
            network = IPv6Network(f"fd00:{number >> 16:x}:{number & 0xFFFF:x}::/64")
        first, *others = itertools.islice(network.hosts(), len(self._names) + 1)
        self.driver_address = str(first)
        self.addresses = {name: str(address) for name, address in zip(self._names, others)}
        conf = self.folder / "conf"
        conf.mkdir()
        (conf / "spark-defaults.conf").write_text("".join(f"{key} {value}\n" for key, value in self._conf.items()))
        self._build_bridge(self.name, self.driver_address)
        for name in self.addresses:
            self._connect(name)
        if self._separate:
            self._separate_driver()
        if self._gpus:
            script = self.folder / "discover.sh"
            answers = {name: json.dumps({"name": "gpu", "addresses": list(gpus)}) for name, gpus in self._gpus.items()}
            cases = [f"{name}) echo '{answer}';;\n" for name, answer in answers.items()]
            script.write_text(f"#!/bin/sh\ncase $(hostname) in\n{''.join(cases)}esac\n")
            script.chmod(0o755)
        ports = ("--port", "0", "--webui-port", "0")
        at = ("--host", _bracketed(self.driver_address))
        master = self._daemon("master", [], [f"{_DEPLOY}.master.Master", *at, *ports])
        self.master = self._logged("master", master, r"Starting Spark master at (spark://\S+)")
        workers = {}
        for name, address in self.addresses.items():
            size = ("--cores", str(self._cores[name]), "--memory", self._memory)
            first = ("--host", _bracketed(address), *ports, *size, "--work-dir", str(self.folder / name))
            command = [f"{_DEPLOY}.worker.Worker", *first, *self._worker_properties(name), self.master]
            workers[name] = self._daemon(name, self.within(name), command, address)
        for name, worker in workers.items():
            self._logged(name, worker, r"(Successfully registered) with master")

    def _build_bridge(self, bridge: str, address: str) -> None:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("address", "add", f"{address}/{self._prefix_length}", "dev", bridge, *self._at_once)
        _ip("link", "set", bridge, "up")

    def _separate_driver(self) -> None:
        """Gives the driver a network of its own to each host; it keeps its address on the hosts' own."""
        bridge = f"{self.name}{_SEPARATE}"
        first, *others = itertools.islice(_free_network().hosts(), len(self._names) + 1)
        self.driver_address = str(first)
        self._build_bridge(bridge, self.driver_address)
        for name, address in zip(self.addresses, others):
            namespace, cable = self._namespace(name), f"{self._cable(name)}{_SEPARATE}"
            _ip("link", "add", cable, "type", "veth", "peer", "name", "mgmt0", "netns", namespace)
            _ip("link", "set", cable, "master", bridge, "up")
            _ip("link", "set", cable, "type", "bridge_slave", "isolated", "on")  # from each other
            _ip("-n", namespace, "address", "add", f"{address}/{_PREFIX_LENGTH}", "dev", "mgmt0")
            _ip("-n", namespace, "link", "set", "mgmt0", "up")

    def _connect(self, name: str) -> None:
        namespace = self._namespace(name)
        _ip("netns", "add", namespace)
        _ip("-n", namespace, "link", "set", "lo", "up")
        decoy, address = _DECOY
        _ip("-n", namespace, "link", "add", decoy, "type", "bridge")
        _ip("-n", namespace, "address", "add", address, "dev", decoy)
        _ip("-n", namespace, "link", "set", decoy, "up")
        self._lay_cable(name)
        known = {**self.addresses, "localhost": "127.0.0.1", name: "127.0.0.1"}
        etc = _NAMESPACES_ETC / namespace  # what lies here hides its like in /etc from `ip netns exec`
        etc.mkdir(parents=True)
        (etc / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        (etc / "resolv.conf").write_text(f"nameserver {NAME_SERVER}\noptions timeout:1 attempts:1\n")

    def _worker_properties(self, name: str) -> list[str]:
        """A file of settings for a host's worker, in place of everybody's."""
        if name not in self._gpus:
            return []
        path = self.folder / f"{name}.conf"
        settings = {
            **self._conf,
            "spark.worker.resource.gpu.amount": str(len(self._gpus[name])),
            "spark.worker.resource.gpu.discoveryScript": str(self.folder / "discover.sh"),
        }
        path.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        return ["--properties-file", str(path)]

    def _lay_cable(self, name: str) -> None:
        cable, namespace, interface = self._cable(name), self._namespace(name), self._interface(name)
        _ip("link", "add", cable, "type", "veth", "peer", "name", interface, "netns", namespace)
        _ip("link", "set", cable, "master", self.name, "up")
        address = f"{self.addresses[name]}/{self._prefix_length}"
        _ip("-n", namespace, "address", "add", address, "dev", interface, *self._at_once)
        _ip("-n", namespace, "link", "set", interface, "up")

    def _daemon(
        self, name: str, within: Sequence[str], command: Sequence[str], address: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a daemon as this process's child: every command on the way to it replaces the one before."""
        from pyspark.find_spark_home import _find_spark_home

        home = _find_spark_home()
        temporary = self.temporary(name)
        temporary.mkdir(parents=True)
        environ = {
            **os.environ,
            "SPARK_HOME": home,
            "SPARK_CONF_DIR": str(self.folder / "conf"),
            "SPARK_LOCAL_IP": address or self.driver_address,
            **self.java_environ(),
            "SPARK_LOCAL_DIRS": str(temporary),
            "TMPDIR": str(temporary),
            "PYSPARK_PYTHON": sys.executable,
            **self._environ.get(name, {}),
        }
        # With the compiler's first stage alone, and without verification of classes, a JVM is up in half the time.
        quick = "-XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
        environ["JAVA_TOOL_OPTIONS"] += f" -Djava.io.tmpdir={temporary} -XX:+UseSerialGC {quick}"
        # With this thread its daemons end, however that ends; what they leave then is removed by a later start.
        whole = ["setpriv", "--pdeathsig", "KILL", *within, f"{home}/bin/spark-class", *command]
        with open(self.folder / name / "log", "wb") as log:
            daemon = subprocess.Popen(whole, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ)
        self._daemons[name] = daemon
        return daemon

    def _logged(self, name: str, daemon: subprocess.Popen[bytes], pattern: str) -> str:
        """Waits for a line of a daemon's log."""
        log = self.folder / name / "log"

        def matching_line() -> re.Match[str] | None:
            ended = daemon.poll() is not None
            match = re.search(pattern, log.read_text())
            assert match or not ended, f"the daemon on {name} ended:\n{log.read_text()[-2000:]}"
            return match

        match = watch.until(matching_line, START_DEADLINE)
        assert match is not None
        return match[1]


def require() -> None:
    """Skips the test where hosts cannot be made, and fails it where they have to be (``REQUIRE_HOSTS=1``)."""
    if reason := why_not():
        if os.environ.get("REQUIRE_HOSTS"):
            pytest.fail(f"hosts are required here: {reason}")
        pytest.skip(reason)


def _bracketed(address: str) -> str:
    """An address as Spark wants it for a host."""
    return f"[{address}]" if ":" in address else address


def _ip(*args: str) -> str:
    done = subprocess.run(["ip", *args], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(args)}: {done.stderr.strip()}")
    return done.stdout


def _folder(name: str) -> Path:
    return Path(tempfile.gettempdir(), f"spark-{name}")


def _free_network() -> IPv4Network:
    """A network that this machine has no route to. Processes begin to look at different places."""
    routes = json.loads(_ip("-json", "route"))
    taken = [IPv4Network(route["dst"]) for route in routes if route["dst"] != "default"]
    pool = list(_POOL.subnets(new_prefix=_PREFIX_LENGTH))
    first = os.getpid() % len(pool)
    return next(one for one in pool[first:] + pool[:first] if not any(one.overlaps(other) for other in taken))


def _pids(namespace: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", namespace).split()]


def _ended(namespace: str) -> bool:
    """Kills what runs in a namespace; whether there was nothing left."""
    pids = _pids(namespace)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return not pids


def _remove(name: str) -> None:
    """Ends and removes everything there may be of some hosts, all found by their name."""
    namespaces = [path.name for path in _NAMESPACES.glob(f"{name}-*")]
    for namespace in namespaces:
        watch.until(partial(_ended, namespace))
    for bridge in (Path("/sys/class/net", name), Path("/sys/class/net", name + _SEPARATE)):
        for cable in bridge.glob("brif/*"):
            _ip("link", "delete", cable.name)
        if bridge.exists():
            _ip("link", "delete", bridge.name)
    for namespace in namespaces:
        _ip("netns", "delete", namespace)
    for etc in _NAMESPACES_ETC.glob(f"{name}-*"):
        shutil.rmtree(etc, ignore_errors=True)
    shutil.rmtree(_folder(name), ignore_errors=True)
