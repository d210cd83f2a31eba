"""What can go wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class EphemeralError(Exception):
    """Anything that this package raises."""


class UnreachableError(EphemeralError):
    """No whole answer came. Whether the server acted is unknown."""


class ChecksumError(EphemeralError):
    """A file did not arrive as the run left it."""


@dataclass(frozen=True)
class FieldError:
    """One field of the request at fault."""

    field: str
    detail: str


class APIError(EphemeralError):
    """The server's refusal (problem details, RFC 9457). Decide on ``code``, which is stable; it is empty when the answer
    was not the server's own."""

    def __init__(
        self,
        *,
        status: int,
        code: str,
        detail: str,
        errors: Sequence[FieldError] = (),
        remediation: str = "",
        request_id: str = "",
        retry_after: float | None = None,
    ) -> None:
        self.status = status
        self.code = code
        self.detail = detail
        self.errors = tuple(errors)
        self.remediation = remediation
        self.request_id = request_id
        self.retry_after = retry_after
        text = f"{code}: {detail}" if code else detail
        for e in self.errors:
            text += f"; {e.field} {e.detail}"
        if request_id:
            text += f" (request {request_id})"
        super().__init__(text)
