"""Base URLs: a server's root and its ``…/v1`` are both accepted."""

from __future__ import annotations

from urllib.parse import urlsplit

from pytest_vram.errors import BadSpec


def root_of(url: str, what: str) -> str:
    """The root that paths such as ``/v1/models`` are put after: without ``/v1`` and without a slash at the end.

    :param what: where the URL was written, for messages.
    :raises BadSpec: it is not an ``http`` or ``https`` URL with a host, or it carries a password.
    """
    if "@" in url.partition("://")[2].partition("/")[0]:
        # Not shown here either: URLs stand in reports, journals and messages.
        raise BadSpec(f"{what} holds a user name or a password, which every report would show: take it out")
    try:
        split = urlsplit(url)
        right = _is_one_word(url) and split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
    except ValueError:
        right = False
    if not right:
        raise BadSpec(f"{what} is not a URL: write one such as http://127.0.0.1:8080, not {url!r}")
    root = url.rstrip("/")
    return root.removesuffix("/v1").rstrip("/")


def path_of(path: str, what: str) -> str:
    """A path of a server, as it was written.

    :param what: where it was written, for messages.
    :raises BadSpec: it does not begin with a slash, or holds a blank or a control character, which would end it.
    """
    if not path.startswith("/") or not _is_one_word(path):
        raise BadSpec(f"{what} must be a path such as /health or a whole URL, not {path!r}")
    return path


def _is_one_word(text: str) -> bool:
    return text.isprintable() and " " not in text
