"""Stand-alone executor that turns a patch into a test verdict."""

from dockyard_sandbox.client import SandboxClient
from dockyard_sandbox.launcher import ServerHandle, start_server

__all__ = ["SandboxClient", "ServerHandle", "start_server"]
