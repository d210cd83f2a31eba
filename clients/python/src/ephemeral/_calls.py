"""The calls beside runs, as requests and readers of their answers: both clients send them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Generic, TypeVar
from urllib.parse import quote

from ._ledger import DayUsage, Key, Limits, Member, Node, Org, OwnLimits, Pool, Share, StatementPage
from ._models import JSON, Account
from ._wire import Request, run_path

T = TypeVar("T")


@dataclass(frozen=True)
class Call(Generic[T]):
    """A request, and what its answer means."""

    request: Request
    read: Callable[[Any], T]


def _nothing(_: Any) -> None:
    return None


def _each(name: str, read: Callable[[JSON], T]) -> Callable[[Any], list[T]]:
    return lambda answer: [read(j) for j in answer[name]]


def _segment(value: str) -> str:
    return quote(value, safe="")


def _org(org: str, rest: str = "") -> str:
    return "/v1/orgs/" + _segment(org) + rest


def _get(path: str, read: Callable[[Any], T], **params: object) -> Call[T]:
    given = {k.rstrip("_"): str(v) for k, v in params.items() if v is not None}
    return Call(Request("GET", path, params=given), read)


def _send(method: str, path: str, body: Mapping[str, object], read: Callable[[Any], T], *, repeat: bool = True) -> Call[T]:
    given = {k: v for k, v in body.items() if v is not None}
    return Call(Request(method, path, body=json.dumps(given).encode(), repeat=repeat), read)


def _delete(path: str) -> Call[None]:
    return Call(Request("DELETE", path), _nothing)


def usage(org: str | None, first: date | None, last: date | None) -> Call[list[DayUsage]]:
    path = "/v1/usage" if org is None else _org(org, "/usage")
    return _get(path, _each("days", DayUsage.from_json), from_=first, to=last)


def statement(org: str | None, after: int | None, limit: int | None) -> Call[StatementPage]:
    path = "/v1/account/statement" if org is None else _org(org, "/statement")
    return _get(path, StatementPage.from_json, after=after, limit=limit)


def own_limits() -> Call[OwnLimits]:
    return _get("/v1/account/limits", OwnLimits.from_json)


def create_share(run_id: str, expires_in_seconds: int | None) -> Call[Share]:
    body = {"expires_in_seconds": expires_in_seconds}
    return _send("POST", run_path(run_id) + "/shares", body, Share.from_json, repeat=False)


def shares(run_id: str) -> Call[list[Share]]:
    return _get(run_path(run_id) + "/shares", _each("shares", Share.from_json))


def revoke_share(run_id: str, share: str) -> Call[None]:
    return _delete(run_path(run_id) + "/shares/" + _segment(share))


def create_org(name: str, org_id: str | None, concurrency: int | None) -> Call[Org]:
    body = {"name": name, "id": org_id, "concurrency": concurrency}
    return _send("POST", "/v1/orgs", body, Org.from_json, repeat=org_id is not None)


def orgs() -> Call[list[Org]]:
    return _get("/v1/orgs", _each("orgs", Org.from_json))


def org(org_id: str) -> Call[Org]:
    return _get(_org(org_id), Org.from_json)


def credit(org_id: str, amount: int, ref: str) -> Call[Account]:
    return _send("POST", _org(org_id, "/credits"), {"amount_micros": amount, "ref": ref}, Account.from_json)


def org_account(org_id: str) -> Call[Account]:
    return _get(_org(org_id, "/account"), Account.from_json)


def org_limits(org_id: str) -> Call[Limits]:
    return _get(_org(org_id, "/limits"), Limits.from_json)


def limit_org(org_id: str, limits: Limits) -> Call[Limits]:
    return _limit(_org(org_id, "/limits"), limits)


def key_limits(key: str) -> Call[Limits]:
    return _get("/v1/keys/" + _segment(key) + "/limits", Limits.from_json)


def limit_key(key: str, limits: Limits) -> Call[Limits]:
    return _limit("/v1/keys/" + _segment(key) + "/limits", limits)


def _limit(path: str, limits: Limits) -> Call[Limits]:
    return _send("PUT", path, {"concurrency": limits.concurrency, "queue": limits.queue}, Limits.from_json)


def retain_org(org_id: str, seconds: int) -> Call[Org]:
    return _send("PUT", _org(org_id, "/retention"), {"retention_seconds": seconds}, Org.from_json)


def add_member(org_id: str, name: str) -> Call[Member]:
    return _send("POST", _org(org_id, "/members"), {"name": name}, Member.from_json, repeat=False)


def members(org_id: str) -> Call[list[Member]]:
    return _get(_org(org_id, "/members"), _each("members", Member.from_json))


def remove_member(org_id: str, member: str) -> Call[None]:
    return _delete(_org(org_id, "/members/") + _segment(member))


def create_key(org_id: str, name: str, member: str | None, expires_at: datetime | None) -> Call[Key]:
    if expires_at is not None and expires_at.tzinfo is None:
        raise ValueError("expires_at: want a time with its zone")
    body = {"name": name, "member": member, "expires_at": expires_at.isoformat() if expires_at else None}
    return _send("POST", _org(org_id, "/keys"), body, Key.from_json, repeat=False)


def keys(org_id: str) -> Call[list[Key]]:
    return _get(_org(org_id, "/keys"), _each("keys", Key.from_json))


def revoke_key(key: str) -> Call[None]:
    return _delete("/v1/keys/" + _segment(key))


def nodes() -> Call[list[Node]]:
    return _get("/v1/nodes", _each("nodes", Node.from_json))


def pools() -> Call[list[Pool]]:
    return _get("/v1/pools", _each("pools", Pool.from_json))


def pool(name: str) -> Call[Pool]:
    return _get("/v1/pools/" + _segment(name), Pool.from_json)


def set_pool(name: str, policy: Mapping[str, object]) -> Call[Pool]:
    return _send("PUT", "/v1/pools/" + _segment(name), policy, Pool.from_json)


def predict_pool(name: str, sizing: Mapping[str, object]) -> Call[JSON]:
    return _send("POST", "/v1/pools/" + _segment(name) + "/prediction", sizing, lambda j: j)


def connections(org_id: str) -> Call[list[JSON]]:
    return _get(_org(org_id, "/connections"), _each("connections", lambda j: j))


def connection(org_id: str, name: str) -> Call[JSON]:
    return _get(_org(org_id, "/connections/") + _segment(name), lambda j: j)


def put_connection(org_id: str, name: str, settings: Mapping[str, object]) -> Call[JSON]:
    return _send("PUT", _org(org_id, "/connections/") + _segment(name), settings, lambda j: j)


def delete_connection(org_id: str, name: str) -> Call[None]:
    return _delete(_org(org_id, "/connections/") + _segment(name))


def receipt_keys() -> Call[list[JSON]]:
    return _get("/v1/receipt-keys", _each("keys", lambda j: j))
