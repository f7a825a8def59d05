"""A fresh boot: the process that answers was started by this boot, and the log that is read is this boot's."""

from __future__ import annotations

from urllib.parse import urlsplit

from pytest_vram.backends.listening import Listening
from pytest_vram.bootlog import Boot
from pytest_vram.checks.finding import Finding
from pytest_vram.checks.wording import block

#: Seconds by which clocks and the kernel's ticks may disagree.
_SLACK = 2.0


def judge_fresh(seen: Listening, boot: Boot | None = None, *, check: str = "fresh") -> Finding | None:
    """Hold what listens at the server's address, and the times of its log, against this boot.

    An old server that still has the port answers as if the restart had happened. The process that holds the socket
    must belong to this boot (by its tree, or by the mark in its environment, which daemons keep) and must not be older
    than the server's first process; the log must have been written since, must not tell of a boot that took longer than
    this server lives, and must not name another port.

    :param seen: :meth:`pytest_vram.backends.RunningBackend.listening`.
    :returns: failed where something is not of this boot, inconclusive where it cannot be known.
    """
    wrong: list[tuple[str, str]] = []
    for holder in seen.holders:
        name = f"process {holder.pid}"
        if not holder.ours:
            wrong.append((name, f"holds port {seen.port} and was not started by this boot ({holder.program})"))
        elif holder.older_by > _SLACK:
            wrong.append((name, f"holds port {seen.port} and is {holder.older_by:.0f} s older than this boot"))
    if seen.log_older_by is not None and seen.log_older_by > _SLACK:
        wrong.append(("boot log", f"was last written {seen.log_older_by:.0f} s before this boot began"))
    if boot is not None:
        wrong.extend(_of_log(seen, boot))
    if wrong:
        return _finding(check, "failed", "not this boot", "What was read or asked is not of this boot.", wrong)
    if not seen.holders:
        text = f"Who listens on port {seen.port} cannot be seen, so this may be another boot's server: {seen.reason}."
        return _finding(check, "inconclusive", "boot not provable", text, [])
    return None


def _of_log(seen: Listening, boot: Boot) -> list[tuple[str, str]]:
    found = []
    url = boot.facts.get("url")
    try:
        port = urlsplit(url).port if isinstance(url, str) else None
    except ValueError:
        port = None
    if port and seen.reads_port and port != seen.port:
        found.append(("boot log", f"says that it listens on port {port}, requests go to {seen.port}"))
    times = [time for span in boot.phases for time in (span.start, span.end) if time is not None]
    if times and boot.clock == "start" and max(times) > seen.age + _SLACK:
        found.append(("boot log", f"tells of {max(times):.0f} s, the server was started {seen.age:.0f} s ago"))
    return found


def _finding(check: str, verdict: str, section: str, title: str, rows: list[tuple[str, str]]) -> Finding:
    return Finding(
        check=check,
        verdict="failed" if verdict == "failed" else "inconclusive",
        section=section,
        text=block(title, rows),
    )
