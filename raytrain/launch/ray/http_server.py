"""A trained network behind HTTP, by Ray Serve: images that come at the same time are classified in one batch.

The first run that a cluster serves answers at ``/`` and ``/RUN``, all others only at ``/RUN``. While a replica loads
the network, it answers with status 503.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import re
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.resources import files
from queue import SimpleQueue
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import HTTPOptions
from ray.serve.exceptions import RayServeException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from raytrain.data.images.crop_box import Pixels
from raytrain.data.images.decode_process import DecodeProcess
from raytrain.data.images.image_format import BadImage
from raytrain.errors import UsageError, format_count
from raytrain.launch.placement import Placement
from raytrain.launch.ray.nodes import ClusterNode, run_on_each_node
from raytrain.launch.ray.private_api import asks_for_token, bind_replica, can_bind_replica, check_serve
from raytrain.launch.ray.ray_errors import root_cause
from raytrain.launch.served_model import ServedModel
from raytrain.monitor.stop_request import StopSignals
from raytrain.storage.clouds.cloud import is_loopback_host

_MAX_BYTES = 64 << 20  # of one image file
MAX_HELD_BYTES = 512 << 20  # of all image files that a replica holds at a time
_MAX_PARTS, _MAX_PART_HEADERS = 64, 8 << 10  # of a form: parts that are searched for a file, and bytes of their headers
_FILE_NAME = re.compile(rb";\s*filename\*?\s*=", re.IGNORECASE)  # in the headers of a part, which is a file then
_MAX_BATCH, _BATCH_WAIT_S = 64, 0.005
_MAX_WAITING = 256  # requests that a replica holds; Serve keeps the others until it has answered some
_ANSWERS_WITHIN_S, _ASK_EVERY_S = 30.0, 0.2
_REPORT_AFTER_S = 15.0
_PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}
_WITHOUT_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # to reach the cluster directly


class RefusedRequest(Exception):
    """Refuses a request; the arguments are the HTTP status, and the reason."""


class Replica:
    """One copy of the network. POST takes an image file and answers with its classes; GET describes the network.

    A browser gets a page instead. ``num_threads`` images are decoded at the same time, each in a process of its own.
    ``local_host`` is the host at which Serve listens if only this machine can reach it, else None.
    """

    def __init__(self, model: ServedModel, num_threads: int, local_host: str | None = "127.0.0.1") -> None:
        self._model = model
        self._local_host = local_host
        # After this constructor, Serve starts a server in the replica, for other replicas; set its address before.
        bind_replica("127.0.0.1" if local_host else ray.util.get_node_ip_address())
        self._decoders: SimpleQueue[DecodeProcess] = SimpleQueue()
        for _ in range(num_threads):
            self._decoders.put(DecodeProcess(model.format.shape))
        self._threads = ThreadPoolExecutor(num_threads)
        self._predictor = self._threads.submit(model.load_predictor, model.store, num_threads, 0)
        self._held_bytes = 0

    async def __call__(self, request: Request) -> Response:
        """Answer an HTTP request; a request that is refused gets a status of 4xx or 5xx, and the reason as JSON."""
        try:
            # Refuse other host names: a site that a browser has open could point its own name at 127.0.0.1, and read
            # the answers.
            host = re.sub(r":\d*$", "", request.headers.get("host", "")).lower()
            if self._local_host and host and host != self._local_host.lower() and not is_loopback_host(host):
                raise RefusedRequest(403, "this port is for this machine alone; ask 127.0.0.1 or localhost")
            if request.url.path.strip("/") not in ("", self._model.run):
                raise RefusedRequest(404, f"{self._model.run} is served here, at /{self._model.run}")
            if request.method == "GET" and "text/html" in request.headers.get("accept", ""):
                page = files("raytrain.launch.ray").joinpath("serve_page.html").read_text("utf-8")
                return HTMLResponse(page, headers=_PAGE_HEADERS)

            # Everything else needs the network.
            if not self._predictor.done():
                raise RefusedRequest(503, f"the network of {self._model.run} is being loaded; try again")
            if error := self._predictor.exception():
                raise RefusedRequest(500, str(error))
            if request.method == "GET":
                model = self._model
                return JSONResponse({"run": model.run, "checkpoint": model.checkpoint, "classes": model.classes})
            if request.method != "POST":
                raise RefusedRequest(405, "POST an image file")
            return JSONResponse(await self._classify(await self._posted_image(request)))
        except BadImage as error:
            return JSONResponse({"error": str(error)}, status_code=400)
        except RefusedRequest as refused:
            status, reason = refused.args
            headers = {503: {"Retry-After": "1"}, 405: {"Allow": "GET, POST"}}
            return JSONResponse({"error": reason}, status, headers.get(status))

    async def _posted_image(self, request: Request) -> Pixels:
        """Return the image that was posted, uint8 (H, W, C).

        Raises BadImage, and RefusedRequest if a form has no file, if the file is too large, or if all files that this
        replica holds are too large together.
        """

        def decode() -> Pixels:
            # In a thread: searching a large form for its file would delay other requests.
            file = posted_file(request.headers.get("content-type", ""), content)
            # In another process: a malicious file may kill the process that decodes it.
            decoder = self._decoders.get()
            try:
                return decoder.decode(file, self._model.format.cropping.crop)
            finally:
                self._decoders.put(decoder)

        content = bytearray()
        try:
            async for chunk in request.stream():
                content += chunk
                self._held_bytes += len(chunk)
                if len(content) > _MAX_BYTES:
                    raise RefusedRequest(413, f"the file has more than {_MAX_BYTES >> 20} MiB")
                if self._held_bytes > MAX_HELD_BYTES:
                    raise RefusedRequest(503, f"files of {MAX_HELD_BYTES >> 20} MiB are being read already; try again")
            return await asyncio.get_running_loop().run_in_executor(self._threads, decode)
        finally:
            self._held_bytes -= len(content)

    @serve.batch(max_batch_size=_MAX_BATCH, batch_wait_timeout_s=_BATCH_WAIT_S)
    async def _classify(self, images: list[Pixels]) -> list[dict[str, Any]]:
        """Return the answer for each image, uint8 (H, W, C); Serve gathers images that come at the same time."""
        labels = np.full(len(images), -1)  # unknown
        table = await asyncio.to_thread(self._predictor.result(), np.stack(images), labels)
        return [self._model.answer(row) for row in table.to_pylist()]


def posted_file(content_type: str, body: bytes | bytearray) -> bytes:
    """Return the image file in ``body``: all of it, or the one file of a form. Takes time linear in the body.

    Raises RefusedRequest if the form has no file in its first 64 parts, or has several there. A file that is empty, as
    of a field in which nothing was chosen, does not count beside another one.
    """
    form = re.fullmatch(r'multipart/form-data;.*boundary="?([^";]{1,70})"?.*', content_type, re.IGNORECASE)
    if form is None:
        return bytes(body)

    # Parts are separated by a line end, --, and the boundary. The first delimiter may lack the line end: then it begins
    # two bytes before the body.
    delimiter = b"\r\n--" + form[1].encode("latin-1", "replace")
    delimiter_at = -2 if body.startswith(delimiter[2:]) else body.find(delimiter)
    files: list[slice] = []
    for _ in range(_MAX_PARTS):
        if delimiter_at == -1:
            break
        start = delimiter_at + len(delimiter)
        delimiter_at = body.find(delimiter, start)
        end = len(body) if delimiter_at == -1 else delimiter_at
        content_at = body.find(b"\r\n\r\n", start, min(end, start + _MAX_PART_HEADERS))
        if content_at != -1 and _FILE_NAME.search(body, start, content_at):
            files.append(slice(content_at + 4, end))
    if not files and delimiter_at == -1:
        raise RefusedRequest(400, "the form has no file; send one, as in curl -F file=@IMAGE.jpg")
    if not files:
        raise RefusedRequest(400, f"the form has no file in its first {_MAX_PARTS} parts; send the file first")
    files = [file for file in files if file.stop > file.start] or files[:1]
    if len(files) > 1:
        raise RefusedRequest(400, f"the form has {len(files)} files; send each in a request of its own")
    return bytes(body[files[0]])


def listens_on_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server at ``host``, an address or a name; False if it is unknown."""
    if not host:  # all interfaces
        return False
    try:
        return all(is_loopback_host(str(address[0])) for *_, address in socket.getaddrinfo(host, None))
    except OSError:  # no such name
        return False


def check_guarded(host: str) -> None:
    """Raise UsageError if serving at ``host`` would let strangers run code in a replica.

    Each replica has a port for other replicas, which unpickles whatever it gets. Only the cluster's token protects it,
    if it can be reached from outside its machine at all. All nodes are asked, because a replica may be on any of them.
    UsageError is raised, too, if a node does not answer, or if this Ray Serve does not ask for the token.
    """
    check_serve()
    if listens_on_loopback(host) and can_bind_replica():
        return  # then only this machine can reach that port, too

    def is_open(node: ClusterNode) -> bool:
        """Return whether strangers could reach such a port on this node, without a token."""
        return not (asks_for_token() or (can_bind_replica() and is_loopback_host(ray.util.get_node_ip_address())))

    for answer in run_on_each_node(is_open, _ANSWERS_WITHIN_S):
        if answer.result is not False:
            raise UsageError(
                f"--host is {host}, and the Ray of the node {answer.node.address} "
                f"{'asks for no token' if answer.result else 'did not say whether it asks for a token'}, so that "
                "others could run code there by a port of Ray Serve; start the cluster with RAY_AUTH_MODE=token, or "
                "use --host 127.0.0.1."
            )


@contextmanager
def serving(model: ServedModel, placement: Placement, host: str, port: int, signals: StopSignals) -> Iterator[str]:
    """Serve ``model`` while this is open; yield its URL when the network is loaded, or ``signals`` has a stop request.

    There is a replica for each worker of ``placement``. Afterwards, the model is served no more; what Ray Serve has
    started for all applications stays. What an earlier command that was killed serves of a run of this name is deleted.
    Raises UsageError if the cluster cannot serve the run, or does not answer.
    """
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    check_guarded(host)
    replica = serve.deployment(
        name="replica",
        num_replicas=placement.num_workers,
        max_ongoing_requests=_MAX_WAITING,
        ray_actor_options={"num_cpus": placement.cpus, "num_gpus": int(placement.device == "cuda")},
        health_check_period_s=5.0,
    )(Replica)
    local_host = host if listens_on_loopback(host) else None
    application = replica.bind(model, placement.threads, local_host)
    # Serve keeps an application whose command was killed, which would answer in place of this one. No command that
    # lives serves a run of this name: `serving_credentials` has refused that.
    name = f"raytrain-{model.run}-{hashlib.sha256(model.store.url.encode()).hexdigest()[:16]}"
    try:
        try:
            serve.start(proxy_location="HeadOnly", http_options=HTTPOptions(host=host, port=port))
            same_run = re.compile(rf"raytrain-{re.escape(model.run)}-[0-9a-f]{{16}}")
            for left in filter(same_run.fullmatch, list(serve.status().applications)):
                serve.delete(left)
            # `serve.run` would wait for room without an end, and no signal could end that.
            try:
                serve.run_many([serve.RunTarget(application, name, "/")], wait_for_applications_running=False)
            except RayServeException:  # another run is served at / already
                target = serve.RunTarget(application, name, f"/{model.run}")
                serve.run_many([target], wait_for_applications_running=False)
            _wait_for_replicas(name, model.run, placement, signals)
        except (RuntimeError, RayServeException, RayError) as error:
            # If a replica raised an error, that says more than Serve's own.
            status = serve.status().applications.get(name)
            messages = [deployment.message for deployment in status.deployments.values()] if status else []
            reason = "".join(messages).strip().rpartition("\n")[2].rpartition("Error: ")[2]
            raise UsageError(_not_started(model.run, reason or root_cause(error))) from error
        yield wait_until_loaded(host, port, model.run, signals)
    finally:
        with suppress(RayServeException):  # Serve has not started
            serve.delete(name)


def _not_started(run: str, reason: str) -> str:
    """Return the sentence of the error for a run that cannot be served, for the ``reason``."""
    return f"Ray Serve could not start run {run!r}: {reason.rstrip('.')}."


def _wait_for_replicas(application: str, run: str, placement: Placement, signals: StopSignals) -> None:
    """Wait until the replicas of a run, which Serve knows as ``application``, have started, or until a stop request.

    There is no limit: other jobs may use the cluster for long. A line says after 15 seconds whether room is missing.
    Raises RuntimeError if Serve gives up.
    """
    report_at = time.monotonic() + _REPORT_AFTER_S
    while signals.stop_request is None:
        state = serve.status().applications[application]
        if state.status == "RUNNING":
            return
        if state.status == "DEPLOY_FAILED":
            raise RuntimeError(state.message)
        if time.monotonic() > report_at:
            report_at = math.inf
            free = ray.available_resources()
            kinds = {"CPU": placement.cpus, **({"GPU": 1} if placement.device == "cuda" else {})}
            takes, has = (
                " and ".join(format_count(numbers.get(kind, 0.0), kind) for kind in kinds) for numbers in (kinds, free)
            )
            reason = "Ray Serve is starting"
            if any(free.get(kind, 0.0) < number for kind, number in kinds.items()):
                reason = f"each of its networks takes {takes}, and the cluster has {has} free; waiting for room"
            logging.getLogger("raytrain").warning("%s is not served yet: %s …", run, reason)
        time.sleep(_ASK_EVERY_S)


def wait_until_loaded(host: str, port: int, run: str, signals: StopSignals) -> str:
    """Return the URL of a served run once its network is loaded.

    Loading may take long, so there is no limit, and only a stop request of ``signals`` ends the wait early: then the
    network may not be loaded. Raises UsageError if nothing answers, or the network cannot be loaded.
    """
    head = ray.get_runtime_context().gcs_address.rpartition(":")[0]
    url = f"http://{head if host == '0.0.0.0' else host}:{port}/{run}"
    # Report the wait, unless the network is loaded already.
    try:
        if signals.stop_request is None and not _is_loaded(url, run):
            logging.getLogger("raytrain").warning("loading the network of %s; until then, %s answers 503 …", run, url)
            while signals.stop_request is None and not _is_loaded(url, run):
                time.sleep(_ASK_EVERY_S)
    except (urllib.error.URLError, TimeoutError) as error:
        raise UsageError(
            f"Nothing answers at {url} ({getattr(error, 'reason', error)}): Ray Serve listens on the head of the "
            "cluster, and if it runs there already, at the port that it was started with; start this on the head, or "
            "set --host and --port."
        ) from None
    return url


def _is_loaded(url: str, run: str) -> bool:
    """Return whether the network behind ``url`` has been loaded; raises UsageError if it cannot be."""
    try:
        _WITHOUT_PROXY.open(url, timeout=_ANSWERS_WITHIN_S).close()
        return True
    except urllib.error.HTTPError as error:
        if error.code == 500:
            text = error.read().decode(errors="replace").strip()
            try:
                reason = json.loads(text)["error"]
            except ValueError:  # Serve's own answer, if a replica has died: its last line says so
                reason = text.rpartition("\n")[2] or "a replica has failed"
            raise UsageError(_not_started(run, reason)) from None
        if error.code != 503:
            raise
        return False
