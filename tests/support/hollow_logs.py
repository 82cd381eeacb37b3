"""The logs of pods on hollow nodes: a server that the API server uses as their kubelet.

KWOK has such a server too, but it never ends a followed log, not even that of an ended container. It also
needs an inotify instance for each log, and a user has only 128. Here each rank writes the proof of scale, and
then numbered lines at a given rate, until its time is over or :meth:`Logs.end` is called.

This file is also the server's program. It reads the settings as JSON from the first line of stdin, and prints
its port. Each further line of stdin ends all ranks. The program ends when stdin ends.
"""

import asyncio
import json
import math
import re
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web

PAUSE = 0.05  # seconds between two checks for new lines
_RANK = re.compile(r"-worker-(\d+)$")


class Ranks(NamedTuple):
    """How the ranks of all jobs write: each writes `line 0`, `line 1` and so on."""

    world: int
    """Number of ranks of each job."""
    rate: int = 0
    """Lines per second of each rank."""
    seconds: float | None = None
    """Seconds from the first request for a rank's log to the rank's end; None: it ends at `Logs.end`."""


class Rank:
    """One rank; it starts at the first request for its log. Its lines follow from the time since then."""

    def __init__(self, ranks: Ranks, number: int) -> None:
        self._rate, self._began = ranks.rate, time.time()
        self._ends = math.inf if ranks.seconds is None else self._began + ranks.seconds
        host = f"hollow-{number}"
        known = {"rank": number, "host": host}
        proof = {"cpus": 1.0, "round": 0, "backend": "gloo", "threads": 1, "hostname": host}
        self._prefix = f"[rank {number} {host}] "
        self._start = [
            _event("proof", **known, world_size=ranks.world, **proof),
            _event("backend", **known, asked="gloo", observed="gloo"),
        ]
        self._end = _event("exit", **known, code=0)

    def end(self) -> None:
        """End the rank now: it writes only its exit event."""
        self._ends = min(self._ends, time.time())

    def lines(self, first: int) -> tuple[list[bytes], bool]:
        """Return the lines from number `first` up to now, each with its time; and whether the log ended."""
        now = time.time()
        over, until = now >= self._ends, min(now, self._ends)
        written = int(self._rate * (until - self._began) + 1e-3)
        total = len(self._start) + written + over
        return [self._line(number, written) for number in range(first, total)], over

    def _line(self, number: int, written: int) -> bytes:
        """Return line ``number`` of the log, which has ``written`` numbered lines between its events."""
        numbered = number - len(self._start)
        if numbered < 0:
            return self._at(self._began, self._start[number])
        if numbered == written:
            return self._at(self._ends, self._end)
        return self._at(self._began + numbered / self._rate, f"line {numbered}")

    def _at(self, seconds: float, text: str) -> bytes:
        whole, micro = divmod(int(seconds * 1_000_000), 1_000_000)
        return f"{_second(whole)}.{micro:06}Z {self._prefix}{text}\n".encode()


@lru_cache(64)
def _second(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S")


def _event(name: str, **fields: Any) -> str:
    return "::manycpu:: " + json.dumps({"event": name, **fields})


class Kubelet:
    """The part of a kubelet that serves logs."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._known: dict[str, Rank] = {}

    def end(self) -> None:
        """End all ranks that have started."""
        for rank in self._known.values():
            rank.end()

    async def log(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a pod's log; there is none of a previous container."""
        pod = f"{request.match_info['namespace']}/{request.match_info['pod']}"
        found = _RANK.search(pod)
        if found is None or request.query.get("previous") == "true":
            raise web.HTTPBadRequest(text=f"no such log of {pod}")
        rank = self._known.setdefault(pod, Rank(self._ranks, int(found[1])))
        response = web.StreamResponse()
        with suppress(ConnectionResetError):  # the client has stopped following
            await response.prepare(request)
            await _write(response, rank, request.query)
        return response


async def _write(response: web.StreamResponse, rank: Rank, query: Any) -> None:
    """Write the lines that the query asks for; with ``follow``, until the rank has ended."""
    since = query.get("sinceTime", "").encode()[:-1]
    first, last = 0, -int(query.get("tailLines", 0))
    while True:
        lines, over = rank.lines(first)
        first += len(lines)
        wanted = [line for line in lines[last:] if line[: len(since)] >= since]
        if query.get("timestamps") != "true":
            wanted = [line.partition(b" ")[2] for line in wanted]
        if wanted:
            await response.write(b"".join(wanted))
        if over or query.get("follow") != "true":
            return
        await asyncio.sleep(PAUSE)


async def serve(settings: dict[str, Any]) -> None:
    """Serve logs until stdin ends; each line of stdin ends all ranks."""
    kubelet = Kubelet(Ranks(**settings["ranks"]))
    app = web.Application()
    app.router.add_get("/containerLogs/{namespace}/{pod}/{container}", kubelet.log)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(settings["certificate"])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, settings["address"], 0, ssl_context=context, backlog=1024)
    await site.start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    while await asyncio.to_thread(sys.stdin.readline):
        kubelet.end()
    await runner.cleanup()


class Logs:
    """A running log server."""

    def __init__(self, address: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        self._process = process
        self.kubelet = address, int(process.stdout.readline())
        """Its address and port."""

    def end(self) -> None:
        """End every rank that has started: its last line is the exit event."""
        assert self._process.stdin is not None
        self._process.stdin.write("end\n")
        self._process.stdin.flush()


@contextmanager
def logs(ranks: Ranks) -> Iterator[Logs]:
    """Run a log server whose certificate the API server of the test cluster trusts."""
    from cluster import certificates, settings

    with tempfile.TemporaryDirectory() as folder:
        certificate = Path(folder, "kubelet.pem")
        _issue(certificates.folder(), settings.MACHINE_ADDRESS, certificate)
        command = [sys.executable, __file__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdin is not None
            given = {
                "address": settings.MACHINE_ADDRESS,
                "certificate": str(certificate),
                "ranks": ranks._asdict(),
            }
            process.stdin.write(json.dumps(given) + "\n")
            process.stdin.flush()
            yield Logs(settings.MACHINE_ADDRESS, process)
        finally:
            process.kill()
            process.communicate()


def _issue(authority: Path, address: str, path: Path) -> None:
    import trustme

    files = [(authority / name).read_bytes() for name in ("ca.crt", "ca.key")]
    trustme.CA.from_pem(*files).issue_cert(address).private_key_and_cert_chain_pem.write_to_path(str(path))


if __name__ == "__main__":
    asyncio.run(serve(json.loads(sys.stdin.readline())))
