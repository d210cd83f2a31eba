"""Against a real server: EPHEMERAL_URL and EPHEMERAL_API_KEY name it; scripts/test-python starts one."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import anyio
import pytest

import ephemeral
from ephemeral import File, Limits

pytestmark = pytest.mark.skipif("EPHEMERAL_API_KEY" not in os.environ, reason="no server: run scripts/test-python")

FILES = [
    File("in/größe.txt", "text €\n"),
    File("bytes", bytes(range(256))),
    File("run.sh", "#!/bin/sh\ncat in/* > out/text; cp bytes 'out/odd \"name\" ü'; : > out/empty\necho done; exit 3\n", mode="0755"),
]


def test_a_run_with_files(tmp_path: Path) -> None:
    with ephemeral.Client() as client:
        run = client.create_run(command="./run.sh", files=FILES, metadata={"test": "python"}, retention_seconds=3600)
        events = list(client.events(run.id))
        run = client.wait(run.id)
        assert run.state == "succeeded" and run.result and run.result.exit_code == 3 and run.stdout == "done\n"
        assert [e.seq for e in events] == list(range(1, len(events) + 1)) and events[-1].type == "worker.destroyed"
        assert run.money.charged + run.money.released == run.money.reserved
        assert run.files and run.files.count == 3
        files = {f.path: client.download(run.id, f) for f in client.files(run.id)}
        assert files == {"text": "text €\n".encode(), 'odd "name" ü': bytes(range(256)), "empty": b""}
        client.download_all(run.id, tmp_path)
        assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == files
        assert run.id in [r.id for r in client.runs()]
        client.delete(run.id)
        assert client.files(run.id) == [] and client.run(run.id).raw["erased"] is True


def test_uploads() -> None:
    content = os.urandom(3 << 20)
    with ephemeral.Client() as client:
        upload = client.upload(content)
        assert client.get_upload(upload) == upload and upload.size == len(content)
        for files in ({"in/data": upload}, [File("in/data", upload=upload.id)]):
            run = client.create_run(command="sha256sum in/data | cut -c1-64", files=files, wait=60)
            assert run.state == "succeeded" and run.stdout == upload.sha256 + "\n"
        client.delete_upload(upload)
        with pytest.raises(ephemeral.APIError) as e:
            client.create_run(command="true", files={"x": upload})
        assert e.value.code == "unknown_upload"
        assert client.upload(b"").size == 0


async def upload_async() -> None:
    async with ephemeral.AsyncClient() as client:
        upload = await client.upload(b"x" * 1_000_000, zero_data_retention=True)
        run = await client.create_run(command="wc -c < data", files={"data": upload}, zero_data_retention=True, wait=60)
        assert run.state == "succeeded"
        with pytest.raises(ephemeral.APIError) as e:  # the run has it
            await client.get_upload(upload)
        assert e.value.code == "not_found"


def test_uploads_async() -> None:
    anyio.run(upload_async)


def test_one_key_is_one_run() -> None:
    with ephemeral.Client() as client:
        first = client.create_run(command="true", idempotency_key="python-once", wait=30)
        again = client.create_run(command="true", idempotency_key="python-once")
        assert first.id == again.id and again.state == "succeeded"
        with pytest.raises(ephemeral.APIError) as e:
            client.create_run(command="false", idempotency_key="python-once")
        assert e.value.code == "idempotency_conflict"
        with pytest.raises(ephemeral.APIError) as e:
            client.create_run(command="true", files={"../x": ""})
        assert e.value.code == "invalid_request" and e.value.errors[0].field == "files[0].path"
        with pytest.raises(ephemeral.APIError) as e:
            client.run("run_" + "0" * 32)
        assert e.value.code == "not_found"


def test_what_a_member_sees() -> None:
    with ephemeral.Client() as client:
        run = client.create_run(command="true", wait=30)
        today = datetime.now(timezone.utc).date()
        days = client.usage(today - timedelta(days=1), today)
        assert sum(d.runs for d in days) > 0 and sum(d.charged for d in days) >= run.money.charged > 0
        charge = next(e for e in client.statement() if e.run == run.id)
        assert charge.kind == "charge" and charge.amount == -run.money.charged
        assert client.statement_page(limit=1).next_after == 1
        assert client.limits().key == Limits(0, 0)
        share = client.create_share(run.id, 3600)
        assert share.token and [s.id for s in client.shares(run.id)] == [share.id]
        client.revoke_share(run.id, share.id)
        assert client.shares(run.id) == [] and len(client.receipt_keys()) == 1
        with pytest.raises(ephemeral.APIError) as e:
            client.orgs()
        assert e.value.code == "forbidden"


def test_administration() -> None:
    with ephemeral.Client(api_key=os.environ["EPHEMERAL_ADMIN_KEY"]) as admin:
        org = admin.create_org("Python", id="python-admin", concurrency=2)
        assert admin.org(org.id) == org and org in admin.orgs() and org.retention_seconds is None
        for _ in range(2):
            assert admin.credit(org.id, 1_000_000, "once").balance == 1_000_000
        assert admin.org_account(org.id).available == 1_000_000
        assert [e.reference for e in admin.org_statement(org.id)] == ["once"]
        assert admin.org_statement_page(org.id, limit=1).next_after is None
        assert admin.limit_org(org.id, Limits(3, 9)) == admin.org_limits(org.id) == Limits(3, 9)
        assert admin.retain_org(org.id, 3600).retention_seconds == 3600
        member = admin.add_member(org.id, "Ada")
        key = admin.create_key(org.id, "laptop", member=member.id, expires_at=datetime.now(timezone.utc) + timedelta(hours=1))
        assert admin.members(org.id) == [member] and [k.id for k in admin.keys(org.id)] == [key.id]
        assert admin.limit_key(key.id, Limits(1, 4)) == admin.key_limits(key.id) == Limits(1, 4)
        with ephemeral.Client(api_key=key.secret) as theirs:
            assert theirs.limits().key == Limits(1, 4)
            assert theirs.create_run(command="true", wait=30).state == "succeeded"
            assert sum(d.runs for d in admin.org_usage(org.id)) == 1
            admin.revoke_key(key.id)
            with pytest.raises(ephemeral.APIError) as e:
                theirs.account()
            assert e.value.code == "unauthenticated"
        admin.put_connection(org.id, "catalogue", {"base_url": "https://catalogue.example.com"})
        assert admin.connection(org.id, "catalogue") == admin.connections(org.id)[0]
        admin.delete_connection(org.id, "catalogue")
        admin.remove_member(org.id, member.id)
        assert admin.connections(org.id) == [] and admin.members(org.id) == []
        assert [n.alive for n in admin.nodes()] == [True]
        pool = admin.pools()[0]
        assert admin.set_pool(pool.name, {"min_ready": 1}).policy["min_ready"] == 1 and admin.pool(pool.name).name == pool.name
        size = {"min_ready": 2, "max_ready": 4, "max_machines": 8, "claims_per_second": 1}
        assert admin.predict_pool(pool.name, size)["claims"] > 0


def test_async() -> None:
    async def main() -> None:
        async with ephemeral.AsyncClient() as client:
            run = await client.create_run(command="sleep 60", timeout_seconds=120)
            async for event in client.events(run.id):
                if event.type == "worker.started":
                    await client.cancel(run.id)
            run = await client.wait(run.id)
            assert run.state == "cancelled"
            account = await client.account()
            assert account.available + account.held == account.balance
            assert run.id in [e.run async for e in client.statement()]
            assert sum(d.runs for d in await client.usage()) > 0

    anyio.run(main)
