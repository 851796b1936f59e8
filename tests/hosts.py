"""A Spark standalone cluster over several hosts of this one machine: network namespaces on a bridge.

The driver and the master stay outside, at the bridge's own address. Needs root. A host has its own addresses, loopback,
name and temporary folder; processes and files are the machine's, so that tests see them.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from importlib.util import find_spec
from ipaddress import IPv4Network
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import watch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Seconds until a daemon is up: a JVM each, on a busy machine.
START_DEADLINE = 60.0

#: Names of bridges, and beginnings of all other names: the owner's pid, and a number of its own. 15 characters at most.
_PREFIX = "hosts"
_NAMESPACES = Path("/run/netns")
_NAMESPACES_ETC = Path("/etc/netns")
_POOL = IPv4Network("10.64.0.0/10")
_PREFIX_LENGTH = 24
_numbers = itertools.count()


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
        cores: of each host, and of its one executor.
        memory: of each host, and of its one executor.
        conf: Spark settings of the master and the workers, such as ``spark.worker.timeout``.
    """

    def __init__(
        self,
        names: Sequence[str] = ("host-a", "host-b"),
        cores: int = 2,
        memory: str = "1g",
        conf: Mapping[str, str] | None = None,
    ) -> None:
        self.name = f"{_PREFIX}{os.getpid()}-{next(_numbers)}"
        self.folder = _folder(self.name)
        self.master = ""
        self.driver_address = ""
        self.addresses: dict[str, str] = {}
        self._names = names
        self._cores = cores
        self._memory = memory
        self._conf = dict(conf or {})
        self._daemons: list[subprocess.Popen[bytes]] = []
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
            if self._session is not None:
                self._session.stop()
        finally:
            for daemon in self._daemons:
                daemon.kill()
                daemon.wait()
            _remove(self.name)

    def session(self, **settings: str) -> SparkSession:
        """A classic session from this process, stopped on leaving at the latest; there must be no other one."""
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
            "spark.executor.cores": str(self._cores),
            "spark.executor.memory": self._memory,
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
        }
        for key, value in {**defaults, **settings}.items():
            builder = builder.config(key, value)
        self._session = builder.getOrCreate()
        self._session.sparkContext.setLogLevel("OFF")
        return self._session

    def cut(self, name: str) -> None:
        """Pulls a host's cable: packets vanish in both directions, and no connection is told."""
        _ip("link", "set", self._cable(name), "down")

    def mend(self, name: str) -> None:
        """Puts the cable back."""
        _ip("link", "set", self._cable(name), "up")

    def processes(self, name: str) -> list[int]:
        """The pids on a host: the worker daemon's, executors', their Python workers' and whatever these started."""
        return _pids(self._namespace(name))

    def _namespace(self, name: str) -> str:
        return f"{self.name}-{name}"

    def _cable(self, name: str) -> str:
        """The bridge's end of a host's link; names of links are short."""
        return f"v{self.name.removeprefix(_PREFIX)}-{list(self.addresses).index(name)}"

    def _start(self) -> None:
        self.folder.mkdir(mode=0o700)  # first made, last removed: what else there is can be found by its name
        own, *others = itertools.islice(_free_network().hosts(), len(self._names) + 1)
        self.driver_address = str(own)
        self.addresses = {name: str(address) for name, address in zip(self._names, others)}
        conf = self.folder / "conf"
        conf.mkdir()
        (conf / "spark-defaults.conf").write_text("".join(f"{key} {value}\n" for key, value in self._conf.items()))
        _ip("link", "add", self.name, "type", "bridge")
        _ip("address", "add", f"{self.driver_address}/{_PREFIX_LENGTH}", "dev", self.name)
        _ip("link", "set", self.name, "up")
        for name in self.addresses:
            self._connect(name)
        ports = ("--port", "0", "--webui-port", "0")
        master = self._daemon("master", [], self.driver_address, "master.Master", *ports)
        self.master = self._logged("master", master, r"Starting Spark master at (spark://\S+)")
        size = ("--cores", str(self._cores), "--memory", self._memory)
        workers = {}
        for name, address in self.addresses.items():
            within = ["ip", "netns", "exec", self._namespace(name), "unshare", "--uts"]
            within += ["sh", "-c", f'hostname {name} && exec "$@"', "sh"]
            folder = ("--work-dir", str(self.folder / name))
            workers[name] = self._daemon(name, within, address, "worker.Worker", *ports, *size, *folder, self.master)
        for name, worker in workers.items():
            self._logged(name, worker, r"(Successfully registered) with master")

    def _connect(self, name: str) -> None:
        namespace, cable = self._namespace(name), self._cable(name)
        _ip("netns", "add", namespace)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("link", "set", cable, "master", self.name, "up")
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "address", "add", f"{self.addresses[name]}/{_PREFIX_LENGTH}", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        known = {"localhost": "127.0.0.1", **self.addresses}
        etc = _NAMESPACES_ETC / namespace  # what lies here hides its like in /etc from `ip netns exec`
        etc.mkdir(parents=True)
        (etc / "hosts").write_text("".join(f"{address} {name}\n" for name, address in known.items()))

    def _daemon(
        self, name: str, within: Sequence[str], address: str, spark_class: str, *args: str
    ) -> subprocess.Popen[bytes]:
        """Starts a daemon as this process's child: every command on the way to it replaces the one before."""
        from pyspark.find_spark_home import _find_spark_home

        home = _find_spark_home()
        temporary = self.folder / name / "tmp"
        temporary.mkdir(parents=True)
        environ = {
            **os.environ,
            "SPARK_HOME": home,
            "SPARK_CONF_DIR": str(self.folder / "conf"),
            "SPARK_LOCAL_IP": address,
            "SPARK_LOCAL_DIRS": str(temporary),
            "TMPDIR": str(temporary),
            "JAVA_TOOL_OPTIONS": f"-Djava.io.tmpdir={temporary} -XX:TieredStopAtLevel=1",  # starts in half the time
            "PYSPARK_PYTHON": sys.executable,
        }
        # With this thread its daemons end, however that ends; what they leave then is removed by a later start.
        command = ["setpriv", "--pdeathsig", "KILL", *within, f"{home}/bin/spark-class"]
        command += [f"org.apache.spark.deploy.{spark_class}", "--host", address, *args]
        with open(self.folder / name / "log", "wb") as log:
            daemon = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ)
        self._daemons.append(daemon)
        return daemon

    def _logged(self, name: str, daemon: subprocess.Popen[bytes], pattern: str) -> str:
        """Waits for a line of a daemon's log."""
        log = self.folder / name / "log"

        def found() -> re.Match[str] | None:
            ended = daemon.poll() is not None
            match = re.search(pattern, log.read_text())
            assert match or not ended, f"the daemon on {name} ended:\n{log.read_text()[-2000:]}"
            return match

        match = watch.until(found, START_DEADLINE)
        assert match is not None
        return match[1]


def _ip(*args: str) -> str:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, check=False)
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
    bridge = Path("/sys/class/net", name)
    for cable in bridge.glob("brif/*"):
        _ip("link", "delete", cable.name)
    if bridge.exists():
        _ip("link", "delete", name)
    for namespace in namespaces:
        _ip("netns", "delete", namespace)
    for etc in _NAMESPACES_ETC.glob(f"{name}-*"):
        shutil.rmtree(etc, ignore_errors=True)
    shutil.rmtree(_folder(name), ignore_errors=True)
