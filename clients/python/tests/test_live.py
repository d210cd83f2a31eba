"""Against a real server: EPHEMERAL_URL and EPHEMERAL_API_KEY name it; scripts/test-python starts one."""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

import ephemeral
from ephemeral import File

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

    anyio.run(main)
