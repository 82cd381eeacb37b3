"""Read, write and list files on disk or behind a URL, by fsspec."""

import hashlib
import os
import re
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from inspect import signature
from io import FileIO
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, cast
from urllib.parse import unquote, urlsplit

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile

from manycpu.pipeline.adapters.listing import (
    Item,
    LeftOut,
    OddFileError,
    Rows,
    below,
    item_of,
    leads_out,
    regular,
)
from manycpu.pipeline.adapters.read_ahead import PART_BYTES, in_order
from manycpu.pipeline.spec.credentials import redacted, without_secrets
from manycpu.pipeline.spec.errors import BadInputError, Finding, as_error, require
from manycpu.pipeline.spec.output import claimed_by, partial_name
from manycpu.pipeline.spec.words import did_you_mean

_BLOCK_BYTES = 1 << 18
_WEB_TIMEOUT_S: Final = 300.0  # for a web server to send the next bytes
_BUSY: Final = frozenset({429, 500, 502, 503, 504})  # statuses of HTTP after which the Hub is asked again
_PAUSES_S: Final = 1, 2, 4, 8, 8  # as the Hub's client pauses, except when it asks for a commit
_GONE: Final = frozenset({404, 410})
"""Statuses of HTTP with which a web server says that there is no such file."""
_NAMELESS: Final = "download"
"""Name of a file whose URL has none that a file on disk can have."""
_S3: Final = frozenset({"s3", "s3a"})
_BUCKETS: Final = frozenset({*_S3, "abfs", "abfss", "az", "gcs", "gs"})
"""Protocols whose storage has objects in buckets, and no folders."""
_LOGIN: Final = re.compile(r"^(s3a?://)([\w.-]+)@")
"""Matches the beginning of a URL of S3 that names a login: ``s3://LOGIN@``."""
_BARE_PROTOCOL: Final = re.compile("[a-z]+")
"""Matches a part of a chained URL that fsspec takes for a protocol alone, and not for a path."""
_BUCKET: Final = re.compile(r"[a-zA-Z0-9._-]+(/|$)|arn:aws[a-z-]*:s3")
VERSION: Final = "?versionId="
"""What s3fs writes between a key of S3 and its version; s3fs reads it so in every name."""
Block = bytes | memoryview


class Reading(NamedTuple):
    """A file that is read from an offset on."""

    blocks: Iterator[Block]
    sha256: Callable[[], str]
    """Call it after the last block: returns the sha256 of the whole file as it was read; empty: unknown."""
    path: str | None = None
    """The file's path on this machine's disk, where it may be cloned instead of read; None: it has none."""


@dataclass(frozen=True)
class Location:
    """A folder or a file, on disk or behind a URL."""

    url: str
    fs: Any  # fsspec's file system
    root: str  # its path there
    chosen: tuple[str, ...] | None = None
    """Paths of the files below to use; None: all."""
    left_out: LeftOut | None = None
    """Called for what cannot be copied, such as a FIFO; None: that is an error."""
    is_fixed: bool = False
    """Whether it is a commit of the Hub, which never changes."""

    @classmethod
    def of(cls, url: str, field: str) -> "Location":
        """Open a path or an fsspec URL.

        Args:
            url: Such as ``/data/squad``, ``s3://bucket/squad`` or ``hf://datasets/rajpurkar/squad``. A login
                may be named, as in ``s3://login@bucket/squad``.
            field: The field it came from, for the error.

        Raises:
            BadInputError: :func:`fault_of` finds a fault, or the URL cannot be opened, for example because
                this environment lacks the protocol's package.
        """
        if fault := fault_of(url, field):
            raise as_error([fault])
        if url.startswith("hf://"):
            require("helper", field, "a URL of the Hub")
        login = login_of(url)
        options = login_options(login, field) if login else {}
        try:
            if is_remote(url):
                _forget_other_clients(_read_by_clients())
                fs, root = fsspec.core.url_to_fs(_LOGIN.sub(r"\1", url), **options)
            else:  # a path on disk, in which "::" chains no protocols
                fs, root = LocalFileSystem(), fsspec.core.strip_protocol(url)
        except Exception as error:
            # Every protocol of fsspec has its own errors.
            fix = "Install the package that fsspec names, mend the URL, or use another protocol"
            text = without_secrets(f"{url!r} cannot be opened: {error}", url)
            raise BadInputError(text, field=field, fix=fix) from error
        return cls(url, fs, root)

    @property
    def local(self) -> Path | None:
        """The path on disk; None: the location is behind a URL."""
        return Path(self.root) if isinstance(self.fs, LocalFileSystem) else None

    @property
    def name(self) -> str:
        """The name that a copy gets, if this location is one file.

        The query of a web URL is left out: it may hold a secret.
        """
        if not self.root.startswith(("http://", "https://")):  # as also behind simplecache::
            return self.root.rsplit("/", 1)[-1]
        name = unquote(urlsplit(self.root).path.rsplit("/", 1)[-1])
        return _NAMELESS if name in ("", ".", "..") or "/" in name or "\0" in name else name

    @property
    def in_bucket(self) -> bool:
        """Whether it is in an object store, which has no folders; files appear there whole or not at all."""
        return in_bucket(self.url)

    @property
    def bucket(self) -> "Location":
        """The bucket that this location is in; only for locations in an object store."""
        return replace(self, root=self.root.partition("/")[0])

    @property
    def tells_sha256(self) -> bool:
        """Whether :meth:`read` gives the sha256 of whole files; false here: it may read a part of one."""
        return False

    def at_commit(self) -> "Location":
        """Return the location of the commit that a revision of the Hub, such as a branch, names now.

        Locations that have no commit, such as all other storage, are returned unchanged.

        Raises:
            FileNotFoundError: There is no such repository or revision, or not for this account.
            OSError: The Hub refuses to say, or is still busy after half a minute.
            Exception: The Hub cannot be reached, or each of its answers breaks off; the class of the error
                depends on the HTTP library of the Hub's client.
        """
        if not self._is_hub:
            return self
        from huggingface_hub.utils import http_backoff  # type: ignore[attr-defined] # of() has found it

        # Errors of a broken connection, which depend on the client's HTTP library. The client retries after
        # them by itself, but not when it asks for a commit.
        broken = signature(http_backoff).parameters["retry_on_exceptions"].default
        for pause_s in _PAUSES_S:
            try:
                return self._at_commit()
            except broken:
                pass
            except OSError as error:
                if getattr(getattr(error, "response", None), "status_code", None) not in _BUSY:
                    raise
            time.sleep(pause_s)
        return self._at_commit()

    def _at_commit(self) -> "Location":
        """Ask the Hub once for the commit that the revision names; return a location of that commit."""
        from huggingface_hub import HfApi  # of() has found it

        self.fs.invalidate_cache()  # the revision may name another commit by now
        named = self.fs.resolve_path(self.root)
        if not hasattr(named, "repo_id"):  # a bucket, which has no commits
            return self
        hub = HfApi(endpoint=self.fs.endpoint, token=self.fs.token)
        commit = hub.repo_info(named.repo_id, revision=named.revision, repo_type=named.repo_type).sha
        if commit is None:  # a mirror that does not say
            return self
        root = replace(named, revision=commit, _raw_revision=None).unresolve()
        self.fs.resolve_path(root)  # asks once whether the commit exists: here, where errors are retried
        return replace(self, root=root, is_fixed=True)

    def only(self, paths: Iterable[str]) -> "Location":
        """Return this location, restricted to some of the files below it."""
        return replace(self, chosen=tuple(paths))

    def without_odd(self, left_out: LeftOut) -> "Location":
        """Return this location without what cannot be copied, such as a FIFO; call ``left_out`` for that."""
        return replace(self, left_out=left_out)

    def exists(self) -> bool:
        """Whether there is a file or a folder.

        Raises:
            OSError: It is on a disk that cannot tell, such as a network volume that does not answer.
        """
        return self._is_there(self.root)

    def missing(self, timeout_s: float) -> str | None:
        """Return why a location in a bucket, on the Hub or on a web server does not exist.

        None: it exists, or that is unknown, as :meth:`fault` says.
        """
        error = self.fault(timeout_s)
        return without_secrets(str(error), self.url) if isinstance(error, FileNotFoundError) else None

    def fault(self, timeout_s: float) -> Exception | None:
        """Ask once for a location in a bucket, on the Hub or on a web server; return the error.

        None: it exists, or that is unknown: the server is busy, or the storage is of another kind.

        Returns:
            FileNotFoundError: It does not exist.
            TimeoutError: A bucket's server has not answered within ``timeout_s`` seconds.
            Exception: A bucket's server or the Hub cannot be reached, or refuses this machine's login. Each
                protocol has errors of its own.
        """
        if not (self.in_bucket or self._is_http or self._is_hub):
            return None  # some protocols have no information about folders
        fs = self.fs
        if self._is_s3:
            # By default, botocore asks for ten seconds and more whether a closed port is open now.
            config = {"config_kwargs": fs.config_kwargs | {"retries": {"max_attempts": 0}}}
            fs = type(fs)(*fs.storage_args, **fs.storage_options | config)
        fs.invalidate_cache()
        try:
            fs.info(self.root, timeout=timeout_s)
        except FileNotFoundError as error:
            # fsspec turns every error of a web server into this one.
            is_clear = not self._is_http or getattr(error.__cause__, "status", None) in _GONE
            return error if is_clear else None
        except Exception as error:  # noqa: BLE001 - each fsspec protocol raises its own error types
            if self._is_s3 and not isinstance(error, TimeoutError):
                return _error_of_list(fs, self.root, timeout_s)
            return error if self.in_bucket or self._is_hub else None
        return None

    def is_file(self) -> bool:
        """Whether this is one file.

        Raises:
            OSError: The location is in a bucket or on the Hub, and this cannot be read or reached.
        """
        if not (self.in_bucket or self._is_hub):
            return bool(self.fs.isfile(self.root))
        try:  # isfile() answers no to every error, such as a broken connection
            return bool(self.fs.info(self.root)["type"] == "file")
        except FileNotFoundError:
            return False
        except Exception:  # noqa: BLE001 - each fsspec protocol raises its own error types
            # Try a list: the account may have no other right, and an error of a list has a reason in it.
            self.fs.invalidate_cache()
            with suppress(FileNotFoundError):
                return self.root in self.fs.ls(self.root, detail=False)
            return False

    def is_web_page(self, timeout_s: float | None = None) -> bool:
        """Whether a web server answers with a page, such as a list of files, instead of a file.

        A page whose URL ends in .html or .htm counts as a file. False also for other storage.

        Raises:
            OSError: There is no such file, or the server has not answered within ``timeout_s`` seconds.
        """
        if not self._is_http:
            return False
        info = self.fs.info(self.root, timeout=timeout_s)
        asked, answered = urlsplit(self.url), urlsplit(info.get("url", self.url))  # after redirects
        is_html = info.get("mimetype") in ("text/html", "application/xhtml+xml")
        is_folder = answered.path.endswith("/") and not answered.query
        return is_folder or (is_html and not asked.path.endswith((".html", ".htm")))

    def items(self, tick: Callable[[], None] = lambda: None) -> Rows[Item]:
        """List every file below, sorted by path; or only this file, if the location is one file.

        ``tick`` is called for each file below a folder on disk.

        Raises:
            OddFileError: An entry is neither a file nor a folder, and there is no ``left_out``. Or its path
                leads out of the folder, as one in an archive may. Or no file on disk can have its name. Or
                the location is a web page, or both a file and a folder.
            OSError: A folder cannot be read.
        """
        if self.local is None and not self.is_fixed:
            self.fs.invalidate_cache()  # there may be new files, and new content
        if self.is_file():
            if self._is_s3 and self._is_folder_too():  # which of the two is meant, cannot be told
                raise OddFileError("it is both a file and a folder")
            if self.is_web_page():
                raise OddFileError(
                    "it is a web page, such as a list of files, and no data set: name a file of it"
                )
            return Rows(Item, [self._item(self.name)])
        if self.chosen is not None:
            return Rows(Item, map(self._item, self.chosen))
        if self.local:
            return Rows(Item, self._on_disk(tick))
        rows = Rows(Item, self._behind_url())
        # Most protocols list by path already: then no second copy of the list is made.
        in_order = all(item.path < following.path for item, following in pairwise(rows))
        return rows if in_order else Rows(Item, sorted(rows))

    def open(self, path: str) -> BinaryIO:
        """Open a file below to read it; if this location is one file, open that, whatever ``path`` is."""
        if isinstance(self.fs, LocalFileSystem):
            return open_file(self._at(path))  # three times as fast as fsspec for small files
        return cast("BinaryIO", self.fs.open(self._at(path)))

    @contextmanager
    def writing(self, path: str, *, new: bool = False) -> Iterator[BinaryIO]:
        """Open a file below to write it; its folder is made.

        After an error on disk, the half-written file stays. After an error behind a URL, the file does not
        exist, or still has its earlier content: the upload is discarded, which fsspec would else complete.

        Args:
            path: The file.
            new: Raise an error if the file exists by the time this one is closed. Only S3 can check that:
                with other storage, ``new`` has no effect.

        Raises:
            FileExistsError: ``new`` is set, and the file exists.
        """
        at = self._below(path)
        self._make_folder(at)
        file: Any = self.fs.open(at, "xb" if new and self._is_s3 else "wb")
        try:
            yield file
            file.close()
        except BaseException:
            with suppress(Exception):  # the connection may be broken: see delete_broken_uploads()
                if isinstance(file, AbstractBufferedFile):  # of a URL
                    file.closed = True  # so that nothing completes it
                    file.discard()
                else:
                    file.close()
            raise

    def delete_broken_uploads(self, paths: Container[str]) -> None:
        """On S3, delete the unfinished uploads of ``paths``, which killed processes left; else do nothing."""
        if not self._is_s3:
            return
        bucket, key, _ = self.fs.split_path(self.root)
        prefix = f"{key}/" if key else ""
        with suppress(OSError):  # the right to list them may be missing
            # Without UploadIdMarker, which some servers refuse: a page may end between two uploads of a key.
            for upload in self._s3_list("list_multipart_uploads", "Uploads", "KeyMarker"):
                if upload["Key"].removeprefix(prefix) in paths:
                    upload_id = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    self.fs.call_s3("abort_multipart_upload", Bucket=bucket, **upload_id)

    def read(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        """Yield a Reading for each file, which begins at the file's offset (in bytes) in ``starts``.

        The sha256 is known only for large files of the Hub (LFS), of which the Hub tells it.
        """
        if self._is_s3:
            yield from self._read_ahead(items, starts)
            return
        for item, start in zip(items, starts, strict=True):
            on_disk = self._at(item.path) if self.local and not item.is_folder else None
            yield Reading(self._from(item, start), sha256=partial(self._told_sha256, item), path=on_disk)

    def _told_sha256(self, item: Item) -> str:
        """Return the sha256 that the Hub lists for a file; empty: it lists none, or this is other storage."""
        lfs = self.fs.info(self._at(item.path)).get("lfs") if self._is_hub else None
        return str(lfs["sha256"]) if lfs else ""

    def _read_ahead(self, items: Rows[Item], starts: Sequence[int]) -> Iterator[Reading]:
        """Yield a Reading for each file on S3; several requests run at once, also for the next files.

        All Readings take their parts in order from one iterator: read each to its end before the next one.
        """
        parts = in_order(
            partial(self._part, self._at(item.path), item, begin)
            for item, start in zip(items, starts, strict=True)
            for begin in self._begins(item, start)
        )
        for item, start in zip(items, starts, strict=True):
            yield Reading(islice(parts, len(self._begins(item, start))), sha256=str)  # str() is empty

    def _begins(self, item: Item, start: int) -> range:
        """Return the offsets at which the parts of a file on S3 begin; one request reads one part."""
        return range(start, item.size, min(PART_BYTES, int(self.fs.default_block_size)))

    def _part(self, at: str, item: Item, begin: int) -> bytes:
        """Read the part of a file on S3 that begins at the offset ``begin``, with one request.

        Raises:
            OSError: The file has changed since it was listed.
        """
        length = min(self._begins(item, begin).step, item.size - begin)  # the step is the size of a part
        with self.fs.open(at, size=item.size, cache_type="none") as file:
            # Known from the list of files: s3fs would ask for them by another request.
            file.details = {"name": at, "size": item.size, "ETag": item.version}
            if item.version:  # s3fs does this by itself only for files without a size
                file.read_kw = {**getattr(file, "read_kw", {}), "IfMatch": item.version}
            file.seek(begin)
            part = cast("bytes", file.read(length))
        if len(part) != length:
            raise OSError(f"{at}: there are {len(part)} bytes from {begin} on, and {length} should be")
        return part

    def write_text(self, path: str, text: str) -> None:
        """Write a small file below; on disk atomically."""
        at = self._below(path)
        self._make_folder(at)
        if self.local is None:
            self.fs.pipe_file(at, text.encode())
            return
        partial = Path(at).with_name(partial_name(Path(at).name))
        try:
            with partial.open("wb") as file:
                file.write(text.encode())
                file.flush()
                # Else a loss of power may leave an empty report, which its run takes for a file of others.
                os.fsync(file.fileno())
            partial.replace(at)
        except OSError:  # such as a full disk
            with suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def read_text(self, path: str) -> str | None:
        """Read a small file below; None: there is none. If this location is one file, that is read.

        Raises:
            OddFileError: It is no regular file, such as a FIFO, which would block.
        """
        content = self._content(path)
        return None if content is None else content.decode(errors="replace")

    def begins(self, path: str, start: bytes) -> bool:
        """Whether a file below exists and begins with ``start``; only that many bytes are read."""
        try:
            return self._content(path, len(start)) == start
        except OddFileError:
            return False

    def _content(self, path: str, size: int | None = None) -> bytes | None:
        """Read a file below, or its first ``size`` bytes; None: there is none."""
        try:
            at = self._at(path)
            if self.local is None or Path(at).is_dir():  # of a folder, fsspec raises IsADirectoryError
                # S3 refuses to send a part of an empty object.
                is_empty = size is not None and self.fs.size(at) == 0
                return b"" if is_empty else cast("bytes", self.fs.cat_file(at, end=size))
            with open_file(at) as file:
                return file.read(-1 if size is None else size)
        except (FileNotFoundError, IsADirectoryError):
            return None

    def remove(self, path: str) -> None:
        """Delete a file below."""
        self.fs.rm_file(self._below(path))

    def names(self, prefix: str) -> list[str]:
        """List the names directly below that begin with a prefix; empty also if there is no such folder."""
        try:
            if self._is_s3:  # one request, whatever else there is
                entries = self._s3_list("list_objects_v2", "Contents", "ContinuationToken", prefix)
                paths = [entry["Key"].removeprefix(self._s3_prefix) for entry in entries]
                return [path for path in paths if "/" not in path]
            self.fs.invalidate_cache()  # there may be new files
            found = cast("list[str]", self.fs.ls(self.root, detail=False))
        except FileNotFoundError:
            return []
        names = [path.rstrip("/").rsplit("/", 1)[-1] for path in found]
        return [name for name in names if name.startswith(prefix)]

    def outer(self) -> Iterator["Location"]:
        """Yield the folders around this one in its bucket of S3, the nearest first; elsewhere none."""
        if self._is_s3:
            bucket, key, _ = self.fs.split_path(self.root)
            parts = [bucket, *key.rstrip("/").split("/")]
            for depth in range(len(parts) - 1, 0, -1):
                root = "/".join(parts[:depth])
                yield Location(f"s3://{root}", self.fs, root)

    def has(self, path: str) -> bool:
        """Whether there is such a file below; raise OSError if a disk cannot tell."""
        return self._is_there(self._below(path))

    def _is_there(self, at: str) -> bool:
        """Whether there is a file or a folder at a path of ``fs``; raise OSError if a disk cannot tell."""
        if self.local is None:
            return bool(self.fs.exists(at))
        try:  # fsspec answers no to every error
            os.stat(at)  # noqa: PTH116 - Path.exists() answers no to some errors
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def modified(self, path: str) -> float | None:
        """Return when a file below was last changed, in seconds since the epoch; None: that is unknown."""
        with suppress(Exception):  # each fsspec protocol raises its own error types
            when = self.fs.modified(self._below(path))
            if when.tzinfo:  # else the time zone is unknown
                return float(when.timestamp())
        return None

    def sha256(self, item: Item, tick: Callable[[], None] = lambda: None) -> str:
        """Read a file below and hash it; ``tick`` is called after each block."""
        return self.hashed(item, tick=tick)[1]

    def hashed(
        self, item: Item, size: int | None = None, tick: Callable[[], None] = lambda: None
    ) -> tuple[int, str]:
        """Hash a file below, or its first ``size`` bytes; returns the number of bytes and their sha256."""
        digest, count = hashlib.sha256(), 0
        for block in self._from(item, start=0):
            part = block if size is None else block[: size - count]
            digest.update(part)
            count += len(part)
            tick()
            if count == size:
                break
        return count, digest.hexdigest()

    def _from(self, item: Item, start: int) -> Iterator[bytes]:
        """Yield the blocks of a file from an offset on; none of an empty folder."""
        if item.is_folder:
            return
        position = start
        try:
            with self.open(item.path) as file:
                file.seek(start)
                for block in blocks(file):
                    position += len(block)
                    yield block
                return
        except (TimeoutError, ValueError):
            # A web server may send only whole files: fsspec then refuses a large one (ValueError), or cannot
            # read it within its five minutes.
            if not self._is_http:
                raise
        yield from self._from_whole(item, position)

    def _from_whole(self, item: Item, start: int) -> Iterator[bytes]:
        """Yield the blocks of a file on a web server from an offset on; one request reads the whole file."""
        from aiohttp import ClientTimeout  # fsspec needs it for this protocol, and no other

        # By default a request may take five minutes in all.
        timeout = ClientTimeout(total=None, sock_connect=_WEB_TIMEOUT_S, sock_read=_WEB_TIMEOUT_S)
        with self.fs.open(self._at(item.path), block_size=0, size=item.size, timeout=timeout) as file:
            for block in blocks(file):
                if len(block) > start:
                    yield block[start:]
                start = max(0, start - len(block))

    @property
    def _is_http(self) -> bool:
        return protocols(self.url)[:1] in (["http"], ["https"])

    @property
    def _is_hub(self) -> bool:
        return protocols(self.url)[:1] == ["hf"]

    @property
    def _is_s3(self) -> bool:
        return not _S3.isdisjoint(protocols(self.url)[:1])

    def _make_folder(self, at: str) -> None:
        """Make the folder that a file is in; in buckets, which have no folders, do nothing.

        There fsspec would make a missing bucket.
        """
        if not self.in_bucket:
            self.fs.makedirs(at.rsplit("/", 1)[0], exist_ok=True)

    @cached_property
    def _is_one_file(self) -> bool:
        return self.is_file()

    def _at(self, path: str) -> str:
        """Return the path of a file below; if this location is one file, the path of that file."""
        return self.root if self._is_one_file else self._below(path)

    def _below(self, path: str) -> str:
        """Return the path of a file below in the file system ``fs``."""
        if self._is_s3:
            _refuse_version(path)
        return f"{self.root.rstrip('/')}/{path}"

    def _item(self, path: str) -> Item:
        """Make the item of a file below, or of an empty folder, whose path ends with a slash."""
        if path.endswith("/"):
            return Item(path, size=0, version="")
        at = self._at(path)
        return item_of(path, Path(at).stat()) if self.local else _described(path, self.fs.info(at))

    def _on_disk(self, tick: Callable[[], None]) -> Iterator[Item]:
        """Yield the files below a folder on disk, and call ``tick`` for each."""
        for item in below(self.root, self.left_out):
            tick()
            yield item

    def _behind_url(self) -> Iterator[Item]:
        """Yield the files behind a URL, without the claims of runs.

        Raises:
            OddFileError: A path leads out of the folder, or no file on disk can have it.
        """
        base = self.root.rstrip("/") + "/"
        for path, info in self._s3_objects() if self._is_s3 else self._listed_by_fsspec():
            name = path.removeprefix(base)
            if leads_out(name):
                raise OddFileError(f"{name!r} leads out of its folder")
            if self.in_bucket:
                _refuse_odd_key(path, name, info["size"])
            if self._is_s3:
                _refuse_version(name)
            # Some protocols list folders as files with a slash at the end; these are no empty folders.
            if path[-1] != "/" and claimed_by(name) is None:
                yield _described(name, info)

    def _is_folder_too(self) -> bool:
        """Whether S3 has objects below a key that is an object itself; false if that cannot be listed."""
        with suppress(PermissionError):  # the account may read objects, and not list them
            return next(self._s3_objects(), None) is not None
        return False

    def _listed_by_fsspec(self) -> Iterable[tuple[str, dict[str, Any]]]:
        """Return path and description of each file below, as fsspec lists them."""
        return cast("dict[str, dict[str, Any]]", self.fs.find(self.root, detail=True)).items()

    def _s3_objects(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield path, size and ETag of each object below.

        s3fs's own list would keep a kilobyte of memory for each object.
        """
        bucket, _, _ = self.fs.split_path(self.root)
        for entry in self._s3_list("list_objects_v2", "Contents", "ContinuationToken"):
            yield f"{bucket}/{entry['Key']}", {"size": entry["Size"], "ETag": entry.get("ETag")}

    @property
    def _s3_prefix(self) -> str:
        """What the keys of S3 below begin with."""
        key: str = self.fs.split_path(self.root)[1]
        return f"{key}/" if key else ""

    def _s3_list(self, method: str, entries: str, marker: str, prefix: str = "") -> Iterator[dict[str, Any]]:
        """Yield each entry of a list of S3 for the keys below, page by page.

        Args:
            method: The method of the client that returns a page.
            entries: The field of a page that has its entries.
            marker: The argument that asks for the next page; each page has its value for the next one.
            prefix: What the keys begin with below.
        """
        bucket, _, _ = self.fs.split_path(self.root)
        request = {"Bucket": bucket, "Prefix": f"{self._s3_prefix}{prefix}"}
        while True:
            # req_kw: what s3fs itself adds to its requests, such as who pays for them.
            page = self.fs.call_s3(method, self.fs.req_kw, **request)
            yield from page.get(entries, ())
            if not page.get("IsTruncated"):
                return
            following = page.get(f"Next{marker}")
            if following in (None, request.get(marker)):
                raise OSError(f"the server's list of {self.root} is cut, and it names no further page")
            request[marker] = following


def _refuse_odd_key(path: str, name: str, size: int) -> None:
    """Raise OddFileError if an object's name cannot become a file name.

    It cannot if a part of it is empty or ".", or if it ends in "/" and the object has bytes.

    Args:
        path: The object's path with its bucket, for the error.
        name: Its path below the folder that is listed.
        size: Its bytes.
    """
    if path.endswith("/") and size:
        raise OddFileError(f"{path!r} is named like a folder, and holds {size} bytes")
    # No part of the path may be empty or ".", as in "a//b".
    if name and not {"", "."}.isdisjoint(name.removesuffix("/").split("/")):
        raise OddFileError(f"{name!r} is no name of a file on disk")


def _refuse_version(path: str) -> None:
    """Raise OddFileError for a key with ``?versionId=``: s3fs would read a version of another key."""
    if VERSION in path:
        raise OddFileError(f"{path!r} names a version, and no key")


# Fields by which a protocol tells that a file has changed, the best one first.
_VERSIONS: Final = ("ETag", "etag", "blob_id", "mtime", "Content-MD5", "Digest", "Last-Modified")


def _described(path: str, info: dict[str, Any]) -> Item:
    """Make an item from fsspec's description of a file; an empty version: the protocol tells none."""
    version = next((str(info[name]) for name in _VERSIONS if info.get(name)), "")
    return Item(path, int(info["size"] or 0), version)


def open_file(path: str) -> FileIO:
    """Open a regular file of this disk without a buffer, to read it in blocks.

    Raises:
        OddFileError: It is no regular file, such as a FIFO, which would block.
    """

    def open_regular(path: str, flags: int) -> int:
        """Open a file for ``open()``, and refuse it if it is no regular file."""
        descriptor = os.open(path, flags | os.O_NONBLOCK)  # else a FIFO would wait for its writer
        if regular(os.fstat(descriptor)):
            return descriptor
        os.close(descriptor)
        raise OddFileError(f"{path!r} is no regular file")

    return open(path, "rb", buffering=0, opener=open_regular)


def login_of(url: str) -> str | None:
    """Return the name of the login in a URL of S3; None: there is none.

    >>> login_of("s3://aws_default@bucket/squad"), login_of("s3://bucket/a@b")
    ('aws_default', None)
    """
    match = _LOGIN.match(url)
    return match and match[2]


def login_options(login: str, field: str) -> dict[str, Any]:  # noqa: ARG001 - for Airflow, which replaces this
    """Return the options of fsspec for a login that a field's URL names: it is a profile of AWS's clients."""
    return {"profile": login}


def is_remote(url: str) -> bool:
    """Whether a URL leads to another place than this machine's disk, without opening it."""
    protocol, _ = fsspec.core.split_protocol(url)
    return protocol not in (None, "file", "local")


def protocols(url: str) -> list[str]:
    """List the protocols of a URL in the order of their use; ``::`` chains them, and may end with a path.

    >>> protocols("simplecache::s3://models/qa"), protocols("data:,x"), protocols("/models::qa")
    (['simplecache', 's3'], ['data'], [])
    >>> protocols("zip://train.csv::data.zip")
    ['zip']
    """
    if not is_remote(url):
        return []
    parts = ((fsspec.core.split_protocol(part)[0], part) for part in url.split("::"))
    return [protocol or part for protocol, part in parts if protocol or _BARE_PROTOCOL.fullmatch(part)]


def in_bucket(url: str) -> bool:
    """Whether a URL leads to an object store, without opening it."""
    return not _BUCKETS.isdisjoint(protocols(url)[:1])


def _read_by_clients() -> tuple[object, ...]:
    """Return what clients of storage read when they are made: the environment, and times of login files."""
    files = {"AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials", "AWS_CONFIG_FILE": "~/.aws/config"}
    written = list[int]()
    for name, usual in files.items():
        with suppress(OSError, RuntimeError):  # none that this user may see; or the user has no home
            written.append(Path(os.environ.get(name) or usual).expanduser().stat().st_mtime_ns)
    return frozenset(os.environ.items()), *written


@lru_cache(maxsize=1)
def _forget_other_clients(_read: tuple[object, ...]) -> None:
    """Have fsspec make new clients, unless the last ones have read the same: it would return old ones."""
    for kind in fsspec.registry.values():
        kind.clear_instance_cache()


def fault_of(url: str, field: str) -> Finding | None:
    """Return a finding if a protocol is misspelt, or a URL of S3 has no bucket; None: neither.

    The URL is not opened.

    >>> fault_of("htp://host/x", "run.data").fix, fault_of("s3://models/qa", "run.data")
    ("Did you mean 'http'?", None)
    >>> fault_of("zip://train.csv::data.zip", "run.data")
    """
    known = [*fsspec.available_protocols(), *fsspec.registry, "hf"]
    for protocol in protocols(url):
        if protocol not in known and (suggestion := did_you_mean(protocol.lower(), known, min_ratio=0.6)):
            message = without_secrets(f"{url!r} cannot be opened: Protocol not known: {protocol}", url)
            return Finding(field, message, suggestion)
    bucket_and_key = _LOGIN.sub(r"\1", url).split("::")[0].partition("://")[2]
    is_s3 = not _S3.isdisjoint(protocols(url)[:1])
    # Found here, because an error of the client would quote parts of a secret that is in the URL.
    if is_s3 and not _BUCKET.match(bucket_and_key):
        fix = "Write s3://BUCKET/FOLDER; credentials belong into the environment"
        return Finding(field, f"{redacted(url)!r} names no bucket", fix)
    return None


def _error_of_list(fs: Any, root: str, timeout_s: float) -> Exception | None:
    """Ask S3 for a key below ``root``, after a question for that failed; return the error.

    The account may have no other right, and an error of a list has a reason in it. None: there is none, or it
    may pass, as that of a busy server.
    """
    from botocore.exceptions import HTTPClientError  # s3fs needs it, and fs is of s3fs

    bucket, key, _ = fs.split_path(root)
    below = {"Bucket": bucket, "Prefix": f"{key.rstrip('/')}/" if key else "", "MaxKeys": 1}
    try:
        fs.call_s3("list_objects_v2", fs.req_kw, **below, timeout=timeout_s)
    except HTTPClientError:  # a connection that breaks off
        return None
    except Exception as error:  # noqa: BLE001 - s3fs raises those of botocore, of aiohttp and its own
        answer = getattr(error.__cause__, "response", None) or {}
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return None if status in _BUSY else error
    return None


def fix_of(url: str, error: Exception) -> str | None:
    """Write what to set after an error of S3's client at a URL; None: another storage, or another error."""
    if _S3.isdisjoint(protocols(url)[:1]):
        return None
    from botocore import exceptions  # s3fs needs it, and such an error is of s3fs

    no_login = exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.ProfileNotFound
    if isinstance(error, (PermissionError, exceptions.CredentialRetrievalError, *no_login)):
        login = login_of(url)
        words = f"mend the login {login!r}, or leave it out and set" if login else "set"
        words += " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, to a login with rights there"
    elif isinstance(error, exceptions.SSLError):
        words = "set AWS_CA_BUNDLE to the file with the certificate of the server's authority"
    elif isinstance(error, exceptions.ConnectionError) or "Invalid endpoint" in str(error):
        words = "set AWS_ENDPOINT_URL to the address of a server that answers this machine"
    else:
        return None
    return f"{words[0].upper()}{words[1:]} (docs/object_storage.md)"


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Read a file to its end, in blocks that fit into a core's cache."""
    while block := file.read(_BLOCK_BYTES):
        yield block
