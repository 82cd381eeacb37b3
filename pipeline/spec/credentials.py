"""Credentials that stand in URLs: ``user:password@``, tokens, and what follows a ``?``.

>>> redacted("not found: https://user:pw@host/set?sig=abc")
'not found: https://***@host/set?sig=***'
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

__all__ = ["HIDDEN", "redacted", "redacted_fields", "redacted_options", "secrets_in", "without"]

HIDDEN: Final = "***"
_SHORTEST: Final = 5  # characters: what is shorter is in any text
_URL: Final = re.compile(r"([a-z][a-z0-9+.-]*)://([^\s'\"<>]+?)(?=::|[\s'\"<>]|$)", re.IGNORECASE)
_NO_PORT: Final = r"(?!\d{1,5}(?:[/'\"<>]|[).,;:\]]*(?:\s|$)))"  # what begins like a port is no password
# Of an AWS secret that is not quoted a slash may be part.
_USER: Final = re.compile(rf"([^/?#@:]*:{_NO_PORT}[^?#\s]*|[^/?#]+)@")
# Passwords that no URL may have and that people write: with quotes, spaces and `::`.
_ODD: Final = re.compile(
    rf"([a-z][a-z0-9+.-]*)://([^\s/?#@:'\"<>]*:{_NO_PORT}[^\s/?#@][^/?#@\r\n]*)@", re.IGNORECASE
)
_VALUE: Final = re.compile(r"(?<=[?&;#])([^=&;#]*=)((?:[^&;#)]|\)(?=\w))+)")
_TOKENS: Final = frozenset({"http", "https", "webdav", "webdavs"})
"""Protocols where a name alone before the @ may be a token; as what others go over too, such as git+https."""
_REVISIONS: Final = frozenset({"github", "hf"})
"""Protocols where what follows the @ is a revision."""
_SECRET: Final = frozenset(
    {"key", "token", "password", "passwd", "secret", "credential", "credentials", "apikey"}
)
"""Words in the name of an option whose value is shown to nobody."""
_CAPITAL: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


def redacted(text: str) -> str:
    """Hide the credentials of every URL in a text."""
    return _in_urls(_without_odd(_in_urls(text)))


def without(text: str, url: str | None) -> str:
    """Hide the credentials of a URL in a text, also where a library quotes only a part of it."""
    text = redacted(text)
    for secret in sorted(secrets_in(url), key=len, reverse=True):
        text = text.replace(secret, HIDDEN) if len(secret) >= _SHORTEST else text
    return text


def redacted_fields(value: Any) -> Any:
    """Hide the credentials of every URL in what JSON can hold."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {name: redacted_fields(each) for name, each in value.items()}
    return [redacted_fields(each) for each in value] if isinstance(value, (list, tuple)) else value


def redacted_options(words: Iterable[str]) -> list[str]:
    """Hide the values of a program's options that are called like a secret; also of ``name=value``.

    >>> redacted_options(["--api-key", "abc", "--hfToken=abc", "--tokenizer", "bert"])
    ['--api-key', '***', '--hfToken=***', '--tokenizer', 'bert']
    """
    shown, hides = [], False
    for word in words:
        if hides and not word.startswith("--"):
            shown.append(HIDDEN)
            hides = False
            continue
        name, equals, _ = word.partition("=")
        is_secret = _is_secret(name)
        shown.append(f"{name}={HIDDEN}" if is_secret and equals else word)
        hides = is_secret and not equals and name.startswith("-")
    return shown


def _is_secret(name: str) -> bool:
    return not _SECRET.isdisjoint(re.split(r"[^a-z]+", _CAPITAL.sub("_", name).lower()))


def secrets_in(value: Any) -> set[str]:
    """Collect the credentials in the URLs of a value, to mask them."""
    texts = list(_texts(value))
    urls = [url for text in texts for url in _URL.finditer(text)]
    users = [user[1] for url in urls if (user := _user(url[1], url[2]))]
    odd = [url[2] for text in texts for url in _ODD.finditer(_in_urls(text)) if _may_have_user(url[1])]
    rest = [url[2] for text in texts for url in _URL.finditer(_without_odd(text))]
    values = [match[2] for shown in rest for match in _VALUE.finditer(shown)]
    users += odd
    return {*users, *(user.split(":", 1)[-1] for user in users), *values} - {""}


def _in_urls(text: str) -> str:
    return _URL.sub(lambda url: _hide(url[1], url[2]), text)


def _without_odd(text: str) -> str:
    return _ODD.sub(lambda url: f"{url[1]}://{HIDDEN}@" if _may_have_user(url[1]) else url[0], text)


def _may_have_user(protocol: str) -> bool:
    return protocol.lower() not in _REVISIONS


def _hide(protocol: str, rest: str) -> str:
    user = _user(protocol, rest)
    shown = f"{HIDDEN}@{rest[user.end() :]}" if user else rest
    return f"{protocol}://" + _VALUE.sub(rf"\g<1>{HIDDEN}", shown)


def _user(protocol: str, rest: str) -> re.Match[str] | None:
    user = _USER.match(rest)
    if user is None or not _may_have_user(protocol):
        return None
    return user if ":" in user[1] or protocol.lower().rpartition("+")[2] in _TOKENS else None


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)
