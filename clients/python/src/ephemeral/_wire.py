"""What both clients share: requests, answers, delays, server-sent events, paths. Nothing here sends anything."""

from __future__ import annotations

import base64
import email.utils
import hashlib
import io
import json
import os
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import IO, Any
from urllib.parse import quote

import httpx

from ._errors import APIError, ChecksumError, EphemeralError, FieldError, UnreachableError
from ._models import File, RemoteFile, Upload

USER_AGENT = "ephemeral-python/0.1.0"
ANSWER_TIMEOUT = 60.0  # seconds one attempt may take, beside the time that the server was asked to wait
EVENT_TIMEOUT = 45.0  # seconds of silence of an event stream: three heartbeats
WAIT_STEP = 30  # seconds that one request of wait() waits
MIN_DELAY, MAX_DELAY, MAX_RETRY_AFTER = 0.1, 5.0, 60.0
TEMPORARY = frozenset({408, 429, 502, 503, 504})
LAST_EVENT = "worker.destroyed"
MAX_MESSAGE = 64 << 20  # bytes of one server-sent event

UPLOAD_PIECE = 256 << 10  # bytes of an upload in memory

FileArgument = Sequence[File] | Mapping[str, str | bytes | Upload]


@dataclass
class Request:
    """One call, which may be sent several times."""

    method: str
    path: str
    params: dict[str, str] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | Iterable[bytes] | AsyncIterable[bytes] | None = None
    wait: float = 0  # seconds that the server was asked to wait
    repeat: bool = True  # sending it again does no harm


def run_path(run_id: str) -> str:
    return "/v1/runs/" + quote(run_id, safe="")


def create_request(body: Mapping[str, Any], idempotency_key: str | None, wait: float | None) -> Request:
    """The key is made once for a call, so that a repetition is the same run."""
    key = _quoted(idempotency_key or secrets.token_urlsafe(24))
    r = Request("POST", "/v1/runs", headers={"Idempotency-Key": key}, body=json.dumps(body).encode())
    if wait:
        ask_to_wait(r, wait)
    return r


def _quoted(key: str) -> str:
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def ask_to_wait(r: Request, seconds: float) -> None:
    r.wait = seconds
    r.headers["Prefer"] = f"wait={-int(-seconds // 1)}"


def run_body(
    *,
    prompt: str | None,
    command: str | None,
    files: FileArgument | None,
    **options: Any,
) -> dict[str, Any]:
    body: dict[str, Any] = {k: v for k, v in options.items() if v is not None}
    if prompt is not None:
        body["prompt"] = prompt
    if command is not None:
        body["command"] = command
    if files:
        given = files if not isinstance(files, Mapping) else [_file(p, c) for p, c in files.items()]
        body["files"] = [f.to_json() for f in given]
    return body


def _file(path: str, content: str | bytes | Upload) -> File:
    return File(path, upload=content) if isinstance(content, Upload) else File(path, content)


class Sending:
    """A file on its way. It is read once ahead, so that the server can check its digest before it keeps anything."""

    def __init__(self, file: bytes | IO[bytes], zero_data_retention: bool | None, idempotency_key: str | None) -> None:
        self.file = io.BytesIO(file) if isinstance(file, bytes) else file
        self.start = self.file.tell()
        sum, size = hashlib.sha256(), 0
        while piece := self.file.read(UPLOAD_PIECE):
            sum.update(piece)
            size += len(piece)
        self.sha256, self.size = sum.hexdigest(), size
        self.params = {"zero_data_retention": "true"} if zero_data_retention else {}
        digest = base64.b64encode(sum.digest()).decode()
        self.headers = {
            "Idempotency-Key": _quoted(idempotency_key or secrets.token_urlsafe(24)),
            "Content-Type": "application/octet-stream",
            "Content-Length": str(size),
            "Content-Digest": f"sha-256=:{digest}:",
        }

    def request(self) -> Request:
        """One attempt; its body is set by the client, from the beginning of the file."""
        self.file.seek(self.start)
        return Request("POST", "/v1/uploads", params=self.params, headers=self.headers)

    def check(self, upload: Upload) -> None:
        if (upload.size, upload.sha256) != (self.size, self.sha256):
            raise ChecksumError(f"{upload.id} did not arrive as it was sent")


def upload_path(upload: Upload | str) -> str:
    return "/v1/uploads/" + quote(upload.id if isinstance(upload, Upload) else upload, safe="")


def page_request(cursor: str | None, limit: int | None, state: str | None) -> Request:
    params = {"cursor": cursor, "limit": None if limit is None else str(limit), "state": state}
    return Request("GET", "/v1/runs", params={k: v for k, v in params.items() if v is not None})


def headers(api_key: str, r: Request) -> dict[str, str]:
    h = {"Authorization": f"Bearer {api_key}", "Accept": "application/json", "User-Agent": USER_AGENT}
    if r.body is not None:
        h["Content-Type"] = "application/json"
    return h | r.headers


def check_settings(base_url: str, api_key: str) -> str:
    url = httpx.URL(base_url.rstrip("/"))
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query:
        raise ValueError("base_url: want http://host or https://host")
    if any(not "!" <= c <= "~" for c in api_key):
        raise ValueError("api_key has characters that no key has")
    return str(url).rstrip("/")


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> APIError:
    """Reads an answer that is no success, also when it comes from something in between."""
    p: dict[str, Any] = {}
    if headers.get("content-type", "").partition(";")[0].strip() == "application/problem+json":
        try:
            p = json.loads(body)
        except ValueError:
            pass
    if not isinstance(p, dict):
        p = {}
    return APIError(
        status=status,
        code=str(p.get("code", "")),
        detail=str(p.get("detail", f"the server answered {status}")),
        errors=[FieldError(str(e.get("field")), str(e.get("detail"))) for e in p.get("errors", ())],
        remediation=str(p.get("remediation", "")),
        request_id=str(p.get("request_id", "")),
        retry_after=retry_after(headers.get("retry-after")),
    )


def retry_after(value: str | None) -> float | None:
    if not value:
        return None
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


class Backoff:
    """Paces the attempts of one call."""

    def __init__(self, max_outage: float) -> None:
        self.max_outage = max_outage
        self.since: float | None = None
        self.delay = MIN_DELAY

    def achieved(self) -> None:
        """Something arrived: the outage is over."""
        self.since, self.delay = None, MIN_DELAY

    def pause(self, error: EphemeralError) -> float:
        """How long to wait before the next attempt; raises the error when there should be none."""
        if not isinstance(error, UnreachableError) and not (isinstance(error, APIError) and error.status in TEMPORARY):
            raise error
        now = time.monotonic()
        if self.since is None:
            self.since = now
        pause = self.delay * random.uniform(0.5, 1)
        self.delay = min(2 * self.delay, MAX_DELAY)
        if isinstance(error, APIError) and error.retry_after:
            pause = min(error.retry_after, MAX_RETRY_AFTER) * random.uniform(1, 1.1)
        if now - self.since + pause > self.max_outage:
            raise error
        return pause


class EventParser:
    """Reads server-sent events (WHATWG HTML, section 9.2) from pieces of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> Iterator[dict[str, Any]]:
        """Gives the data of each message that is complete now. What a stream cuts off is dropped."""
        self._rest += piece
        if len(self._rest) > MAX_MESSAGE:
            raise EphemeralError("a message of the event stream is too large")
        # The server ends lines with LF alone.
        *lines, self._rest = self._rest.split(b"\n")
        for line in lines:
            if not line:
                if self._data:
                    yield json.loads(b"\n".join(self._data))
                self._data = []
                continue
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))


def events_request(run_id: str, last: int) -> Request:
    h = {"Accept": "text/event-stream"}
    if last > 0:
        h["Last-Event-ID"] = str(last)
    return Request("GET", run_path(run_id) + "/events", headers=h)


def file_request(run_id: str, file: RemoteFile) -> Request:
    path = run_path(run_id) + "/files/" + quote(file.path, safe="")
    return Request("GET", path, headers={"Accept": "*/*", "Accept-Encoding": "identity"})


class Saver:
    """Checks the content of a file while it is written."""

    def __init__(self, file: RemoteFile, to: IO[bytes]) -> None:
        self.file, self.to, self.size, self.sum = file, to, 0, hashlib.sha256()

    def write(self, piece: bytes) -> None:
        self.size += len(piece)
        if self.size > self.file.size:
            raise ChecksumError(f"{self.file.path!r} has more than {self.file.size} bytes")
        self.sum.update(piece)
        self.to.write(piece)

    def check(self) -> None:
        if self.size != self.file.size or self.sum.hexdigest() != self.file.sha256:
            raise ChecksumError(f"{self.file.path!r} did not arrive as the run left it")


@contextmanager
def place(file: RemoteFile, directory: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """A new file below the directory, which takes its name when all went well. The path was chosen by the run: one that
    leads elsewhere is refused."""
    root = os.path.realpath(directory)
    parts = file.path.split("/")
    if any(p in ("", ".", "..") for p in parts) or "\0" in file.path:
        raise EphemeralError(f"{file.path!r} is no path below a directory")
    target = os.path.join(root, *parts)
    parent = os.path.dirname(target)
    os.makedirs(parent, exist_ok=True)
    if os.path.commonpath([root, os.path.realpath(parent)]) != root:
        raise EphemeralError(f"{file.path!r} leads out of the directory")
    fd, draft = tempfile.mkstemp(prefix=".ephemeral-", dir=parent)
    try:
        with os.fdopen(fd, "wb") as f:
            yield f
        os.chmod(draft, int(file.mode, 8) & 0o777 | 0o600)
        os.replace(draft, target)
    except BaseException:
        os.unlink(draft)
        raise


def decode(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError as e:
        raise EphemeralError("the answer is not of this API") from e


def remote_files(j: Any) -> list[RemoteFile]:
    files: Iterable[Mapping[str, Any]] = j["files"]
    return [RemoteFile.from_json(f) for f in files]
