"""What the API answers with. Fields that the server adds later are in ``raw``."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

JSON = Mapping[str, Any]

#: The states in which a run has ended.
TERMINAL = frozenset({"succeeded", "failed", "cancelled", "timed_out", "budget_exhausted"})


def _time(value: Any) -> datetime | None:
    if value is None:
        return None
    text = str(value).replace("Z", "+00:00")
    head, dot, rest = text.partition(".")
    if dot:  # Python 3.10 reads three or six digits only
        digits = len(rest) - len(rest.lstrip("0123456789"))
        text = f"{head}.{rest[:digits][:6]:0<6}{rest[digits:]}"
    return datetime.fromisoformat(text)


@dataclass(frozen=True)
class Upload:
    """A file that was sent ahead of the runs that use it."""

    id: str
    size: int
    sha256: str
    created_at: datetime | None
    expires_at: datetime | None  #: runs created before this can use it
    zero_data_retention: bool = False

    @classmethod
    def from_json(cls, j: JSON) -> Upload:
        return cls(
            j["id"], j["size"], j["sha256"], _time(j["created_at"]), _time(j["expires_at"]), j["zero_data_retention"]
        )


@dataclass(frozen=True)
class File:
    """A file that the run finds in its working directory: its ``content``, or an ``upload``, which may be an id.
    ``mode`` is octal, such as "0755"."""

    path: str
    content: str | bytes = ""
    mode: str | None = None
    upload: Upload | str | None = None

    def to_json(self) -> dict[str, str]:
        if self.upload is not None:
            if self.content:
                raise ValueError(f"{self.path!r} has content and an upload")
            f = {"path": self.path, "upload": self.upload.id if isinstance(self.upload, Upload) else self.upload}
        elif isinstance(self.content, bytes):
            f = {"path": self.path, "content": base64.b64encode(self.content).decode(), "encoding": "base64"}
        else:
            f = {"path": self.path, "content": self.content}
        if self.mode is not None:
            f["mode"] = self.mode
        return f


@dataclass(frozen=True)
class RemoteFile:
    """A file that a run left in ``out/``."""

    path: str
    size: int
    sha256: str
    mode: str

    @classmethod
    def from_json(cls, j: JSON) -> RemoteFile:
        return cls(path=j["path"], size=j["size"], sha256=j["sha256"], mode=j["mode"])


@dataclass(frozen=True)
class Files:
    """What a run left, in numbers."""

    count: int
    bytes: int
    skipped: int = 0
    truncated: bool = False
    error: str = ""

    @classmethod
    def from_json(cls, j: JSON) -> Files:
        return cls(j["count"], j["bytes"], j.get("skipped", 0), j.get("truncated", False), j.get("error", ""))


@dataclass(frozen=True)
class Money:
    """What a run reserved and what became of it, in micro-dollars: 1,000,000 are one US dollar."""

    reserved: int
    charged: int
    released: int
    model: int
    web: int
    compute: int

    @classmethod
    def from_json(cls, j: JSON) -> Money:
        return cls(*(j[f"{n}_micros"] for n in ("reserved", "charged", "released", "model", "web", "compute")))


@dataclass(frozen=True)
class Stream:
    """The output of a command, byte for byte. ``bytes`` is how many it wrote."""

    content: bytes
    bytes: int
    truncated: bool

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    @classmethod
    def from_json(cls, j: JSON) -> Stream:
        content = j["content"]
        raw = base64.b64decode(content) if j.get("encoding") == "base64" else content.encode()
        return cls(raw, j["bytes"], j["truncated"])


@dataclass(frozen=True)
class Result:
    """What a run answered. ``output`` is of a prompt; the others are of a command."""

    output: str
    exit_code: int | None
    stdout: Stream | None
    stderr: Stream | None

    @classmethod
    def from_json(cls, j: JSON) -> Result:
        out, err = j.get("stdout"), j.get("stderr")
        return cls(
            j.get("output", ""),
            j.get("exit_code"),
            Stream.from_json(out) if out else None,
            Stream.from_json(err) if err else None,
        )


@dataclass(frozen=True)
class RunError:
    """Why a run failed: a stable code and a sentence for people."""

    code: str
    detail: str


@dataclass(frozen=True)
class Stage:
    """One named part of a run's wall time."""

    name: str
    ms: float


@dataclass(frozen=True)
class Run:
    """One run, as it was when the server answered."""

    id: str
    org: str
    state: str
    queued_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    money: Money
    result: Result | None
    files: Files | None
    error: RunError | None
    stages: tuple[Stage, ...]
    raw: JSON = field(repr=False, compare=False)

    @property
    def ended(self) -> bool:
        return self.state in TERMINAL

    @property
    def stdout(self) -> str:
        """The command's standard output as text; empty without one."""
        return self.result.stdout.text if self.result and self.result.stdout else ""

    @classmethod
    def from_json(cls, j: JSON) -> Run:
        queued = _time(j["queued_at"])
        assert queued is not None
        result, files, error = j.get("result"), j.get("files"), j.get("error")
        return cls(
            id=j["id"],
            org=j["org"],
            state=j["state"],
            queued_at=queued,
            started_at=_time(j.get("started_at")),
            ended_at=_time(j.get("ended_at")),
            money=Money.from_json(j["money"]),
            result=Result.from_json(result) if result else None,
            files=Files.from_json(files) if files else None,
            error=RunError(error["code"], error.get("detail", "")) if error else None,
            stages=tuple(Stage(s["name"], s["ms"]) for s in j.get("stages", ())),
            raw=j,
        )


@dataclass(frozen=True)
class RunPage:
    """A page of runs, newest first. ``next_cursor`` is empty on the last."""

    runs: tuple[Run, ...]
    next_cursor: str

    @classmethod
    def from_json(cls, j: JSON) -> RunPage:
        return cls(tuple(Run.from_json(r) for r in j["runs"]), j.get("next_cursor", ""))


@dataclass(frozen=True)
class Event:
    """One entry of a run's timeline; ``at_ms`` counts from when it was queued."""

    seq: int
    run: str
    type: str
    at_ms: float
    data: JSON

    @classmethod
    def from_json(cls, j: JSON) -> Event:
        return cls(j["seq"], j["run"], j["type"], j["at_ms"], j.get("data") or {})


@dataclass(frozen=True)
class Account:
    """An organisation's money, in micro-dollars."""

    org: str
    balance: int
    held: int
    available: int
    deposits: int
    charged: int

    @classmethod
    def from_json(cls, j: JSON) -> Account:
        return cls(
            j["org"],
            j["balance_micros"],
            j["held_micros"],
            j["available_micros"],
            j["deposits_micros"],
            j["charged_micros"],
        )
