"""Check within a bounded time whether a server can be reached, directly or through a proxy."""

import queue
import socket
import threading
import urllib.request
from urllib.parse import urlsplit


def first_hop(url: str, proxy: str | None = None) -> tuple[str, int]:
    """Return host and port that a request to ``url`` connects to: the server or a proxy.

    ``proxy`` replaces the proxy of the environment (``https_proxy``). A host that ``no_proxy``
    names is always connected directly.
    """
    server = urlsplit(url)
    if not urllib.request.proxy_bypass(server.hostname or ""):
        proxy = proxy or urllib.request.getproxies().get(server.scheme)
        if proxy:
            server = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    return server.hostname or "", server.port or (443 if server.scheme == "https" else 80)


def connect_problem(host: str, port: int, timeout_s: float) -> str | None:
    """Try to connect; return None if that works in time, else what is wrong."""
    answer: queue.Queue[str | None] = queue.Queue()

    def attempt() -> None:
        try:
            socket.create_connection((host, port), timeout=timeout_s).close()
        except Exception as error:
            answer.put(str(error) or type(error).__name__)
        else:
            answer.put(None)

    # A thread is needed, because the time-out of a socket does not limit the name look-up.
    threading.Thread(target=attempt, name="reachable", daemon=True).start()
    try:
        return answer.get(timeout=timeout_s)
    except queue.Empty:
        return f"no answer within {timeout_s:g} s"
