"""Where the runs of a machine meet: the board and the gates, or, where they cannot be used, this run for itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path

from pytest_vram.keeper.room import Room
from pytest_vram.keeper.telling import stopped
from pytest_vram.leases import Board, BoardTrouble, Sheet, Turnstiles, shared_folder
from pytest_vram.measure import PYTEST
from pytest_vram.text import printable

_OWN_FOLDER = "leases"


class Meeting:
    """The board, made when it is first needed.

    :param log: writes a journal line.
    :ivar gates: folder of the gates, empty where there are none. :ivar warnings: sentences, each once.
    """

    def __init__(self, room: Room, log: Callable[..., None]) -> None:
        self._room = room
        self._log = log
        self._board: Board | None = None
        self._shared: Path | None = None
        self._ignored: frozenset[int] = room.ancestors
        #: Processes that this run's descends from: a test of theirs waits for it. Two runs may share one process.
        self._above = room.ancestors - {room.core.launch.controller[0] if room.core is not None else 0}
        self._told = 0
        self.warnings: list[str] = []
        self.gates = ""
        core = room.core
        if core is not None:
            # Without a device there is nothing to share with other runs.
            if core.launch.leases and room.keys:
                try:
                    self._shared = shared_folder()
                except BoardTrouble as trouble:
                    self._go_alone(trouble)
            self.gates = str(self._shared or self._own(core.folder) or "")
        self.turnstiles = Turnstiles(Path(self.gates) if self.gates else None, room.keys.values())
        if self.gates and not self.turnstiles.usable:
            self._warn(f"tests that want a device alone cannot be sure of it: the gates in {self.gates} cannot be used")
            self.gates = ""

    @staticmethod
    def _own(folder: Path) -> Path | None:
        own = folder / _OWN_FOLDER
        try:
            own.mkdir(exist_ok=True)
        except OSError:
            return None
        return own

    @property
    def place(self) -> str:
        """Where this run's pytest works, for people of other runs."""
        core = self._room.core
        if core is None:
            return ""
        try:
            return os.readlink(f"/proc/{core.launch.controller[0]}/cwd")
        except OSError:
            return core.launch.folder

    def pids(self) -> list[int]:
        """The pytest processes of this run."""
        core = self._room.core
        return sorted(member.pid for member in core.members.of(PYTEST)) if core is not None else []

    # ------------------------------------------------------------ steps

    def begin(self) -> bool:
        """Begin a step: nobody else looks or changes anything until :meth:`end`. False while another does so."""
        self.looked_at()
        if self._board is None and self._shared is not None:
            try:
                self._board = Board(self._shared, self._room.run)
            except BoardTrouble as trouble:
                self._go_alone(trouble)
        return self._board is None or self._board.begin()

    def end(self) -> None:
        """End the step."""
        if self._board is not None:
            self._board.end()

    def others(self) -> list[Sheet]:
        """What the other runs say."""
        board = self._board
        if board is None:
            return []
        found = board.others()
        for sentence in board.warnings[self._told :]:
            self._warn(sentence)
        self._told = len(board.warnings)
        for sheet in found:
            # Also where the mark was taken out of the environment on the way.
            if not self._above.isdisjoint(sheet.pids):
                self._room.within |= {sheet.run}
        outer = [pid for sheet in found if sheet.run in self._room.within for pid in (sheet.pid, *sheet.pids)]
        self._ignored = self._room.ancestors | frozenset(outer)
        return found

    def write(self, sheet: Callable[[], Sheet]) -> None:
        """Tell the other runs what this one holds."""
        if self._board is not None:
            try:
                self._board.write(sheet())
            except BoardTrouble as trouble:
                self._go_alone(trouble)

    @property
    def unknown(self) -> Collection[int]:
        """PIDs that hold what cannot be read."""
        return self._board.unknown if self._board is not None else ()

    @property
    def by_itself(self) -> bool:
        """Whether no other run is here."""
        return self._board is None or self._board.alone

    def insiders(self) -> list[int]:
        """Other processes that are inside the gates, and for whose end one may wait."""
        return self.turnstiles.inside(self._ignored)

    def shut(self) -> bool:
        """Close the gates, where nobody has; a test that this run is a part of may have done so already."""
        return self.turnstiles.close() or self.turnstiles.closed_by() in self._ignored

    def looked_at(self) -> list[str]:
        """The warnings, after a look whether the folder is still there."""
        if self._board is not None and self._board.removed:
            # Its gates stay those of the processes that have them open; whoever comes later asks the keeper.
            self.gates = ""
            self._go_alone(BoardTrouble(f"{self._board.folder} was removed while they ran"))
        return self.warnings

    def closed_by(self) -> int | None:
        """Process that keeps others out of the gates, if it is none that waits for this run."""
        pid = self.turnstiles.closed_by()
        return None if pid in self._ignored else pid

    def stepping(self) -> str:
        """Who is in the middle of a step at the board."""
        pid = self._board.stepping() if self._board is not None else None
        state = ", which is stopped," if pid and stopped(pid) else ""
        return f"{f'process {pid}' if pid else 'another process'}{state} looks at the leases of this machine"

    def stuck(self, seconds: float) -> str:
        """The sentence for tests that could not be admitted because another process does not end its step."""
        pid = self._board.stepping() if self._board is not None else None
        who = f"process {pid}" if pid else "another process"
        state = ", which is stopped," if pid and stopped(pid) else ""
        return (
            f"The leases of this machine cannot be looked at: {who}{state} has held {self._shared}/mutex for over"
            f" {seconds:.0f} s. Let it go on (`kill -CONT`) or end it; --vram-leases=off runs without them."
        )

    def _go_alone(self, trouble: BoardTrouble) -> None:
        if self._board is not None:
            self._board.end()
            self._board.close()
        self._board = self._shared = None
        self._warn(f"tests wait for each other within this run only, not for other runs on this machine: {trouble}")

    def _warn(self, sentence: str) -> None:
        sentence = printable(sentence)
        self.warnings.append(sentence)
        self._log("note", text=sentence, warning=True)

    def close(self) -> None:
        """Give everything back."""
        self.turnstiles.give_up()
        if self._board is not None:
            self._board.close()
            self._board = None
            self._shared = None
