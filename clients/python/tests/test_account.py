"""Usage, ledger, limits, shares and administration, against answers made up here; test_live has the real ones."""

from __future__ import annotations

import inspect
import json
from datetime import date, datetime, timezone
from typing import Any

import anyio
import httpx
import pytest

import ephemeral
from ephemeral import Limits, _wire
from ephemeral._account_async import AsyncAccountCalls
from ephemeral._account_sync import AccountCalls

RUN = "run_00000000000000000000000000000001"
NUMBERS = {f"{n}_micros": 1 for n in ("amount", "model", "web", "compute", "balance")}


def entry(n: int) -> dict[str, Any]:
    return {"number": n, "at": "2026-10-07T12:00:00Z", "kind": "charge", "run": RUN} | NUMBERS


def statement(request: httpx.Request) -> httpx.Response:
    after = int(request.url.params.get("after", "0"))
    page: dict[str, Any] = {"entries": [entry(n) for n in range(after + 1, min(after + 2, 5) + 1)]}
    if after < 3:
        page["next_after"] = after + 2
    return httpx.Response(200, json=page)


def test_the_ledger_is_read_page_by_page() -> None:
    with ephemeral.Client("http://test", "k", transport=httpx.MockTransport(statement)) as c:
        assert [e.number for e in c.statement()] == [1, 2, 3, 4, 5]
        assert [e.number for e in c.org_statement("acme", 2)] == [3, 4, 5]

    async def main() -> None:
        async with ephemeral.AsyncClient("http://test", "k", transport=httpx.MockTransport(statement)) as c:
            assert [e.number async for e in c.statement(3)] == [4, 5]

    anyio.run(main)


def test_requests() -> None:
    seen: list[tuple[str, str, dict[str, Any] | None]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else None
        seen.append((request.method, request.url.raw_path.decode(), body))
        at = {"created_at": "2026-10-07T12:00:00Z", "org": "a/b", "id": "x", "name": "n", "role": "member", "secret": "s"}
        return httpx.Response(200, json={"days": [], "concurrency": 1, "queue": 2} | at)

    with ephemeral.Client("http://test", "k", transport=httpx.MockTransport(handler)) as c:
        assert c.usage(date(2026, 10, 1), date(2026, 10, 31)) == []
        assert c.limit_org("a/b", Limits(1, 2)) == Limits(1, 2)
        until = datetime(2099, 1, 1, tzinfo=timezone.utc)
        key = c.create_key("a/b", "n", expires_at=until)
        assert key.secret == "s" and "secret" not in repr(key) and "'s'" not in repr(key)
        with pytest.raises(ValueError):
            c.create_key("a/b", "n", expires_at=datetime(2099, 1, 1))
    assert seen == [
        ("GET", "/v1/usage?from=2026-10-01&to=2026-10-31", None),
        ("PUT", "/v1/orgs/a%2Fb/limits", {"concurrency": 1, "queue": 2}),
        ("POST", "/v1/orgs/a%2Fb/keys", {"name": "n", "expires_at": "2099-01-01T00:00:00+00:00"}),
    ]


def test_what_would_be_made_twice_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_wire, "MIN_DELAY", 0.001)
    sent = 0

    def handler(_: httpx.Request) -> httpx.Response:
        nonlocal sent
        sent += 1
        raise httpx.ConnectError("gone")

    with ephemeral.Client("http://test", "k", transport=httpx.MockTransport(handler), max_outage=0.05) as c:
        for once in (
            lambda: c.create_key("o", "n"), lambda: c.add_member("o", "n"), lambda: c.create_share(RUN), lambda: c.create_org("n"),
        ):  # fmt: skip
            sent = 0
            with pytest.raises(ephemeral.UnreachableError):
                once()
            assert sent == 1
        for again in (lambda: c.create_org("n", id="acme"), lambda: c.credit("o", 1, "r"), lambda: c.revoke_key("x")):
            sent = 0
            with pytest.raises(ephemeral.UnreachableError):
                again()
            assert sent > 1


def test_both_clients_have_the_same_calls() -> None:
    def calls(of: type) -> dict[str, list[str]]:
        public = inspect.getmembers(of, lambda m: inspect.isfunction(m) and not m.__name__.startswith("_"))
        return {name: list(inspect.signature(f).parameters) for name, f in public}

    assert calls(AccountCalls) == calls(AsyncAccountCalls)
    assert len(calls(AccountCalls)) > 30
