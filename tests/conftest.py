"""What holds for every test, wherever the tests are started from."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Take Ctrl-C in, as do all processes that tests start: a shell lets its background jobs ignore it, for good."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
