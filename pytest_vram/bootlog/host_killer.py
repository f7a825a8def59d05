"""The host's out-of-memory killer, told apart from a device that refuses an allocation.

The kernel and systemd say it in so many words. A shell, a container or a supervisor only says that the process was
ended by SIGKILL, which somebody may have sent as well: that is likely, and never more.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from pytest_vram.bootlog.boot import Failure
from pytest_vram.bootlog.lines import shown
from pytest_vram.units import mib

#: A line without one of these says nothing about the killer. For quick looks, and for ``words`` of a grammar.
NEEDLES = (
    "ut of memory",
    " oom",
    "oom-kill",
    "OOM",
    "illed",
    "xit code",
    "xit Code",
    "xit_code",
    "xitcode",
    "xit status",
    "xited with",
    "returncode",
    "SIGKILL",
    "ignal 9",
)
WORDS = "|".join(NEEDLES)

_KERNEL = re.compile(
    r"(?P<group>Memory cgroup o|O)ut of memory(?: \(\w{1,40}\))?: Kill(?:ed)? process (?P<pid>\d{1,10})"
    r"(?: \((?P<name>[^()]{1,40})\)|, UID \d{1,10}, \((?P<name2>[^()]{1,40})\))?",
    re.ASCII,
)
#: Kernels before 5.0 say it in two lines; this is the second.
_OLD_KERNEL = re.compile(r"^\s*Killed process (?P<pid>\d{1,10}) \((?P<name>[^()]{1,40})\),? .*\brss:", re.ASCII)
_CONSTRAINT = re.compile(
    r"\boom-kill:constraint=CONSTRAINT_(?P<constraint>\w{1,20}),.{0,600}\btask=(?P<name>[^,]{1,40}),pid=(?P<pid>\d{1,10})",
    re.ASCII,
)
_HELD = re.compile(r"\b(?:anon|file|shmem)-rss:(\d{1,15})kB", re.ASCII)
_UNIT = re.compile(
    r"A process of this unit has been killed by the OOM killer|Failed with result 'oom-kill'|result=oom-kill\b"
    r"|systemd-oomd killed \d{1,6} process|\bcode=oom-kill\b",
    re.ASCII,
)
_CONTAINER = re.compile(
    r"\bOOMKilled\b(?!\"?\s*[:=]\s*\"?(?:false|False|0))|\bOOMKilling\b|\bcontainer \S{1,100} oom\b", re.ASCII
)
#: A shell's word for SIGKILL: alone, or with the job before it.
_SHELL = re.compile(
    r"^(?:Killed|zsh: killed\b.*|\[\d{1,4}\][+ -] {1,4}\d{0,10} ?[Kk]illed\b.*"
    r"|.{0,200}: line \d{1,7}: +\d{1,10} Killed\b.*)$",
    re.ASCII,
)
_SIGKILL = re.compile(
    r"\b(?:exit(?:ed|ing)?(?: with)?|exit_?code|returned non-zero exit|returncode|Exit Code)"
    r"[ :=]{1,20}(?:status |code |exit code |exit status )?[( ]?(?:137\b|-9\b)"
    r"|\bsignal: killed\b|\bSignals\.SIGKILL\b|\b[Ss]ignal 9 \(SIGKILL\)|\bkilled by (?:signal 9|SIGKILL)\b"
    r"|\bcode=killed, status=9/KILL\b|\bterminated by signal SIGKILL\b",
    re.ASCII,
)
#: Names under which the kernel knows inference engines and what they start; it cuts names after 15 bytes.
_ENGINES = re.compile(r"llama|kobold|vllm|sglang|local-?ai|text-gen|tabby|exllama|mlc", re.IGNORECASE)
#: Names of processes that may be an engine in Python, and any other program in Python.
_PYTHON = re.compile(r"python|pt_main|ray::|torch|uvicorn|gunicorn", re.IGNORECASE)


class Kill(NamedTuple):
    """A process that was ended for want of host memory, or seems to have been.

    :ivar certain: false where only SIGKILL is known, or the process may be another program.
    :ivar name: the process, as the kernel calls it.
    :ivar held: bytes that it held in memory. :ivar group: a control group's (a container's) limit was what ran out.
    :ivar ours: false where another program was ended, none of an inference engine.
    """

    text: str
    certain: bool
    name: str | None = None
    pid: int | None = None
    held: int | None = None
    group: bool = False
    ours: bool = True

    def warning(self) -> str:
        """The sentence for a kill that was not of the engine."""
        return (
            f"the host ran out of memory, and the kernel ended process {self.pid} ({self.name}), which is none of the"
            " engine's"
        )

    def failure(self, *, phase: str | None, line: int | None = None) -> Failure:
        """The kill as a failure in this phase."""
        return Failure(
            kind="host_oom_killed",
            certainty="certain" if self.certain else "likely",
            text=shown(self.text),
            phase=phase,
            device="host",
            line=line,
            note=self._note(),
        )

    def _note(self) -> str:
        held = f"; the process held {mib(self.held)}" if self.held else ""
        if not self.certain and self.name is not None:
            return (
                f"the kernel ended process {self.pid} ({self.name}) for want of memory, which may be another one{held}"
            )
        if not self.certain:
            return (
                "this is most often the kernel for want of host memory, and else somebody's SIGKILL; the kernel's log"
                " (`journalctl -k`, `dmesg`) tells"
            )
        whose = "a control group's (a container's) limit" if self.group else "the host's memory"
        return f"{whose} ran out, not that of a device{held}"


def read_kill(text: str, *, python: bool = False) -> Kill | None:
    """What one line without its prefix says about a kill for want of host memory, or ``None``.

    :param python: whether the engine is a program in Python, so that the end of one is its end.
    """
    if not any(needle in text for needle in NEEDLES):
        return None
    for pattern in (_KERNEL, _CONSTRAINT, _OLD_KERNEL):
        if match := pattern.search(text):
            return _by_kernel(match, text, python=python)
    if _UNIT.search(text) or _CONTAINER.search(text):
        return Kill(text, certain=True, group="OOMKill" in text)
    if _SHELL.match(text.strip()) or _SIGKILL.search(text):
        return Kill(text, certain=False)
    return None


def with_kill(known: Failure | None, kill: Failure) -> Failure:
    """Which of two failures explains the end: what the engine said itself, unless the kernel says that it ended it.

    An engine that reported a refused allocation and then was ended by SIGKILL was ended by whoever watches it.
    """
    if known is None:
        return kill
    if known.kind in ("crash", "load_error") and (kill.certainty == "certain" or known.certainty != "certain"):
        return kill
    if known.kind == "host_oom_killed" and known.certainty != "certain" and kill.certainty == "certain":
        return msgspec.structs.replace(kill, phase=known.phase)
    return known


def _by_kernel(match: re.Match[str], text: str, *, python: bool) -> Kill:
    groups = match.groupdict()
    name = groups.get("name") or groups.get("name2")
    engine = name is None or _ENGINES.search(name) is not None
    in_python = name is not None and _PYTHON.search(name) is not None
    held = sum(int(kilobytes) for kilobytes in _HELD.findall(text)) << 10
    return Kill(
        text,
        certain=engine or python or not in_python,
        name=name,
        pid=int(groups["pid"]),
        held=held or None,
        group=(groups.get("group") or "").startswith("Memory") or groups.get("constraint") == "MEMCG",
        ours=engine or in_python,
    )
