"""The calls of the ordinary client beside runs. Generated from _account_async.py by generate.py: change that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date, datetime
from typing import Any, TypeVar

from . import _calls
from ._calls import Call
from ._ledger import DayUsage, Entry, Key, Limits, Member, Node, Org, OwnLimits, Pool, Share, StatementPage
from ._models import JSON, Account
from ._wire import Request

T = TypeVar("T")


class AccountCalls:
    """Usage, ledger, limits and shares, with a member's key; administration, with an administrator's."""

    def _call(self, r: Request) -> Any:
        raise NotImplementedError

    def _do(self, call: Call[T]) -> T:
        return call.read(self._call(call.request))

    def usage(self, first: date | None = None, last: date | None = None) -> list[DayUsage]:
        """Returns usage by day (UTC), oldest first; without dates that of the last 30 days."""
        return self._do(_calls.usage(None, first, last))

    def statement_page(self, *, after: int | None = None, limit: int | None = None) -> StatementPage:
        """Returns entries of the ledger with a number above ``after``, oldest first."""
        return self._do(_calls.statement(None, after, limit))

    def statement(self, after: int = 0) -> Iterator[Entry]:
        """Goes through the ledger, oldest first, from the entry after the number ``after``."""
        return self._entries(None, after)

    def limits(self) -> OwnLimits:
        """Returns what holds for the key and for its organisation."""
        return self._do(_calls.own_limits())

    def create_share(self, run_id: str, expires_in_seconds: int | None = None) -> Share:
        """Lets whoever gets the share's token read the run, for a day unless said otherwise."""
        return self._do(_calls.create_share(run_id, expires_in_seconds))

    def shares(self, run_id: str) -> list[Share]:
        """Returns the run's shares, without their tokens."""
        return self._do(_calls.shares(run_id))

    def revoke_share(self, run_id: str, share: str) -> None:
        """Ends a share."""
        self._do(_calls.revoke_share(run_id, share))

    def receipt_keys(self) -> list[JSON]:
        """Returns the public keys that receipts in events are signed with."""
        return self._do(_calls.receipt_keys())

    # What follows needs an administrator's key.

    def create_org(self, name: str, *, id: str | None = None, concurrency: int | None = None) -> Org:
        """Creates an organisation. With an ``id`` the call is repeated like others; without one it may fail where it
        is not known whether the organisation was made."""
        return self._do(_calls.create_org(name, id, concurrency))

    def orgs(self) -> list[Org]:
        """Returns all organisations."""
        return self._do(_calls.orgs())

    def org(self, org: str) -> Org:
        """Returns an organisation."""
        return self._do(_calls.org(org))

    def credit(self, org: str, amount: int, ref: str) -> Account:
        """Adds micro-dollars to an account, or takes a negative amount away. The same ``ref`` does so once."""
        return self._do(_calls.credit(org, amount, ref))

    def org_account(self, org: str) -> Account:
        """Returns the account of an organisation."""
        return self._do(_calls.org_account(org))

    def org_usage(self, org: str, first: date | None = None, last: date | None = None) -> list[DayUsage]:
        """Returns an organisation's usage by day, as ``usage`` does."""
        return self._do(_calls.usage(org, first, last))

    def org_statement_page(
        self, org: str, *, after: int | None = None, limit: int | None = None
    ) -> StatementPage:
        """Returns entries of an organisation's ledger, as ``statement_page`` does."""
        return self._do(_calls.statement(org, after, limit))

    def org_statement(self, org: str, after: int = 0) -> Iterator[Entry]:
        """Goes through an organisation's ledger, as ``statement`` does."""
        return self._entries(org, after)

    def org_limits(self, org: str) -> Limits:
        """Returns an organisation's limits."""
        return self._do(_calls.org_limits(org))

    def limit_org(self, org: str, limits: Limits) -> Limits:
        """Sets an organisation's limits."""
        return self._do(_calls.limit_org(org, limits))

    def retain_org(self, org: str, seconds: int) -> Org:
        """Has the content of an organisation's runs erased so long after their end; 0: with the record."""
        return self._do(_calls.retain_org(org, seconds))

    def add_member(self, org: str, name: str) -> Member:
        """Adds a member, who can hold keys."""
        return self._do(_calls.add_member(org, name))

    def members(self, org: str) -> list[Member]:
        """Returns an organisation's members."""
        return self._do(_calls.members(org))

    def remove_member(self, org: str, member: str) -> None:
        """Removes a member and revokes their keys."""
        self._do(_calls.remove_member(org, member))

    def create_key(
        self, org: str, name: str, *, member: str | None = None, expires_at: datetime | None = None
    ) -> Key:
        """Makes an API key of an organisation. Its secret is shown this once."""
        return self._do(_calls.create_key(org, name, member, expires_at))

    def keys(self, org: str) -> list[Key]:
        """Returns an organisation's keys, without their secrets."""
        return self._do(_calls.keys(org))

    def revoke_key(self, key: str) -> None:
        """Makes a key useless from the next request on."""
        self._do(_calls.revoke_key(key))

    def key_limits(self, key: str) -> Limits:
        """Returns a key's own limits."""
        return self._do(_calls.key_limits(key))

    def limit_key(self, key: str, limits: Limits) -> Limits:
        """Sets a key's own limits."""
        return self._do(_calls.limit_key(key, limits))

    def connections(self, org: str) -> list[JSON]:
        """Returns an organisation's connections, without credentials."""
        return self._do(_calls.connections(org))

    def connection(self, org: str, name: str) -> JSON:
        """Returns a connection."""
        return self._do(_calls.connection(org, name))

    def put_connection(self, org: str, name: str, settings: Mapping[str, object]) -> JSON:
        """Makes or replaces a connection; ``settings`` as the API describes them."""
        return self._do(_calls.put_connection(org, name, settings))

    def delete_connection(self, org: str, name: str) -> None:
        """Removes a connection."""
        self._do(_calls.delete_connection(org, name))

    def nodes(self) -> list[Node]:
        """Returns the hosts that carry out runs."""
        return self._do(_calls.nodes())

    def pools(self) -> list[Pool]:
        """Returns the pools of ready machines."""
        return self._do(_calls.pools())

    def pool(self, name: str) -> Pool:
        """Returns a pool."""
        return self._do(_calls.pool(name))

    def set_pool(self, name: str, policy: Mapping[str, object]) -> Pool:
        """Replaces a pool's policy; ``policy`` as the API describes it."""
        return self._do(_calls.set_pool(name, policy))

    def predict_pool(self, name: str, sizing: Mapping[str, object]) -> JSON:
        """Simulates a pool of another size with its own policy; ``sizing`` and the answer as the API describes them."""
        return self._do(_calls.predict_pool(name, sizing))

    def _entries(self, org: str | None, after: int) -> Iterator[Entry]:
        at: int | None = after or None
        while True:
            page = self._do(_calls.statement(org, at, None))
            for entry in page.entries:
                yield entry
            if page.next_after is None:
                return
            at = page.next_after
