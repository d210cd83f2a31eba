"""Client of the Ephemeral API: run untrusted code in a microVM that exists for one run."""

from ._async import AsyncClient
from ._errors import APIError, ChecksumError, EphemeralError, FieldError, UnreachableError
from ._models import (
    Account,
    Event,
    File,
    Files,
    Money,
    RemoteFile,
    Result,
    Run,
    RunError,
    RunPage,
    Stage,
    Stream,
)
from ._sync import Client

__all__ = [
    "APIError",
    "Account",
    "AsyncClient",
    "ChecksumError",
    "Client",
    "EphemeralError",
    "Event",
    "FieldError",
    "File",
    "Files",
    "Money",
    "RemoteFile",
    "Result",
    "Run",
    "RunError",
    "RunPage",
    "Stage",
    "Stream",
    "UnreachableError",
]
