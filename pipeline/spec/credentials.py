"""Find and hide the secrets in the description of a run.

Secrets are the credentials of URLs (``user:password@``, tokens, what follows a ``?``), and the values of
variables and of a program's options that are named like a secret.

>>> redacted("not found: https://user:pw@host/set?sig=abc")
'not found: https://***@host/set?sig=***'
>>> redacted_description({"env": {"HF_TOKEN": "abc", "LANG": "C"}, "args": ["--api-key", "abc"]})
{'env': {'HF_TOKEN': '***', 'LANG': 'C'}, 'args': ['--api-key', '***']}
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

HIDDEN: Final = "***"
SHORTEST: Final = 5
"""Least characters of a secret that is searched for in other texts: a shorter one would match anywhere."""
_SCHEME: Final = r"([a-z][a-z0-9+.-]{0,30})://"  # bounded, as a search tries it at each character
_URL: Final = re.compile(rf"{_SCHEME}([^\s'\"<>]+?)(?=::|[\s'\"<>]|$)", re.IGNORECASE)
_NO_PORT: Final = r"(?!\d{1,5}(?:[/'\"<>]|[).,;:\]]*(?:\s|$)))"  # a port is no password
# A slash may be part of an AWS secret that is not quoted.
_USER_PATTERN: Final = re.compile(rf"([^/?#@:]*:{_NO_PORT}[^?#\s]*|[^/?#]+)@")
_LOGIN_NAME: Final = re.compile(r"[\w.+ -]*")  # no password, not even one whose colon is escaped
# Passwords that are not allowed in a URL, and that people write all the same: with quotes, spaces and `::`.
_ODD_PASSWORD: Final = re.compile(
    rf"{_SCHEME}([^\s/?#@:'\"<>]*:{_NO_PORT}[^\s/?#@][^/?#@\r\n]*)@", re.IGNORECASE
)
_QUERY_VALUE: Final = re.compile(r"(?<=[?&;#])([^=&;#]*=)((?:[^&;#)]|\)(?=\w))+)")
_TOKEN_PROTOCOLS: Final = frozenset({"http", "https", "webdav", "webdavs"})
"""Protocols where a name alone before the @ may be a token; also behind a plus sign, as in git+https."""
_SECRET_WORDS: Final = frozenset(
    {"key", "pass", "secrets", "credential", "credentials", "passphrase", "authorization", "jwt"}
)
"""Words in the name of a variable or an option whose value is a secret."""
_SECRET_LAST_WORDS: Final = frozenset({"pat", "pwd"})
"""Last words of such names, as in ``GITHUB_PAT`` and ``MYSQL_PWD``; alone, ``PWD`` is a folder."""
_SECRET_ENDINGS: Final = ("apikey", "password", "passwd", "secret", "token")
_PLACE_WORDS: Final = frozenset({"dir", "file", "name", "path"})
"""Last words of names whose value is the place of a secret, and no secret."""
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")
_VARIABLES: Final = ("env", "build_args")
"""Fields that are mappings with names of the user's own."""
_NEVER_MASKED: Final = frozenset({HIDDEN, "", "true", "false", "none", "null"})
"""Values that are not masked in other texts."""
_COMMON_LINE: Final = re.compile(r"(.)\1*|[A-Za-z_-]+:")
"""A line of a secret that many other texts have too: ``-----``, or a key alone, such as ``users:``."""
_JSON_PAIR: Final = re.compile(r"""(["'])([\w.-]+)\1(\s*:\s*)(["'])((?:\\.|(?!\4).)+)\4""", re.DOTALL)
_HEADER: Final = re.compile(r"([\w-]+):\s+(\S.*)", re.DOTALL)
"""A header of HTTP, such as ``Authorization: Bearer abc``."""
_WORD_BOUNDARY: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NAME: Final = re.compile(r"[\w.:/+-]+")
_NEXT_OPTION: Final = re.compile(r"--[a-zA-Z]+\d*([_.-][a-zA-Z]+\d*)*(=.*)?", re.DOTALL)
"""Matches a next option, and not a secret that begins with dashes."""


def redacted(text: str) -> str:
    """Hide the credentials of every URL in a text."""
    if "://" not in text:
        return text
    # Twice: a URL whose password has characters that URLs may not have is found whole only when that
    # password is hidden.
    return _hide_in_urls(_hide_odd_passwords(_hide_in_urls(text)))


def without_secrets(text: str, value: Any) -> str:
    """Hide the secrets of ``value``, a URL or a description, wherever ``text`` has them."""
    text = redacted(text)
    # Longest first, because one secret may be a part of another.
    for secret in sorted(secrets_in(value), key=len, reverse=True):
        if len(secret) >= SHORTEST:
            text = text.replace(secret, HIDDEN)
    return text


def redacted_fields(value: Any) -> Any:
    """Return a copy of a JSON value in which the credentials of every URL are hidden."""
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Mapping):
        return {name: redacted_fields(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted_fields(item) for item in value]
    return value


def redacted_description(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a run or a target with all secrets hidden: in URLs, variables and arguments."""
    shown: dict[str, Any] = redacted_fields(fields)
    return _hide_values_named_secret(shown, hide=lambda _: HIDDEN)


def redacted_options(words: Iterable[str]) -> list[str]:
    """Hide secrets in a program's arguments: after an option, in ``name=value``, and in JSON.

    >>> redacted_options(["--api-key", "--x7f", "--hfToken=abc", "--use-token", "--tokenizer", "bert"])
    ['--api-key', '***', '--hfToken=***', '--use-token', '--tokenizer', 'bert']
    """
    return _hide_options(words, hide=lambda _: HIDDEN)


def is_secret(name: str) -> bool:
    """Whether a variable or an option is named like a secret.

    >>> [name for name in ("HF_TOKEN", "MYSQL_PWD", "PWD", "TOKENIZERS", "TOKEN_FILE") if is_secret(name)]
    ['HF_TOKEN', 'MYSQL_PWD']
    """
    words = [word for word in re.split(r"[^a-z]+", _WORD_BOUNDARY.sub("_", name).lower()) if word]
    if len(words) > 1 and words[-1] in _SECRET_LAST_WORDS:
        return True
    if not any(word in _SECRET_WORDS or word.endswith(_SECRET_ENDINGS) for word in words):
        return False
    return words[-1] not in _PLACE_WORDS  # TOKEN_FILE names the place of a token


def is_secret_variable(name: str, value: str) -> bool:
    """Whether a variable is named like a secret, or has a URL with credentials in its value.

    >>> is_secret_variable("HTTPS_PROXY", "http://me:pw@proxy"), is_secret_variable("HTTPS_PROXY", "http://proxy")
    (True, False)
    """
    return is_secret(name) or redacted(value) != value


def proxies(environ: Mapping[str, str]) -> str:
    """Name the variables that set a proxy, with their values but without passwords; empty: there are none.

    >>> proxies({"HTTP_PROXY": "socks9://me:pw@proxy", "https_proxy": "me:pw@proxy:80", "NO_PROXY": "a.test"})
    'HTTP_PROXY=socks9://***@proxy, https_proxy=http://***@proxy:80'
    """
    values = {
        name: value if "://" in value else f"http://{value}"  # as libraries read it
        for name, value in environ.items()
        if value and name.lower() in _PROXIES
    }
    return ", ".join(f"{name}={redacted(value)}" for name, value in values.items())


def secret_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Select the secret variables (name -> value), except those whose value is hidden already."""
    return {name: value for name, value in env.items() if is_secret_variable(name, value) and value != HIDDEN}


Hide = Callable[[str], str]
"""Takes a secret, and returns the text to show in its place."""


def _hide_values_named_secret(fields: dict[str, Any], hide: Hide) -> dict[str, Any]:
    """Hide the variables and arguments that are named like a secret, in the fields of a run or a target."""
    shown: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _VARIABLES and isinstance(value, Mapping):
            shown[name] = {
                variable: hide(str(content)) if is_secret(variable) else content
                for variable, content in value.items()
            }
        elif name == "args" and isinstance(value, (str, list, tuple)):
            shown[name] = _hide_options([value] if isinstance(value, str) else map(str, value), hide)
        else:
            shown[name] = value
    return shown


def _hide_options(words: Iterable[str], hide: Hide) -> list[str]:
    """Hide the secrets in the words of a command: what follows a secret option, and parts of words."""
    shown = []
    follows_secret_option = False
    for word in words:
        if follows_secret_option and not _NEXT_OPTION.fullmatch(word):
            shown.append(hide(word))
        else:
            shown.append(_hide_in_word(word, hide))
        is_option = word.startswith("-") and _NAME.fullmatch(word) is not None
        follows_secret_option = is_option and is_secret(word)
    return shown


def _hide_in_word(word: str, hide: Hide) -> str:
    """Hide secrets within a word: a header, JSON, ``name=value``, or a whole command with blanks."""

    def hide_pair(pair: re.Match[str]) -> str:
        """Return the text that ``_JSON_PAIR`` matched; if its name is a secret's, with the value hidden."""
        quote, name, colon, value_quote, value = pair.groups()
        if not is_secret(name):
            return pair[0]
        return f"{quote}{name}{quote}{colon}{value_quote}{hide(value)}{value_quote}"

    if (header := _HEADER.fullmatch(word)) and is_secret(header[1]):
        return word[: header.start(2)] + hide(header[2])
    word = _JSON_PAIR.sub(hide_pair, word)
    # Of ``name=name=value``, the value of the first secret name is all that follows it.
    *names, _ = word.split("=")
    begin = 0
    for name in names:
        if not _NAME.fullmatch(name):
            break
        begin += len(name) + 1
        if is_secret(name):
            return word[:begin] + hide(word[begin:])
    parts = re.split(r"(\s+)", word)
    if len(parts) > 1:
        parts[::2] = _hide_options(parts[::2], hide)  # the words; the blanks between them stay
    return "".join(parts)


def secrets_in(value: Any) -> set[str]:
    """Collect the secrets in a value, to mask them: credentials in URLs, and values named like a secret.

    Each line of a secret with several lines, such as a key, counts too: programs print them one by one.
    """
    named_secret: set[str] = set()

    def collect(text: str) -> str:
        """Note a secret; return the text to show in its place."""
        named_secret.add(text)
        return HIDDEN

    def search(node: Any) -> None:
        """Collect the values named like a secret in a JSON value and in all values below it."""
        if isinstance(node, Mapping):
            # Not for its result: it calls ``collect`` with each secret.
            _hide_values_named_secret(dict(node), hide=collect)
        if isinstance(node, (Mapping, list, tuple)):
            for child in node.values() if isinstance(node, Mapping) else node:
                search(child)

    search(value)
    whole = _credentials(value) | {text for text in named_secret if text.lower() not in _NEVER_MASKED}
    lines = {line.strip() for text in whole if "\n" in text for line in text.splitlines()}
    return whole | {
        line
        for line in lines
        if len(line) >= SHORTEST and line.lower() not in _NEVER_MASKED and not _COMMON_LINE.fullmatch(line)
    }


def _credentials(value: Any) -> set[str]:
    """Collect the credentials in the URLs of a value: users, passwords, tokens, and what follows a ``?``."""
    users: list[str] = []  # ``user:password``, or a token
    query_values: list[str] = []
    for text in _texts_in(value):
        for url in _URL.finditer(text):
            user = _user_part(url[1], url[2])
            if user is not None:
                users.append(user[1])
        # Odd passwords have characters that URLs may not have. They are searched for when the users of all
        # other URLs are hidden.
        odd = _ODD_PASSWORD.finditer(_hide_in_urls(text))
        users += [url[2] for url in odd if _may_have_user(url[1])]
        # A URL with an odd password is found whole only when that password is hidden.
        for url in _URL.finditer(_hide_odd_passwords(text)):
            query_values += [match[2] for match in _QUERY_VALUE.finditer(url[2])]
    passwords = [user.split(":", 1)[-1] for user in users]  # of a token, the token itself
    return {*users, *passwords, *query_values} - {"", HIDDEN}


def _hide_in_urls(text: str) -> str:
    """Hide the user and the query values of every URL that ``_URL`` matches in a text."""
    return _URL.sub(lambda url: _hide_in_url(url[1], url[2]), text)


def _hide_odd_passwords(text: str) -> str:
    """Hide passwords with characters that are not allowed in a URL."""
    return _ODD_PASSWORD.sub(lambda url: f"{url[1]}://{HIDDEN}@" if _may_have_user(url[1]) else url[0], text)


def _may_have_user(protocol: str) -> bool:
    """Whether a URL of a protocol may have a user before an @: not ``github://OWNER:NAME@REVISION``."""
    return protocol.lower() != "github"


def _hide_in_url(protocol: str, rest: str) -> str:
    """Write a URL with its user and its query values hidden; ``rest`` is what follows ``://``."""
    user = _user_part(protocol, rest)
    shown = f"{HIDDEN}@{rest[user.end() :]}" if user else rest
    return f"{protocol}://" + _QUERY_VALUE.sub(rf"\g<1>{HIDDEN}", shown)


def _user_part(protocol: str, rest: str) -> re.Match[str] | None:
    """Match ``user:password@`` or ``token@`` at the beginning of what follows ``://``.

    None: the URL has neither, or only the name of a login, which may be shown.
    """
    user = _USER_PATTERN.match(rest)
    if user is None or not _may_have_user(protocol):
        return None
    # Where a name alone is no token, it is a login and may be shown.
    takes_tokens = protocol.lower().rpartition("+")[2] in _TOKEN_PROTOCOLS
    is_login = not takes_tokens and _LOGIN_NAME.fullmatch(user[1]) is not None
    return None if is_login else user


def _texts_in(value: Any) -> Iterator[str]:
    """Yield every text in a JSON value that may have a URL, except the keys of mappings."""
    if isinstance(value, str):
        if "://" in value:
            yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(item)
