"""Can a server be reached? Answered within a bounded time, proxies considered."""

from __future__ import annotations

import queue
import socket
import threading
import urllib.request
from urllib.parse import urlsplit


def first_hop(url: str, proxy: str | None = None) -> tuple[str, int]:
    """Return host and port that a request to ``url`` connects to: the server's or a proxy's.

    ``proxy`` goes before the usual environment variables (``https_proxy``, ``no_proxy``).
    """
    server = urlsplit(url)
    if not urllib.request.proxy_bypass(server.hostname or ""):
        proxy = proxy or urllib.request.getproxies().get(server.scheme)
        if proxy:
            server = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return server.hostname or "", server.port or (443 if server.scheme == "https" else 80)


def connect_problem(host: str, port: int, timeout_s: float) -> str | None:
    """Connect and hang up: None if that works in time, else what is wrong."""
    answer: queue.Queue[str | None] = queue.Queue()

    def attempt() -> None:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except Exception as error:
            answer.put(str(error) or type(error).__name__)
        else:
            answer.put(None)

    # In a thread: the time-out of a socket does not bound the name look-up before it.
    threading.Thread(target=attempt, name="reachable", daemon=True).start()
    try:
        return answer.get(timeout=timeout_s)
    except queue.Empty:
        return f"no answer within {timeout_s:g} s"
