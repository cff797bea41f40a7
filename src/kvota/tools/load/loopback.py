"""Load goes to this machine, unless whoever runs it says that they may load another."""

from ipaddress import ip_address
from urllib.parse import urlsplit

from kvota.core.errors import KvotaError

FLAG = "--i-may-load-this-host"


class ForeignHost(KvotaError):
    """Load was about to go to another machine."""


def check_host(url: str, *, is_allowed: bool) -> None:
    """Raises ForeignHost for anything but this machine's loopback addresses. Resolves no names."""
    host = urlsplit(url if "//" in url else f"//{url}").hostname or ""
    if not (is_allowed or is_loopback(host)):
        raise ForeignHost(
            f"{host or url} is not this machine. A load test slows down or stops what others use: "
            f"add {FLAG} if it is yours to load."
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False  # a name: where it leads is known only when it is asked for
