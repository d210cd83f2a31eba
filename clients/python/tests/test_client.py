"""The client alone, against answers made up here."""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import httpx
import pytest

import ephemeral
from ephemeral import _wire

RUN = "run_00000000000000000000000000000001"
MONEY = {f"{n}_micros": 1 for n in ("reserved", "charged", "released", "model", "web", "compute")}
BODY = {"id": RUN, "org": "o", "state": "succeeded", "queued_at": "2026-10-07T12:00:00.1234567Z", "money": MONEY}
Handler = Callable[[httpx.Request], httpx.Response]


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wire, "MIN_DELAY", 0.001)
    monkeypatch.setattr(_wire, "MAX_DELAY", 0.002)


def client(handler: Handler, **options: float) -> ephemeral.Client:
    return ephemeral.Client("http://test", "eph_x", transport=httpx.MockTransport(handler), **options)


def problem(status: int, code: str, **headers: str) -> httpx.Response:
    body = {"status": status, "code": code, "detail": "No.", "request_id": "r1", "errors": [{"field": "a", "detail": "b"}]}
    return httpx.Response(status, headers={"content-type": "application/problem+json", **headers}, content=json.dumps(body))


def test_a_run_keeps_its_key() -> None:
    seen: list[tuple[str, bytes]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.headers["idempotency-key"], request.content))
        if len(seen) == 1:
            raise httpx.ConnectError("gone")
        if len(seen) == 2:
            raise httpx.RemoteProtocolError("cut")
        if len(seen) == 3:
            return problem(503, "unavailable")
        return httpx.Response(202, json=BODY)

    with client(handler) as c:
        assert c.create_run(command="true").id == RUN
        assert len(seen) == 4 and len(set(seen)) == 1
        c.create_run(command="true")
        assert seen[4][0] != seen[0][0]
        c.create_run(command="true", idempotency_key='a"b')
        assert seen[5][0] == '"a\\"b"'


def test_an_upload_is_read_again_and_keeps_its_key(tmp_path: Path) -> None:
    content = random.randbytes(700_000)
    (tmp_path / "f").write_bytes(b"before" + content)
    sum = hashlib.sha256(content).hexdigest()
    upload = {"id": "upl_1", "size": len(content), "sha256": sum, "created_at": "2026-10-07T12:00:00Z",
              "expires_at": "2026-10-07T13:00:00Z", "zero_data_retention": True}  # fmt: skip
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        assert request.read() == content
        if len(seen) == 1:
            raise httpx.WriteError("cut")
        return problem(503, "unavailable") if len(seen) == 2 else httpx.Response(201, json=upload)

    with client(handler) as c, open(tmp_path / "f", "rb") as f:
        f.seek(6)
        u = c.upload(f, zero_data_retention=True)
        assert u.size == len(content) and u.zero_data_retention and u.expires_at
        assert len({r.headers["idempotency-key"] for r in seen}) == 1 and len(seen) == 3
        digest = base64.b64encode(hashlib.sha256(content).digest()).decode()
        assert seen[2].headers["content-digest"] == f"sha-256=:{digest}:"
        assert seen[2].headers["content-length"] == "700000" and "transfer-encoding" not in seen[2].headers
        assert seen[2].url.query == b"zero_data_retention=true"
        upload["sha256"] = "0" * 64
        with pytest.raises(ephemeral.ChecksumError):
            c.upload(content)
    assert ephemeral.File("a", upload=u, mode="0755").to_json() == {"path": "a", "upload": "upl_1", "mode": "0755"}
    with pytest.raises(ValueError):
        ephemeral.File("a", "x", upload="upl_1").to_json()


def test_refusals_are_not_repeated() -> None:
    calls = 0

    def handler(_: httpx.Request) -> httpx.Response:
        nonlocal calls
        calls += 1
        return problem(402, "insufficient_funds")

    with client(handler) as c, pytest.raises(ephemeral.APIError) as e:
        c.create_run(command="true")
    assert calls == 1 and e.value.code == "insufficient_funds" and e.value.errors[0].field == "a"
    assert str(e.value) == "insufficient_funds: No.; a b (request r1)"


@pytest.mark.parametrize("answer", [httpx.Response(502, text="<html>"), httpx.Response(307, headers={"location": "http://evil/"})])
def test_answers_of_something_else(answer: httpx.Response) -> None:
    with client(lambda _: answer, max_outage=0.01) as c, pytest.raises(ephemeral.APIError) as e:
        c.account()
    assert e.value.code == "" and e.value.status == answer.status_code


def test_an_outage_ends() -> None:
    def handler(_: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("gone")

    with client(handler, max_outage=0.05) as c, pytest.raises(ephemeral.UnreachableError):
        c.account()


class Cut(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that breaks off."""

    def __init__(self, content: bytes, whole: bool) -> None:
        self.content, self.whole = content, whole

    def __iter__(self) -> Iterator[bytes]:
        at = 0
        while at < len(self.content):
            n = random.randint(1, 40)
            yield self.content[at : at + n]
            at += n
        if not self.whole:
            raise httpx.ReadError("cut")

    async def __aiter__(self):  # type: ignore[no-untyped-def]
        for piece in self:
            yield piece


def stream(count: int) -> Handler:
    """A server of a run with so many events, that cuts every stream somewhere."""
    messages = []
    for seq in range(1, count + 1):
        kind = "worker.destroyed" if seq == count else "shell"
        data = json.dumps({"seq": seq, "run": RUN, "type": kind, "at_ms": seq, "data": {"output": "ü\n" * 3}}, ensure_ascii=False)
        messages.append(f"id: {seq}\nevent: {kind}\ndata: {data}\n\n: heartbeat\n\n".encode())

    def handler(request: httpx.Request) -> httpx.Response:
        last = int(request.headers.get("last-event-id", "0"))
        rest = b"retry: 1000\n\n" + b"".join(messages[last:])
        cut = random.randint(0, len(rest) + 200)
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Cut(rest[:cut], cut >= len(rest)))

    return handler


def test_events_survive_cuts_anywhere() -> None:
    for _ in range(20):
        with client(stream(12)) as c:
            assert [e.seq for e in c.events(RUN)] == list(range(1, 13))
            assert [e.seq for e in c.events(RUN, after=5)] == list(range(6, 13))


def test_events_survive_cuts_anywhere_async() -> None:
    async def main() -> None:
        transport = httpx.MockTransport(stream(12))
        async with ephemeral.AsyncClient("http://test", "eph_x", transport=transport) as c:
            assert [e.seq async for e in c.events(RUN)] == list(range(1, 13))

    for _ in range(20):
        anyio.run(main)


def test_paths_that_lead_elsewhere(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    inside = tmp_path / "inside"
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    for path in ("../x", "/x", "a/../../x", "", ".", "a//b", "link/x"):
        file = ephemeral.RemoteFile(path, 1, "0" * 64, "0644")
        with pytest.raises(ephemeral.EphemeralError), _wire.place(file, inside):
            pass
    assert list(outside.iterdir()) == [] and [p.name for p in inside.iterdir()] == ["link"]


def test_times_and_settings() -> None:
    assert ephemeral.Run.from_json(BODY).queued_at.microsecond == 123456
    for bad in ("localhost:8080", "ftp://x", "http://u:p@x", "http://x?a=b"):
        with pytest.raises(ValueError):
            ephemeral.Client(bad, "eph_x")
    with pytest.raises(ValueError):
        ephemeral.Client("http://x", "eph_x\r\nX: y")
