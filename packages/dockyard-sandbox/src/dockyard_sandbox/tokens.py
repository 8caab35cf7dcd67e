"""Bearer tokens: read from a file, compared in constant time, each naming its tenant."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from dockyard_core import UserError
from dockyard_sandbox.queueing import DEFAULT_TENANT

MIN_TOKEN_LENGTH = 16
TENANT_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")


@dataclass(frozen=True)
class Tokens:
    """Token to tenant; a tenant of None is named by the request."""

    tenants: tuple[tuple[str, str | None], ...]

    def tenant_of(self, authorization: str, named: str) -> str | None:
        """Return the tenant of a request, None = no token matches.

        Args:
            authorization: the header ``Authorization``.
            named: the header ``Dockyard-Tenant``; counts only where the token names no tenant.
        """
        found: str | None = None
        for token, tenant in self.tenants:  # every one is compared: the time says nothing
            if hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode()):
                found = tenant or named
        return found


def read_tokens(path: Path) -> Tokens:
    """Read a token file: one token, or several lines ``tenant:token``.

    Raises UserError when it cannot be read, a token is short, or a line names no tenant.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--token-file {path} cannot be read: {error}") from error
    if len(lines) < 2:
        found: list[tuple[str, str | None]] = [(lines[0] if lines else "", None)]
    else:
        found = []
        for number, line in enumerate(lines, 1):
            tenant, separator, token = line.partition(":")
            if not separator or not TENANT_NAME.match(tenant):
                raise UserError(f"--token-file {path}:{number} must be 'tenant:token' where a file has several lines")
            found.append((token, tenant))
    for token, _ in found:
        if len(token) < MIN_TOKEN_LENGTH:
            raise UserError(f"--token-file {path} must hold at least {MIN_TOKEN_LENGTH} characters, got {len(token)}")
    return Tokens(tuple(found))


def tenant_name(header: str | None) -> str | None:
    """The tenant that a request names; None = the name is malformed."""
    if header is None:
        return DEFAULT_TENANT
    return header if TENANT_NAME.match(header) else None
