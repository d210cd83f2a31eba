"""Accounts, organisations and hosts, as the API answers with them. Amounts are micro-dollars."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import date, datetime

from ._models import JSON, _time


def _at(value: object) -> datetime:
    at = _time(value)
    assert at is not None
    return at


@dataclass(frozen=True)
class DayUsage:
    """What the runs cost and did that ended on one day, in UTC."""

    day: date
    runs: int
    charged: int
    model: int
    web: int
    compute: int
    model_calls: int
    input_tokens: int
    output_tokens: int
    total_tokens: int
    shell_commands: int

    @classmethod
    def from_json(cls, j: JSON) -> DayUsage:
        return cls(
            date.fromisoformat(j["day"]), j["runs"],
            *(j[f"{n}_micros"] for n in ("charged", "model", "web", "compute")),
            *(j[n] for n in ("model_calls", "input_tokens", "output_tokens", "total_tokens", "shell_commands")),
        )  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One line of an account's ledger. ``amount`` is by how much the balance changed, ``balance`` what it was then."""

    number: int
    at: datetime
    kind: str
    amount: int
    model: int
    web: int
    compute: int
    balance: int
    reference: str
    run: str

    @classmethod
    def from_json(cls, j: JSON) -> Entry:
        return cls(
            j["number"], _at(j["at"]), j["kind"], j["amount_micros"], j["model_micros"], j["web_micros"], j["compute_micros"],
            j["balance_micros"], j.get("reference", ""), j.get("run", ""),
        )  # fmt: skip


@dataclass(frozen=True)
class StatementPage:
    """Some entries of a ledger. ``next_after`` is None on the last page."""

    entries: tuple[Entry, ...]
    next_after: int | None

    @classmethod
    def from_json(cls, j: JSON) -> StatementPage:
        return cls(tuple(Entry.from_json(e) for e in j["entries"]), j.get("next_after"))


@dataclass(frozen=True)
class Limits:
    """Runs at once and runs waiting. 0 is the server's default; of a key, no limit of its own."""

    concurrency: int
    queue: int

    @classmethod
    def from_json(cls, j: JSON) -> Limits:
        return cls(j["concurrency"], j["queue"])


@dataclass(frozen=True)
class OwnLimits:
    """What holds for the key and for its organisation."""

    org: Limits
    key: Limits

    @classmethod
    def from_json(cls, j: JSON) -> OwnLimits:
        return cls(Limits.from_json(j["org"]), Limits.from_json(j["key"]))


@dataclass(frozen=True)
class Share:
    """Lets whoever has its token read one run. The token is there only when the share was just made."""

    id: str
    run: str
    created_at: datetime
    expires_at: datetime
    token: str = field(repr=False)

    @classmethod
    def from_json(cls, j: JSON) -> Share:
        return cls(j["id"], j["run"], _at(j["created_at"]), _at(j["expires_at"]), j.get("token", ""))


@dataclass(frozen=True)
class Org:
    """An organisation. ``queue_limit`` and ``retention_seconds`` are None where they are the server's."""

    id: str
    name: str
    concurrency: int
    queue_limit: int | None
    retention_seconds: int | None
    created_at: datetime

    @classmethod
    def from_json(cls, j: JSON) -> Org:
        return cls(
            j["id"], j["name"], j["concurrency"], j.get("queue_limit"), j.get("retention_seconds"), _at(j["created_at"])
        )  # fmt: skip


@dataclass(frozen=True)
class Member:
    """A member of an organisation, who holds keys."""

    id: str
    org: str
    name: str
    created_at: datetime

    @classmethod
    def from_json(cls, j: JSON) -> Member:
        return cls(j["id"], j["org"], j["name"], _at(j["created_at"]))


@dataclass(frozen=True)
class Key:
    """An API key. The secret is there only when the key was just made."""

    id: str
    org: str
    name: str
    role: str
    member: str
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    secret: str = field(repr=False)

    @classmethod
    def from_json(cls, j: JSON) -> Key:
        return cls(
            j["id"], j["org"], j["name"], j["role"], j.get("member", ""), _at(j["created_at"]),
            _time(j.get("expires_at")), _time(j.get("revoked_at")), j.get("secret", ""),
        )  # fmt: skip


@dataclass(frozen=True)
class Node:
    """A host that carries out runs."""

    id: str
    isolation: str
    slots: int
    running: int
    ready: int
    draining: bool
    alive: bool
    raw: JSON = field(repr=False, compare=False)

    @classmethod
    def from_json(cls, j: JSON) -> Node:
        return cls(
            j["id"], j["isolation"], j["slots"], j["running"], j["ready"], j["draining"], j["alive"], j
        )  # fmt: skip


@dataclass(frozen=True)
class Pool:
    """The ready machines of one image and shape, over all hosts; ``policy`` and ``nodes`` as the API has them."""

    name: str
    ready: int
    leased: int
    refilling: int
    waiting: int
    target: int
    policy: JSON
    nodes: tuple[JSON, ...]

    @classmethod
    def from_json(cls, j: JSON) -> Pool:
        return cls(
            j["name"], j["ready"], j["leased"], j["refilling"], j["waiting"], j["target"], j["policy"], tuple(j["nodes"])
        )  # fmt: skip
