"""Addresses of a learner: ``ipc://PATH`` (a unix socket) or ``tcp://HOST:PORT``."""

from __future__ import annotations

import os
import re

# struct sockaddr_un holds 108 bytes with the terminating zero (unix(7)).
MAX_SOCKET_PATH_BYTES = 107

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.%\w]+\]|[^\s:/\[\]]+):(?P<port>\d{1,5})")
_LOOPBACK = ("localhost", "127.", "[::1]")


class AddressError(ValueError):
    """Not an address that a learner can be reached at."""


def check_address(address: str) -> str:
    """Return ``address`` if ZMQ can use it between processes; raise :class:`AddressError` with the reason otherwise."""
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if not path.startswith("/"):
            # A leading @ would be an abstract socket, which has no permissions at all.
            raise AddressError(f"{address!r}: ipc needs an absolute path, ipc:///directory/socket")
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise AddressError(f"{address!r}: a socket's path may have {MAX_SOCKET_PATH_BYTES} bytes at most")
        if "\0" in path:
            raise AddressError(f"{address!r}: a socket's path cannot hold a zero byte")
        return address
    match = _TCP.fullmatch(address)
    if match is None:
        raise AddressError(f"{address!r} is neither tcp://HOST:PORT nor ipc:///PATH")
    if not 1 <= int(match["port"]) <= 65_535:
        raise AddressError(f"{address!r}: {match['port']} is no port")
    return address


def is_private(address: str) -> bool:
    """Whether only this machine can reach ``address``: a unix socket, or TCP on the loopback interface."""
    if address.startswith("ipc://"):
        return True
    match = _TCP.fullmatch(address)
    return match is not None and match["host"].startswith(_LOOPBACK)
