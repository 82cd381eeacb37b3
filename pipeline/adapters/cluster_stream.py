"""Stream the answers of a cluster's API server in an event loop, by the package ``kubernetes_asyncio``."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from typing import Any, Final
from urllib.parse import unquote

import aiohttp
from kubernetes_asyncio.client import Configuration
from kubernetes_asyncio.client.rest import RESTClientObject
from urllib3.util import make_headers, parse_url

from manycpu.pipeline.adapters.cluster import Connect
from manycpu.pipeline.spec.errors import ClusterError, UnauthorizedError

_CONNECT_TIMEOUT_S: Final = 5.0
_FIRST_ERROR_STATUS: Final = 400
_PROXIES: Final = ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy")


class ClusterStream:
    """An API server, as one account may see it.

    Args:
        connect: Makes a client with fresh credentials; called on a thread.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._settings: Any = None
        self._clients: dict[tuple[Any, ...], RESTClientObject] = {}
        self._connecting = asyncio.Lock()
        self._ahead_s = 0.0  # by which the API server's clock is ahead

    def now(self) -> float:
        """Read the API server's clock, in seconds since the epoch; before any answer, this machine's."""
        return time.time() + self._ahead_s

    async def aclose(self) -> None:
        """Close every connection."""
        for client in self._clients.values():
            await client.close()
        self._clients.clear()

    @asynccontextmanager
    async def answer(
        self, path: str, query: Mapping[str, str], silence: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a GET request, and yield the answer to read it as it comes.

        Args:
            path: The path on the API server.
            query: The query's parameters.
            silence: Seconds without a byte after which the connection is presumed dead.

        Raises:
            ClusterError: The cluster refuses it.
            aiohttp.ClientError: The connection broke; or OSError, TimeoutError.
        """
        settings = self._settings
        if settings is None:  # the first request
            settings = await self._renew(used=None)
        headers = await asyncio.to_thread(_credentials, settings)
        client = self._client(settings)
        answer = await client.request(
            "GET",
            settings.host + path,
            query_params=dict(query),
            headers=headers,
            _preload_content=False,
            _request_timeout=aiohttp.ClientTimeout(sock_connect=_CONNECT_TIMEOUT_S, sock_read=silence),
        )
        async with answer:
            if answer.status >= _FIRST_ERROR_STATUS:
                await self._raise_refusal(answer, settings, path)
            with suppress(KeyError, ValueError):  # in whole seconds: half a second is cut off on average
                self._ahead_s = parsedate_to_datetime(answer.headers["Date"]).timestamp() + 0.5 - time.time()
            try:
                yield answer
            finally:
                # Cut an unread stream off: the server would not answer a TLS close before its own end.
                if not answer.content.at_eof() and answer.connection and answer.connection.transport:
                    answer.connection.transport.abort()

    async def _raise_refusal(self, answer: aiohttp.ClientResponse, used_settings: Any, path: str) -> None:
        """Raise the ClusterError for an answer's status; renew the credentials first if they were refused."""
        body = (await answer.read()).decode(errors="replace")
        with suppress(ValueError, KeyError, TypeError):
            body = json.loads(body)["message"]
        refused = ClusterError.of_status(answer.status, f"GET {path}: {answer.status} {body}")
        if isinstance(refused, UnauthorizedError):
            await self._renew(used_settings)
        raise refused

    async def _renew(self, used: Any) -> Any:
        """Replace the settings ``used`` by ones with fresh credentials, and return the settings to use now.

        If another task has replaced ``used`` meanwhile, return that task's settings.
        """
        async with self._connecting:
            if self._settings is used:  # else another task has replaced them
                client = await asyncio.to_thread(self._connect)
                self._settings = client.configuration
            return self._settings

    def _client(self, settings: Any) -> RESTClientObject:
        """Return the HTTP client for some settings; settings with the same TLS and proxy share one."""
        names = ("ssl_ca_cert", "cert_file", "key_file", "verify_ssl", "tls_server_name")
        options = {name: getattr(settings, name, None) for name in names}
        # A proxy of the environment is left to aiohttp, which knows its exceptions (NO_PROXY).
        options["proxy"] = None if settings.proxy in map(os.environ.get, _PROXIES) else settings.proxy
        key = tuple(options.values())
        if key not in self._clients:
            configuration = Configuration()
            for name, value in options.items():
                setattr(configuration, name, value)
            configuration.proxy_headers = None
            proxy_url = parse_url(configuration.proxy or "")
            if proxy_url.auth:  # a header carries the login: aiohttp's errors quote the URL
                configuration.proxy = proxy_url._replace(auth=None).url
                configuration.proxy_headers = make_headers(proxy_basic_auth=unquote(proxy_url.auth))
            configuration.connection_pool_maxsize = 0  # no limit: each followed log keeps a connection
            self._clients[key] = RESTClientObject(configuration)
        return self._clients[key]


class Lines:
    """Splits a stream of bytes into whole lines, each cut at ``limit`` bytes."""

    def __init__(self, limit: int | None) -> None:
        self._limit, self.rest = limit, b""

    def feed(self, block: bytes) -> list[bytes]:
        """Add a block of bytes; returns the lines that it completes. The unfinished one stays in ``rest``."""
        *lines, rest = (self.rest + block).split(b"\n")
        # What is kept of a line that never ends stays small. A slice to None is the whole line.
        self.rest = rest[: self._limit]
        return [line[: self._limit] for line in lines]


def _credentials(settings: Any) -> dict[str, str]:
    """Build the headers with the account's credentials; may block: it may run a program or read a file."""
    headers = [setting for setting in settings.auth_settings().values() if setting["in"] == "header"]
    return {header["key"]: header["value"] for header in headers if header["value"]}
