"""The Ray cluster of a command: one that runs already, or this process's own.

A :class:`Connection` decides at once which cluster it will use, and may start one, which takes seconds. Its method
``connect`` waits for the cluster and joins it, so that the caller can do other things in between.

A process can be in only one cluster at a time, and several of its threads may have connections. So whose cluster it is
decides when the process leaves it:

================================  ==========================  =====================================================
cluster                           who joins it                when this process leaves it
================================  ==========================  =====================================================
the user's code has joined it     ``ray.init``, before        never: the user's code goes on in it
it runs already, at an address    the first ``connect``       when the last connection is closed (_JoinedCluster)
none: this process starts one     the first ``connect``       at its own end: the next run needs no start (OwnRay)
================================  ==========================  =====================================================

This process's own cluster ends earlier if another cluster is to be joined, or if it no longer fits: the user asks for
other GPUs, variables of this process have changed, or its head does not answer. While a run uses it, either is refused.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress

from raytrain.errors import UsageError, current_folder
from raytrain.launch.gpus import visible_gpus
from raytrain.launch.ray.find_cluster import check_cluster_answers, no_cluster_error, ray_start_address, url_error
from raytrain.launch.ray.fork_client import keep_server, py_executable
from raytrain.launch.ray.head_queries import head_answers, raylet_answers
from raytrain.launch.ray.own_cluster import LocalCluster, lean_imports
from raytrain.launch.ray.private_api import (
    LOOPBACK_ENVIRONMENT,
    can_fork,
    check_version,
    in_ray,
    messages_in_log,
    set_variables,
    variables_set,
    version_error,
)
from raytrain.runs.logs import STARTUP

HEAD_AWAY_S = "900"
"""Seconds that this process waits for a lost head of a cluster; files in ``cluster/`` set it for the machines there."""
_HEAD_AWAY = "RAY_gcs_rpc_server_reconnect_timeout_s"  # Ray's variable for that
_VARIABLES = {
    # Under `uv run`, Ray would pack the current folder for its workers and start each of them through uv.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # Otherwise, a thread that still reads a block after the connection has ended would start another cluster.
    "RAY_ENABLE_AUTO_CONNECT": "0",
}
_ANSWER_WITHIN_S = 5.0
_JOB_SETTINGS = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # the variable in which Ray passes the settings of `ray job submit`
_LOOPBACK_HOSTS = {"localhost", "127.0.0.1", "::1", "[::1]"}  # those that Ray replaces in an address
_SAME_PYTHON = {"env_vars", "working_dir", "py_modules", "excludes", "config"}  # settings that leave Python as it is
_log = logging.getLogger("raytrain")


class OwnRay:
    """The Ray that this process has started, kept for the next use by any thread, until the process ends.

    It starts at once, on the GPUs of this machine that ``gpus`` lists, such as ``0,2``; None stands for all.
    """

    def __init__(self, gpus: str | None) -> None:
        self.num_users = 0  # connections that are open
        self._gpus = gpus
        self._cluster = LocalCluster(visible_gpus(gpus) if gpus else {})
        self._address: str | None = None
        # What this Ray needs in this process, undone at its end: the fork server, variables, Ray's messages in the log.
        self._opened = ExitStack()
        self._opened.enter_context(keep_server())
        self._joining = threading.Lock()
        self._environment: dict[str, str] | None = None  # variables of this process after the last use
        self._ends_after_use = False

    @property
    def log_folder(self) -> str:
        """The folder in which this Ray has made one for the logs of its processes."""
        return self._cluster.log_folder

    @property
    def is_joined(self) -> bool:
        """True if this process is in this cluster."""
        if self._address is None or not in_ray():
            return False
        import ray

        return ray.get_runtime_context().gcs_address == self._address

    def fits(self, gpus: str | None) -> bool:
        """Return whether this Ray works, and has the GPUs and variables that a new one would have."""
        if not self._cluster.runs or gpus != self._gpus:
            return False
        if self._environment is not None and self._environment != dict(os.environ):
            return False
        if self._address is None:  # it is still starting
            return True
        if not self.is_joined or not head_answers(_ANSWER_WITHIN_S):
            return False
        import ray

        return any(node["Alive"] for node in ray.nodes())

    def join(self) -> None:
        """Join this Ray once it has started, unless this process has joined it already.

        Raises UsageError if it could not start, or if this process is in another cluster.
        """
        with self._joining:
            if self._address is not None:
                return
            if is_connected():
                raise UsageError(
                    "--address is local, and this process is in a Ray cluster already; leave --address out, or call "
                    "ray.shutdown() first."
                )
            self._address = self._cluster.address()
            self._opened.enter_context(variables_set(LOOPBACK_ENVIRONMENT))
            self._opened.enter_context(messages_in_log())
            self._ends_after_use = True  # if joining fails
            _init(self._address, None)
            self._ends_after_use = False

    def has_lost_head(self) -> bool:
        """Return whether the head of this Ray has died: nobody listens at its address any more."""
        assert self._address is not None
        host, _, port = self._address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _ANSWER_WITHIN_S).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass  # it is busy, or this process has no descriptor left
        return False

    def end_after_use(self) -> bool:
        """Have this Ray, with all processes of a run, end after this use; return False if other threads use it."""
        self._ends_after_use = self.num_users == 1
        return self._ends_after_use

    def release(self) -> None:
        """End one use, and after the last one also this Ray, if :meth:`end_after_use` or a failed join asked for that.

        After the last one, the variables of this process are noted: if they are others at the next use, :meth:`fits`
        refuses this Ray. Another use may still be joining it, which sets some.
        """
        self.num_users -= 1
        if not self.num_users:
            self._environment = dict(os.environ)
        if self._ends_after_use and not self.num_users:
            end_own_ray()

    def end(self) -> None:
        """Leave this Ray and end it; wait until its processes are gone."""
        if self.is_joined:  # unless the user has left it already
            _leave()
        self._opened.close()
        self._cluster.close()


_own: OwnRay | None = None
_own_lock = threading.RLock()


@atexit.register
def end_own_ray() -> None:
    """End the Ray that this process has started, unless a thread still uses it: then it ends with the process."""
    global _own
    with _own_lock:
        if _own is not None and not _own.num_users:
            ended, _own = _own, None
            ended.end()


def _require_unused(wish: str) -> None:
    """Raise UsageError if a run of this process still uses its own Ray; ``wish`` is what has to wait for its end."""
    if _own is not None and _own.num_users:
        raise UsageError(f"A run of this process uses the Ray that it has started; wait for its end to {wish}.")


class _JoinedCluster:
    """The cluster that this process has joined, which connections of several threads may use at a time."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.num_users = 0  # connections that are open, none of them to a cluster that the user has joined
        self.address: str | None = None  # by which it was joined
        self.opened = ExitStack()  # closing it leaves the cluster

    def release(self) -> None:
        """End a use; after the last one, this process leaves the cluster."""
        with self.lock:
            self.num_users -= 1
            if not self.num_users:
                self.opened.close()


_joined = _JoinedCluster()


class Connection(AbstractContextManager["Connection"]):
    """A cluster that is used while the connection is open.

    Args:
        address: the address of a cluster, ``auto`` for the one that this user or root started on this machine, or
            ``local`` for this process's own. By default, it is the cluster that this process is in, else RAY_ADDRESS,
            else the one that this user started on this machine, else this process's own.
        gpus: the GPUs of this machine that an own cluster uses, such as ``0,2``; by default all.
        before_start: called before an own cluster is used; it may raise an exception to prevent that.

    Raises:
        UsageError: the address is a URL, ``gpus`` are given for a cluster that runs already, or this process's own
            cluster is in use, and another one is asked for.
    """

    def __init__(
        self, address: str | None, gpus: str | None = None, before_start: Callable[[], None] | None = None
    ) -> None:
        set_variables({name: os.environ.get(name, value) for name, value in _VARIABLES.items()})
        self._address = _cluster_address(address)
        self.own: OwnRay | None = None  # this process's own Ray, if that is the cluster
        self._opened = ExitStack()  # closing it ends this connection's use of the cluster
        self._uses_joined = False
        if self._address == "local":
            if before_start is not None:
                before_start()
            self.own = _use_own_ray(gpus)
            self._opened.enter_context(lean_imports())
        elif gpus:
            raise UsageError(
                f"--device is cuda:{gpus}, and the run uses a Ray cluster that runs already, whose GPUs were chosen "
                "when it was started; leave the numbers out, or use --address local for a new cluster on this machine."
            )
        else:
            # A run can go on without the cluster's head, but by default Ray ends its processes after a minute.
            set_variables({_HEAD_AWAY: os.environ.get(_HEAD_AWAY, HEAD_AWAY_S)})

            # This process can be in one cluster only, so its own Ray ends.
            _require_unused(f"join the cluster at {self._address}")
            end_own_ray()
            self._opened.enter_context(lean_imports())
            self._opened.enter_context(keep_server())
            with _joined.lock:
                if _joined.num_users:  # so that other connections do not leave it before this one connects
                    self._use_joined()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def connect(self) -> None:
        """Join the cluster, unless this process is in it already; wait for this process's own until it has started.

        Raises :class:`UsageError` if no cluster of these versions answers at the address, if an own one could not
        start, or if this process is in another cluster.
        """
        if self.own is not None:
            STARTUP.info("waiting for Ray on this machine …")
            self.own.join()
            return
        with _joined.lock:
            if not is_connected():
                STARTUP.info("joining the Ray cluster …")
                self._join()
                self._use_joined()
                return
            if self._address and not _is_joined(self._address):
                raise UsageError(
                    f"--address is {self._address}, and this process is in the Ray cluster at {_joined_address()}; "
                    "leave --address out to use that one, or leave it first, by ray.shutdown()."
                )
            if _joined.num_users:  # by another thread since this connection was made
                self._use_joined()
            else:  # by the user
                check_version()
                raylet_answers()  # remembers the raylet's address while it can still be found

    def _use_joined(self) -> None:
        """Have this process stay in the cluster that it has joined at least until this connection is closed.

        Call this with the lock of ``_joined`` held.
        """
        if not self._uses_joined:
            self._uses_joined = True
            _joined.num_users += 1
            self._opened.callback(_joined.release)

    def _join(self) -> None:
        """Have this process join the cluster at the address, until its last connection is closed.

        Raises UsageError if none answers there, or one of other versions.
        """
        assert self._address is not None
        check_cluster_answers(self._address)

        # Worker processes there are forked, too, unless this process's job has a Python or a container of its own.
        job = json.loads(os.environ.get(_JOB_SETTINGS, "{}")).get("runtime_env") or {}
        command = py_executable() if job.keys() <= _SAME_PYTHON and can_fork() else None
        with ExitStack() as opened:
            if _is_on_loopback(self._address):
                opened.enter_context(variables_set(LOOPBACK_ENVIRONMENT))
            opened.enter_context(messages_in_log())
            _init(self._address, None if command is None else {"py_executable": command})
            opened.callback(_leave)
            _joined.address, _joined.opened = self._address, opened.pop_all()

    def close(self) -> None:
        """Leave the cluster, unless it is this process's own, the user joined it, or another thread still uses it."""
        self._opened.close()
        if self.own is not None:
            self.own.release()


def _cluster_address(address: str | None) -> str | None:
    """Return the address of the cluster that a connection uses, by the ``address`` that the user gives, if any.

    ``local`` stands for this process's own cluster, and None for the one that this process is in. Raises UsageError if
    the address is a URL.
    """
    # Without an address, a cluster that this process uses already goes before the environment.
    if not address:
        if is_connected():
            return None
        if _own is not None and _own.num_users:
            return "local"
        address = os.environ.get("RAY_ADDRESS")
    if address and "://" in address:
        raise url_error(address)
    if address == "auto":
        return ray_start_address({0, os.getuid()}) or "auto"  # if no Ray runs here, connect() says so of "auto"
    if address:
        return address

    # The user has not asked for a cluster, so say it if one is joined.
    running = ray_start_address()
    if running is None:
        return "local"
    _log.warning("Joining the Ray that runs on this machine, %s; --address local starts a new one.", running)
    return running


def _use_own_ray(gpus: str | None) -> OwnRay:
    """Begin a use of this process's own Ray, which :meth:`OwnRay.release` ends; start one if there is none that fits.

    Raises UsageError if one that does not fit is in use.
    """
    global _own
    with _own_lock:
        if _own is None or not _own.fits(gpus):
            _require_unused("start another one with other GPUs or variables")
            end_own_ray()
            _own = OwnRay(gpus)
        _own.num_users += 1
        return _own


def uses_cluster(address: str | None) -> bool:
    """Return whether a cluster runs, or the user asks for one; otherwise, a :class:`Connection` would start one."""
    return names_cluster(address) or ray_start_address() is not None


def names_cluster(address: str | None) -> bool:
    """Return whether the user asks for a cluster, by an address, or because this process is in one already."""
    return bool(address or is_connected() or os.environ.get("RAY_ADDRESS"))


def is_connected() -> bool:
    """Return whether this process is in a Ray cluster that it has not started itself."""
    return in_ray() and not (_own is not None and _own.is_joined)


def _joined_address() -> str:
    """Return HOST:PORT of the cluster that this process is in."""
    import ray

    return ray.get_runtime_context().gcs_address


def _is_joined(address: str) -> bool:
    """Return whether ``address`` is that of the cluster that this process is in; True if it is not HOST:PORT."""
    import ray

    def ip_addresses(host: str) -> set[str]:
        """Return the IP addresses of a host; for a loopback one, also the address that Ray uses for this node."""
        addresses: set[str] = set()
        with suppress(OSError):  # no such name
            addresses = {str(socket_address[0]) for *_, socket_address in socket.getaddrinfo(host.strip("[]"), None)}
        return addresses | ({ray.util.get_node_ip_address()} if {"127.0.0.1", "::1"} & addresses else set())

    if ":" not in address or (_joined.num_users and address == _joined.address):
        return True
    # A machine has several names, so compare where they lead.
    host, _, port = address.rpartition(":")
    joined_host, _, joined_port = _joined_address().rpartition(":")
    return port == joined_port and bool(ip_addresses(host) & ip_addresses(joined_host))


def _is_on_loopback(address: str) -> bool:
    """Return whether the cluster at ``address`` listens on the loopback interface alone.

    That is so after ``ray start --node-ip-address 127.0.0.1``. Ray replaces 127.0.0.1 in an address by this machine's
    address in the network, and would try for a quarter of an hour to reach the cluster there.
    """
    import ray

    host, _, port = address.rpartition(":")
    if host not in _LOOPBACK_HOSTS:
        return False
    try:
        socket.create_connection((ray.util.get_node_ip_address(), int(port)), _ANSWER_WITHIN_S).close()
    except OSError:
        return True
    return False


def _init(address: str, runtime_environment: dict[str, str] | None) -> None:
    """Join the cluster at ``address``; raises UsageError if it has other versions, or if there is none."""
    import ray

    check_version()
    current_folder()  # Ray would raise an exception of its own without one
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, runtime_env=runtime_environment)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise version_error(address, str(error)) or no_cluster_error(address, str(error)) from None
    raylet_answers()  # remembers the raylet's address while it can still be found


def _leave() -> None:
    """Leave the cluster, if this process is in one. Any error of Ray is ignored: the cluster may be gone."""
    import ray

    with suppress(Exception):
        if raylet_answers():  # without a raylet, ray.shutdown() would end this process
            ray.shutdown()
