"""Call a registry by https or http, with basic auth or bearer tokens, and with retries."""

import re
from collections.abc import Collection, Mapping
from typing import Any, Final
from urllib.parse import urljoin, urlsplit

import requests
from requests.auth import AuthBase
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from manycpu.pipeline.adapters.registry_login import Login
from manycpu.pipeline.spec.errors import RegistryError, TransientError

__all__ = ["Connection", "Scopes"]

Scopes = tuple[str, ...]
"""Scopes of a token, such as ``("repository:ml/train:pull,push",)``."""

DEADLINE: Final = 60.0  # seconds of retries
_TIMEOUT: Final = (5.0, 60.0)  # seconds to connect, and between two packets
_HOSTS: Final = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}
_UNAUTHORIZED, _FORBIDDEN, _NOT_FOUND = 401, 403, 404
_CHALLENGE: Final = re.compile(r'(\w+)="([^"]*)"')


class Connection:
    """A registry, as one user.

    Args:
        host: Host and port, as in an image's name.
        login: The user; None: anonymous.
        ca: File with the certificate authority.
        plain: Whether to use plain HTTP: only if the user wrote ``http://``.
        deadline: Seconds of retries.
    """

    def __init__(
        self,
        host: str,
        *,
        login: Login | None = None,
        ca: str | None = None,
        plain: bool = False,
        deadline: float = DEADLINE,
    ) -> None:
        self.host, self.deadline = host, deadline
        self._address = _HOSTS.get(host, host)
        self.plain = plain
        self._login = login
        self._basic = False
        self._tokens: dict[Scopes, str] = {}
        # Passed with each call: REQUESTS_CA_BUNDLE would win over that of the session.
        self._verify = ca or True
        self._session = requests.Session()

    def close(self) -> None:
        """Close its connections."""
        self._session.close()

    def ask(
        self,
        method: str,
        path: str,
        scopes: Scopes,
        *,
        fine: Collection[int] = (),
        patient: bool = True,
        **options: Any,
    ) -> requests.Response:
        """Call the registry; retry transient errors.

        Args:
            method: The HTTP method.
            path: The path below ``/v2/``, or a URL from the registry.
            scopes: The scopes that the call needs.
            fine: Statuses that are no errors, beside those below 400.
            patient: Whether to retry.
            options: Options of requests, such as the body, in bytes since it may be sent twice.
        """
        retrying = Retrying(
            retry=retry_if_exception_type(TransientError),
            stop=stop_after_delay(self.deadline if patient else 0),
            wait=wait_random_exponential(multiplier=0.2, max=5),
            reraise=True,
        )
        return retrying(self._ask, method, path, scopes, fine, options)

    def url(self, path: str) -> str:
        """Make a URL from a path below ``/v2/``, or from a location that the registry returned."""
        scheme = "http" if self.plain else "https"
        return urljoin(f"{scheme}://{self._address}/v2/", path)

    def _ask(
        self, method: str, path: str, scopes: Scopes, fine: Collection[int], options: Mapping[str, Any]
    ) -> requests.Response:
        url = self.url(path)
        response = self._send(method, url, scopes, options)
        if response.status_code == _UNAUTHORIZED and self._answer(response, scopes):
            response = self._send(method, url, scopes, options)
        if response.ok or response.status_code in fine:
            return response
        raise self._refused(response, method)

    def _send(self, method: str, url: str, scopes: Scopes, options: Mapping[str, Any]) -> requests.Response:
        header = None
        if token := self._tokens.get(scopes):
            header = f"Bearer {token}"
        elif self._basic and self._login:
            header = f"Basic {self._login.pair}"
        fixed: dict[str, Any] = {"auth": _Header(self._address, header), "verify": self._verify}
        try:
            return self._session.request(method, url, timeout=_TIMEOUT, **fixed, **options)
        except requests.exceptions.SSLError as error:
            raise RegistryError(
                f"the certificate of registry {self.host} cannot be trusted: {_cause(error)}",
                field="target.registry_ca",
                fix="Give the file of its certificate authority in target.registry_ca; if it speaks plain "
                "HTTP, write http:// before its name",
            ) from error
        except (requests.ConnectionError, requests.Timeout) as error:
            raise self._away(error) from error

    def _answer(self, response: requests.Response, scopes: Scopes) -> bool:
        """Answer the registry's challenge; returns whether to call again."""
        scheme, _, rest = response.headers.get("WWW-Authenticate", "").partition(" ")
        if scheme.lower() == "bearer":
            self._tokens[scopes] = self._token(dict(_CHALLENGE.findall(rest)), scopes)
            return True
        again = scheme.lower() == "basic" and self._login is not None and not self._basic
        self._basic = self._basic or again
        return again

    def _token(self, challenge: Mapping[str, str], scopes: Scopes) -> str:
        realm = challenge.get("realm", "")
        if urlsplit(realm).scheme != "https" and not self.plain:
            raise RegistryError(
                f"registry {self.host} sends to {realm or 'nowhere'} for tokens, which is no https URL",
                field="target.registry",
            )
        login, service = self._login, challenge.get("service", self.host)
        common: dict[str, Any] = {"timeout": _TIMEOUT, "verify": self._verify}
        try:
            if login and login.identity_token:
                form = {"grant_type": "refresh_token", "service": service, "client_id": "manycpu"}
                form |= {"scope": " ".join(scopes), "refresh_token": login.identity_token}
                response = self._session.post(realm, data=form, auth=_ANONYMOUS, **common)
            else:
                query = [("service", service), *(("scope", scope) for scope in scopes)]
                auth = (login.username, login.password) if login else _ANONYMOUS
                response = self._session.get(realm, params=query, auth=auth, **common)
        except (requests.ConnectionError, requests.Timeout) as error:
            raise self._away(error) from error
        if not response.ok:
            raise self._refused(response, "token")
        body = response.json()
        return str(body.get("token") or body.get("access_token"))

    def _refused(self, response: requests.Response, method: str) -> RegistryError:
        status = response.status_code
        who = f"as {self._login.username or 'a token'}" if self._login else "without a login"
        summary = f"registry {self.host} answers {method} {urlsplit(response.url).path} {who} with {status}"
        try:
            errors = response.json()["errors"]
            reason = ": " + "; ".join(f"{e['code']} {e.get('message', '')}".strip() for e in errors)
        except (KeyError, TypeError, ValueError):
            reason = ""
        fix = "See that the image's name is right" if status == _NOT_FOUND else None
        if status in (_UNAUTHORIZED, _FORBIDDEN):
            need = "another login" if self._login else "a login"
            fix = f"Give {need} for {self.host} in target.registry_connection or target.pull_secret"
        return RegistryError.of_status(status, f"{summary}{reason}", field="target.registry", fix=fix)

    def _away(self, error: Exception) -> TransientError:
        return TransientError(
            f"registry {self.host} does not answer: {_cause(error)}",
            field="target.registry",
            fix="See that it is reachable from here; for plain HTTP write http:// before its name",
        )


class _Header(AuthBase):
    """Sets the Authorization header for the registry only; prevents that requests reads ~/.netrc."""

    def __init__(self, address: str, value: str | None) -> None:
        self._address, self._value = address, value

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._value and urlsplit(request.url or "").netloc == self._address:
            request.headers["Authorization"] = self._value
        return request


_ANONYMOUS: Final = _Header("", None)


def _cause(error: BaseException) -> str:
    """Write the root cause of an error of requests."""
    inner = error.args[0] if error.args else None
    reason = getattr(inner, "reason", inner)
    return _cause(reason) if isinstance(reason, BaseException) else str(error)
