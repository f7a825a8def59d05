"""The state machine behind :class:`pytest_vram.windows.WindowSpec`; importing this needs Hypothesis."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NoReturn

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pytest_vram.errors import BadInput
from pytest_vram.windows.leaving import Part, Unit, last_said, units
from pytest_vram.windows.protocol import PINNED, Piece, Window, WindowFull

if TYPE_CHECKING:
    from pytest_vram.windows.protocol import Kind
    from pytest_vram.windows.spec import WindowSpec

#: Sizes of pieces are drawn from so many, and scaled to the window.
SIZES = 12
_SHOWN = 40


def run(spec: WindowSpec) -> None:
    """Run the machine on a spec's windows.

    :raises Broken: an invariant does not hold; the message names it and lists the steps.
    """

    class WindowMachine(Conversation):
        @initialize(system=st.integers(1, SIZES), tools=st.integers(0, SIZES))
        def begin(self, system: int, tools: int) -> None:
            self.start(spec)
            with self.told():
                self.take("system", self.scaled(system, self.opening))
                tokens = self.scaled(tools, self.opening // 2) if tools and self.opening > 1 else 0
                if tokens:
                    self.take("tools", tokens)

        @rule(size=st.integers(1, SIZES), user=st.booleans())
        def say(self, size: int, user: bool) -> None:
            with self.told():
                self.take("user" if user else "assistant", self.scaled(size))

        # The later ids repeat, as those of servers that number the calls of each reply anew.
        @rule(size=st.integers(1, SIZES), count=st.integers(1, 3), again=st.booleans())
        def call(self, size: int, count: int, again: bool) -> None:
            calls = tuple(f"c{place if again else self.number + place}" for place in range(count))
            with self.told():
                self.take("call", self.scaled(size), calls=calls)

        @precondition(lambda self: self.awaited())
        @rule(size=st.integers(1, SIZES), which=st.integers(0, 2))
        def answer(self, size: int, which: int) -> None:
            awaited = self.awaited()
            with self.told():
                self.take("result", self.scaled(size), answers=awaited[which % len(awaited)])

        @rule(size=st.integers(1, SIZES))
        def summarise(self, size: int) -> None:
            with self.told():
                self.take("summary", self.scaled(size))

        @rule(over=st.integers(1, 3), user=st.booleans())
        def overflow(self, over: int, user: bool) -> None:
            with self.told():
                self.take("user" if user else "summary", self.window.limit + over)

        @rule(size=st.integers(1, SIZES))
        def orphan(self, size: int) -> None:
            with self.told():
                self.take_orphan(self.scaled(size))

        @rule(share=st.floats(0, 1))
        def evict(self, share: float) -> None:
            with self.told():
                self.evict_to(int(share * self.window.limit))

        @rule()
        def decode(self) -> None:
            with self.told():
                self.check_decoding()

        @invariant()
        def holds(self) -> None:
            if self.began:
                with self.told():
                    self.check()

    run_state_machine_as_test(
        WindowMachine,
        settings=settings(
            max_examples=spec.max_examples,
            stateful_step_count=spec.steps,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=False,
            report_multiple_bugs=False,
            # Conversations of all specs would share their place in the database.
            database=None,
            phases=[Phase.explicit, Phase.generate, *([Phase.shrink] if spec.shrink else [])],
        ),
    )


class Broken(AssertionError):
    """An invariant does not hold; the message is for a person."""


class Conversation(RuleBasedStateMachine):
    """What a conversation asked of a window, and what must hold of it."""

    def __init__(self) -> None:
        super().__init__()
        self.began = False
        self.number = 0
        self.asked: list[str] = []
        self.held: list[Piece] = []
        self.longest = self.opening = 1
        self.first: int | None = None

    def start(self, spec: WindowSpec) -> None:
        self.spec = spec
        made: object = spec.make_window()
        if not isinstance(made, Window):
            raise BadInput(
                f"make_window of {type(spec).__name__} gave a {type(made).__name__}, not a Window: derive your class "
                "from pytest_vram.windows.Window or CachedWindow."
            )
        self.window = made
        self.began = True
        # Some six to ten pieces fill a window, whatever its limit.
        self.longest = spec.longest if spec.longest is not None else max(1, made.limit * 3 // 16)
        self.opening = spec.system if spec.system is not None else max(1, made.limit // 10)

    def scaled(self, size: int, longest: int | None = None) -> int:
        """Tokens of a piece of one of the sizes, of which the last is the longest."""
        return max(1, round(size * (longest or self.longest) / SIZES))

    def teardown(self) -> None:
        if self.began:
            self.window.close()

    def awaited(self) -> tuple[str, ...]:
        """Ids that the last unit's calls wait for; a call that was talked over is no longer answered."""
        last = last_said(units(_parts(self.held)))
        return last.open if last is not None else ()

    def take(self, kind: Kind, size: int, *, calls: tuple[str, ...] = (), answers: str | None = None) -> None:
        """Append a piece of that many tokens."""
        piece = self.piece(kind, size, calls=calls, answers=answers)
        before = self.held
        try:
            self.window.append(piece)
        except WindowFull:
            self.check_refused(piece, before)
            return
        after = self.window.pieces()
        if piece not in after:
            self.broken("order", f"{_named(piece)} was appended and is not held")
        needed = sum(len(one.tokens) for one in (*before, piece)) - self.window.limit
        type(self.spec).pushed_out += len(_without(before, after))
        self.check_left([*before, piece], after, needed, keep=len(before))
        self.held = after

    def piece(self, kind: Kind, size: int, *, calls: tuple[str, ...] = (), answers: str | None = None) -> Piece:
        """A piece that is about to be appended."""
        tokens = tuple((self.number * 31 + place * 7 + 1) % self.spec.vocabulary for place in range(size))
        piece = Piece(number=self.number, kind=kind, tokens=tokens, calls=calls, answers=answers)
        self.number += 1
        self.count(f"append {_named(piece)}")
        return piece

    def take_orphan(self, size: int) -> None:
        """Append a result that no call asked for."""
        piece = self.piece("result", size, answers="nobody")
        try:
            self.window.append(piece)
        except BadInput:
            if self.window.pieces() != self.held:
                self.broken("refused", f"{_named(piece)} was refused, and the pieces held have changed")
            return
        self.broken("calls", f"{_named(piece)} was taken in, and no call asked for it")

    def evict_to(self, to: int) -> None:
        """Evict, twice."""
        self.count(f"evict to {to} tokens")
        before = self.held
        gone = self.window.evict(to)
        after = self.window.pieces()
        said = sorted(piece.number for piece in gone)
        if said != sorted(piece.number for piece in _without(before, after)):
            self.broken("order", f"evict({to}) says that {said} left, which is not what is missing")
        self.check_left(before, after, sum(len(one.tokens) for one in before) - to, keep=None)
        self.held = after
        cells = self.window.cells()
        again = self.window.evict(to)
        if again or self.window.pieces() != after or self.window.cells() != cells:
            self.broken("twice", f"evict({to}) a second time took out {[_named(one) for one in again] or 'cells'}")
        self.check()
        self.check_decoding()

    def check(self) -> None:
        """What holds at any time."""
        window = self.window
        tokens, pieces = window.tokens(), window.pieces()
        if len(tokens) > window.limit:
            self.broken("limit", f"{len(tokens)} tokens are held, the limit is {window.limit}")
        if pieces != self.held:
            self.broken("order", "the pieces held are not those after the last step")
        expected = [token for piece in pieces for token in piece.tokens]
        if tokens != expected:
            self.broken(
                "tokens",
                f"{len(tokens)} tokens are listed, the pieces have {len(expected)}: {_differ(tokens, expected)}",
            )
        self.check_cells(tokens)
        size, formula = window.bytes(), window.expected_bytes()
        if size is not None and formula is not None and size != formula:
            self.broken("bytes", f"the cells of {len(tokens)} tokens take {size} bytes, the formula says {formula}")

    def check_cells(self, tokens: list[int]) -> None:
        cells = self.window.cells()
        if cells is None:
            return
        positions = [cell.position for cell in cells]
        if positions and positions != list(range(positions[0], positions[0] + len(positions))):
            self.broken("positions", f"the cache has positions {_ranges(positions)}")
        if positions:
            self.first = positions[0] if self.first is None else self.first
            if positions[0] != self.first or positions[0] < 0:
                self.broken("positions", f"the cache has positions {_ranges(positions)}, they began at {self.first}")
        if len(cells) != len(tokens):
            self.broken("cells", f"the cache has {len(cells)} cells, the token list {len(tokens)} tokens")
        shown = [token if cell.token is None else cell.token for cell, token in zip(cells, tokens, strict=True)]
        if shown != tokens:
            self.broken("cells", f"the cells hold other tokens than the list: {_differ(shown, tokens)}")

    def check_left(self, before: list[Piece], after: list[Piece], needed: int, *, keep: int | None) -> None:
        """What left must have been allowed to, in order, and no more than frees ``needed`` tokens."""
        gone = {piece.number for piece in _without(before, after)}
        if after != [piece for piece in before if piece.number not in gone]:
            self.broken("order", "the pieces that are left are not those of before, in their order")
        found = units(_parts(before))
        last = last_said(found)
        for unit in found:
            members = [before[place] for place in unit.members]
            if unit.pinned and any(piece.number in gone for piece in members):
                self.broken("pinned", f"{_names(members)} left")
            left = [piece for piece in members if piece.number in gone]
            if left and len(left) < len(members):
                stay = [piece for piece in members if piece.number not in gone]
                self.broken("calls", f"{_names(left)} left without {_names(stay)}")
            if left and unit is last and unit.open:
                self.broken("calls", f"{_names(left)} left while results of {', '.join(unit.open)} were awaited")
        free = [unit for unit in found if not _stays(unit, last, keep)]
        # A summary that another has replaced may leave at once or in its turn.
        freed = 0
        passed: Unit | None = None
        for unit in free:
            members = [before[place] for place in unit.members]
            if members[0].kind == "summary":
                freed += sum(len(piece.tokens) for piece in members if piece.number in gone)
                continue
            if members[0].number not in gone:
                passed = passed or unit
                continue
            if passed is not None:
                given_up = (
                    f"; its call of {', '.join(passed.open)} is no longer awaited, since the conversation went on"
                    if passed.open
                    else ""
                )
                older = _named(before[passed.members[0]])
                self.broken("oldest", f"{_names(members)} left before {older}, which is older{given_up}")
            if freed >= needed and not self.spec.may_leave_more:
                self.broken("oldest", f"{_names(members)} left although {max(needed, 0)} tokens were already freed")
            freed += sum(len(piece.tokens) for piece in members)
        if keep is None and passed is not None and freed < needed:
            self.broken(
                "oldest",
                f"{_named(before[passed.members[0]])} stayed although {needed - freed} more tokens had to leave",
            )

    def check_refused(self, piece: Piece, before: list[Piece]) -> None:
        pieces = [*before, piece]
        found = units(_parts(pieces))
        last = last_said(found)
        stay = sum(
            len(pieces[place].tokens) for unit in found if _stays(unit, last, len(before)) for place in unit.members
        )
        if stay <= self.window.limit:
            self.broken("refused", f"{_named(piece)} was refused, but with what must stay it takes {stay} tokens")
        if self.window.pieces() != before:
            self.broken("refused", f"{_named(piece)} was refused, and the pieces held have changed")

    def check_decoding(self) -> None:
        """Scores of the next token, by the window and by a fresh run."""
        if not self.window.tokens():
            return
        logits = self.window.logits()
        if logits is None:
            return
        if not logits or not all(map(math.isfinite, logits)):
            self.broken(
                "decoding", f"of {len(logits)} scores, {sum(not math.isfinite(one) for one in logits)} are not finite"
            )
        fresh = self.window.fresh_logits()
        if fresh is None:
            return
        if len(fresh) != len(logits):
            self.broken("decoding", f"there are {len(logits)} scores, from a fresh run {len(fresh)}")
        apart = max(abs(one - other) for one, other in zip(logits, fresh, strict=True))
        if not apart <= self.spec.tolerance:
            self.broken("decoding", f"scores are up to {apart:.3g} from those of a fresh run on the same tokens")

    def count(self, step: str) -> None:
        self.asked.append(step)
        type(self.spec).steps_done += 1

    def told(self) -> _Told:
        """What the window raises inside of this has the steps that led to it."""
        return _Told(self)

    def steps(self) -> str:
        first = max(0, len(self.asked) - _SHOWN)
        steps = "\n".join(f"  {place + 1:3}. {step}" for place, step in enumerate(self.asked) if place >= first)
        earlier = f"  ({first} earlier)\n" if first else ""
        return f"steps:\n{earlier}{steps}"

    def broken(self, name: str, text: str) -> NoReturn:
        from pytest_vram.windows.spec import INVARIANTS

        raise Broken(f'invariant "{name}" is broken ({INVARIANTS[name]}): {text}\n{self.steps()}')


class _Told:
    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, frames: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, Broken):
            error.add_note(f"raised by the window; {self._conversation.steps()}")


def _stays(unit: Unit, last: Unit | None, keep: int | None) -> bool:
    return unit.pinned or (unit is last and bool(unit.open)) or (keep is not None and keep in unit.members)


def _parts(pieces: list[Piece]) -> list[Part]:
    summary = max((place for place, piece in enumerate(pieces) if piece.kind == "summary"), default=-1)
    return [
        Part(
            pinned=piece.kind in ("system", "tools") or place == summary,
            calls=piece.calls,
            answers=piece.answers,
            aside=piece.kind in PINNED,
        )
        for place, piece in enumerate(pieces)
    ]


def _without(before: list[Piece], after: list[Piece]) -> list[Piece]:
    numbers = {piece.number for piece in after}
    return [piece for piece in before if piece.number not in numbers]


def _named(piece: Piece) -> str:
    about = f" asking for {', '.join(piece.calls)}" if piece.calls else f" of {piece.answers}" if piece.answers else ""
    plural = "" if len(piece.tokens) == 1 else "s"
    return f"{piece.kind} {piece.number}{about} ({len(piece.tokens)} token{plural})"


def _names(pieces: list[Piece]) -> str:
    return " and ".join(_named(piece) for piece in pieces)


def _differ(found: list[int], expected: list[int]) -> str:
    place = next((place for place, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
    if place is None:
        return f"alike up to place {min(len(found), len(expected))}"
    return f"at place {place} stands {found[place]}, not {expected[place]}"


def _ranges(positions: list[int]) -> str:
    """``0-5, 12-20`` for positions in the order that they have in the cache."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][1] + 1 == position:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)
