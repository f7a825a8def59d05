"""What the ``vram_session`` fixture gives: sessions on the test's backend, whose turns stand in its report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pytest_vram.sessions import Conversation, Gauge, KeeperGauge, NoGauge, Session, load
from pytest_vram.sessions.session import SETTLE

if TYPE_CHECKING:
    from pytest_vram.backends.pool import RunningBackend
    from pytest_vram.run import Attempt, Run

Named = str | os.PathLike[str] | Conversation


class Sessions:
    """Begins sessions on the backend of a test.

    :param folder: of the test's file: conversations are looked for there, then in the root folder of the run.
    """

    def __init__(self, run: Run, attempt: Attempt, backend: RunningBackend, folder: Path) -> None:
        self._run = run
        self._attempt = attempt
        self._backend = backend
        self._folder = folder

    def __call__(
        self,
        conversation: Named | Sequence[Named] = "cron-check",
        *,
        context: int | None = None,
        carry: bool = False,
        summary: bool = True,
        forced: bool = True,
        settle: float = SETTLE,
    ) -> Session:
        """A session of one conversation, or of several in turn; no turn is taken yet.

        :param conversation: a name of this package, a JSON file, or a :class:`~pytest_vram.sessions.Conversation`.
        :param context: tokens of the server's context; by default what it says. :param carry: a cycle goes on in the
            conversation of the one before. :param summary: the conversation's summary is pinned when messages are
            evicted. :param forced: false lets the model's own answers stay in the conversation.
        :param settle: seconds that memory may take to come to rest after a turn.
        :raises BadInput: a conversation that cannot be used.
        """
        run, attempt, plan = self._run, self._attempt, self._attempt.plan
        single = isinstance(conversation, str) or not isinstance(conversation, Sequence)
        # Whatever else it is: reading it says so.
        listed = [cast("Named", conversation)] if single else list(cast("Sequence[Named]", conversation))
        session = Session(
            self._backend,
            [load(one, base=self._base(one)) for one in listed],
            gauge=self._gauge(),
            # Not the backend's own spec: those that differ in how tools are offered share a server.
            spec=run.pool.spec(plan.backend, **plan.overrides),
            context=context,
            carry=carry,
            summary=summary,
            forced=forced,
            settle=settle,
            warmed=attempt.idle.rebase if attempt.idle is not None else lambda: None,
        )
        attempt.sessions.append(session)
        return session

    def _gauge(self) -> Gauge:
        run, attempt = self._run, self._attempt
        if run.predicted:
            return NoGauge("nothing is measured with --vram-device=predicted")
        if not run.measurable:
            return NoGauge(run.why_unmeasurable())
        return KeeperGauge(run.call, lambda: attempt.window)

    def _base(self, named: Named) -> Path:
        if isinstance(named, str | os.PathLike) and (self._folder / named).exists():
            return self._folder
        return Path(self._run.identity.rootdir)


def sections(attempt: Attempt) -> list[tuple[str, str]]:
    """The turn tables of a test, for the report of its failure."""
    return [
        ("vram: turns", "\n".join([f"{session!r}"[1:-1], *session.table()]))
        for session in attempt.sessions
        if session.turns
    ]
