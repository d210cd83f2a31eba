"""The client for ordinary code. Generated from _async.py by generate.py: change that."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping
from typing import IO, Any

import httpx

from . import _wire
from ._account_sync import AccountCalls
from ._errors import EphemeralError, UnreachableError
from ._models import Account, Event, RemoteFile, Run, RunPage, Upload
from ._wire import FileArgument, Request


class Client(AccountCalls):
    """Calls one server with one API key. Use it in a ``with`` statement, or close it.

    Calls that cannot do harm twice are repeated while the server cannot be reached or asks to come later, for
    ``max_outage`` seconds. A run is created exactly once, however often its request has to be sent."""

    def __init__(
        self,
        base_url: str | None = None,
        api_key: str | None = None,
        *,
        max_outage: float = 60,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Without arguments the server is EPHEMERAL_URL and the key EPHEMERAL_API_KEY."""
        self._key = api_key if api_key is not None else os.environ.get("EPHEMERAL_API_KEY", "")
        self._base = _wire.check_settings(
            base_url or os.environ.get("EPHEMERAL_URL", "http://127.0.0.1:8080"), self._key
        )
        self._outage = max_outage
        self._http = httpx.Client(transport=transport, timeout=_wire.ANSWER_TIMEOUT)

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def create_run(
        self,
        *,
        command: str | None = None,
        prompt: str | None = None,
        files: FileArgument | None = None,
        model: str | None = None,
        image: str | None = None,
        web: bool | None = None,
        shell: bool | None = None,
        connections: list[str] | None = None,
        timeout_seconds: int | None = None,
        max_cost_micros: int | None = None,
        zero_data_retention: bool | None = None,
        retention_seconds: int | None = None,
        metadata: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        wait: float | None = None,
    ) -> Run:
        """Creates a run of a command or a prompt. What is left out has the server's default. With ``wait`` the server
        answers when the run has ended, or after so many seconds."""
        body = _wire.run_body(
            command=command, prompt=prompt, files=files, model=model, web=web, shell=shell, connections=connections,
            timeout_seconds=timeout_seconds, max_cost_micros=max_cost_micros, zero_data_retention=zero_data_retention,
            retention_seconds=retention_seconds, metadata=metadata, image=image,
        )  # fmt: skip
        return Run.from_json(self._call(_wire.create_request(body, idempotency_key, wait)))

    def upload(
        self,
        file: bytes | IO[bytes],
        *,
        zero_data_retention: bool | None = None,
        idempotency_key: str | None = None,
    ) -> Upload:
        """Sends a file ahead of the runs that use it, and returns what to name it by in their ``files``. A file object must be
        able to seek: it is read once for its digest, and then while it is sent. Runs with ``zero_data_retention`` take only
        uploads with it."""
        sending = _wire.Sending(file, zero_data_retention, idempotency_key)
        backoff = _wire.Backoff(self._outage)
        while True:
            r = sending.request()
            r.body = self._pieces(sending.file)
            try:
                with self._send(r, _wire.ANSWER_TIMEOUT) as response:
                    try:
                        response.read()
                    except httpx.TransportError as e:
                        raise UnreachableError(f"{r.method} {r.path}: {e!r}") from e
                    upload = Upload.from_json(_wire.decode(response))
                    sending.check(upload)
                    return upload
            except EphemeralError as e:
                time.sleep(backoff.pause(e))

    def _pieces(self, file: IO[bytes]) -> Iterator[bytes]:
        while piece := file.read(_wire.UPLOAD_PIECE):
            yield piece

    def get_upload(self, upload: Upload | str) -> Upload:
        """Returns an upload."""
        return Upload.from_json(self._call(Request("GET", _wire.upload_path(upload))))

    def delete_upload(self, upload: Upload | str) -> None:
        """Erases an upload that no run waits for."""
        self._call(Request("DELETE", _wire.upload_path(upload)))

    def run(self, run_id: str) -> Run:
        """Returns a run as it is now."""
        return Run.from_json(self._call(Request("GET", _wire.run_path(run_id))))

    def wait(self, run_id: str) -> Run:
        """Returns the run when it has ended. It survives a server that restarts."""
        while True:
            r = Request("GET", _wire.run_path(run_id))
            _wire.ask_to_wait(r, _wire.WAIT_STEP)
            started = time.monotonic()
            run = Run.from_json(self._call(r))
            if run.ended:
                return run
            # A server that drains, or that does not wait.
            time.sleep(max(0.0, 1 - (time.monotonic() - started)))

    def page(self, *, cursor: str | None = None, limit: int | None = None, state: str | None = None) -> RunPage:
        """Returns a page of runs, newest first, without files' contents and results."""
        return RunPage.from_json(self._call(_wire.page_request(cursor, limit, state)))

    def runs(self, *, state: str | None = None) -> Iterator[Run]:
        """Goes through all runs, newest first."""
        cursor: str | None = None
        while cursor != "":
            page = self.page(cursor=cursor, limit=100, state=state)
            for run in page.runs:
                yield run
            cursor = page.next_cursor

    def cancel(self, run_id: str) -> Run:
        """Asks for the run's end; one that was not queued ends a little later."""
        return Run.from_json(self._call(Request("POST", _wire.run_path(run_id) + "/cancel")))

    def delete(self, run_id: str) -> None:
        """Erases the content of an ended run. The record of its money stays."""
        self._call(Request("DELETE", _wire.run_path(run_id)))

    def account(self) -> Account:
        """Returns the account of the key's organisation."""
        return Account.from_json(self._call(Request("GET", "/v1/account")))

    def events(self, run_id: str, after: int = 0) -> Iterator[Event]:
        """Gives the run's events with a number above ``after`` as they happen, to the last one, each once. A connection
        that breaks is made again, and goes on where it was."""
        last, backoff = after, _wire.Backoff(self._outage)
        while True:
            try:
                for event in self._stream(run_id, last):
                    if event is None:
                        return
                    if event.seq <= last:
                        continue
                    last = event.seq
                    backoff.achieved()
                    yield event
                    if event.type == _wire.LAST_EVENT:
                        return
                raise UnreachableError("the event stream ended before the run's last event")
            except EphemeralError as e:
                time.sleep(backoff.pause(e))

    def _stream(self, run_id: str, last: int) -> Iterator[Event | None]:
        """One connection's events; None says that there are no more, ever."""
        with self._send(_wire.events_request(run_id, last), _wire.EVENT_TIMEOUT) as response:
            if response.status_code == 204:
                yield None
                return
            parser = _wire.EventParser()
            try:
                for piece in response.iter_bytes():
                    for message in parser.feed(piece):
                        yield Event.from_json(message)
            except httpx.TransportError as e:
                raise UnreachableError(f"event stream: {e!r}") from e

    def files(self, run_id: str) -> list[RemoteFile]:
        """Returns the files that an ended run left in ``out/``, by path."""
        return _wire.remote_files(self._call(Request("GET", _wire.run_path(run_id) + "/files")))

    def download(self, run_id: str, file: RemoteFile) -> bytes:
        """Returns the content of a file, checked."""
        backoff = _wire.Backoff(self._outage)
        while True:
            content = io.BytesIO()
            try:
                self._save(run_id, file, content)
                return content.getvalue()
            except EphemeralError as e:
                time.sleep(backoff.pause(e))

    def download_all(self, run_id: str, directory: str | os.PathLike[str]) -> list[RemoteFile]:
        """Writes all files that the run left below the directory, and nowhere else. A file appears whole or not at all,
        and replaces one of that name."""
        files = self.files(run_id)
        os.makedirs(directory, exist_ok=True)
        for file in files:
            backoff = _wire.Backoff(self._outage)
            while True:
                try:
                    with _wire.place(file, directory) as to:
                        self._save(run_id, file, to)
                    break
                except EphemeralError as e:
                    time.sleep(backoff.pause(e))
        return files

    def _save(self, run_id: str, file: RemoteFile, to: IO[bytes]) -> None:
        saver = _wire.Saver(file, to)
        with self._send(_wire.file_request(run_id, file), _wire.ANSWER_TIMEOUT) as response:
            try:
                for piece in response.iter_bytes():
                    saver.write(piece)
            except httpx.TransportError as e:
                raise UnreachableError(f"download: {e!r}") from e
        saver.check()

    def _call(self, r: Request) -> Any:
        """Sends the request, again as long as that may help, and returns the decoded answer."""
        backoff = _wire.Backoff(self._outage if r.repeat else 0)
        while True:
            try:
                with self._send(r, _wire.ANSWER_TIMEOUT + r.wait) as response:
                    try:
                        response.read()
                    except httpx.TransportError as e:
                        raise UnreachableError(f"{r.method} {r.path}: {e!r}") from e
                    return None if response.status_code == 204 else _wire.decode(response)
            except EphemeralError as e:
                time.sleep(backoff.pause(e))

    def _send(self, r: Request, timeout: float) -> _Answer:
        return _Answer(self._http, self._base, self._key, r, timeout)


class _Answer:
    """One attempt: a streamed answer that is a success, or an error."""

    def __init__(self, http: httpx.Client, base: str, key: str, r: Request, timeout: float) -> None:
        self._http, self._what = http, f"{r.method} {r.path}"
        self._request = http.build_request(
            r.method, base + r.path, params=r.params or None, content=r.body, headers=_wire.headers(key, r), timeout=timeout
        )  # fmt: skip
        self._response: httpx.Response | None = None

    def __enter__(self) -> httpx.Response:
        try:
            response = self._http.send(self._request, stream=True)
            self._response = response
            if not 200 <= response.status_code <= 299:
                body = response.read()
                response.close()
                raise _wire.refusal(response.status_code, response.headers, body)
            return response
        except httpx.TransportError as e:
            self.close()
            raise UnreachableError(f"{self._what}: {e!r}") from e

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._response is not None:
            self._response.close()
