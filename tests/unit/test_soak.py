"""The soak: amounts, what stops it, and what is left when it is stopped."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pytest_vram.errors import RequestFailed
from pytest_vram.readings import Unmeasurable
from pytest_vram.report.soaks import document, lines
from pytest_vram.sessions import soak_journal
from pytest_vram.sessions.soak import Began, Soak
from pytest_vram.sessions.soak_gates import Gates, judge
from pytest_vram.sessions.soak_series import Series
from pytest_vram.sessions.turns import Turn
from pytest_vram.spec import Amount, Limits
from pytest_vram.units import MIB
from tests.unit.soak_kit import PERIOD, ManualClock, ScriptedTalker, a_turn, reading, soaking, turns


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of waits for the disk prove nothing here; that each turn waits for it is a test of its own."""
    monkeypatch.setattr(soak_journal.os, "fsync", lambda fd: None)


def ended(soak: Soak) -> tuple[str, str]:
    """Reason and verdict of a soak that is run to its end."""
    end = soak.run()
    soak.journal.close()
    return end.reason, soak.verdict(end).outcome


def gate(soak: Soak, name: str) -> tuple[str, str]:
    """Outcome and sentence of one gate, of the turns so far."""
    found = soak.verdict(soak.run())
    soak.journal.close()
    return next((one.outcome, one.text) for one in found.gates if one.name == name)


def test_a_quiet_server_passes_and_a_leaking_one_fails_early(tmp_path: Path) -> None:
    """300 turns of a flat series hold every gate; 2 MiB a turn are seen long before the end."""
    assert ended(soaking(tmp_path / "quiet", ScriptedTalker(), turns(300))) == ("amount", "passed")
    talker = ScriptedTalker(lambda number: a_turn(number, leak=2))
    soak = soaking(tmp_path / "leaking", talker, turns(300))
    assert ended(soak) == ("leak", "failed")
    assert 120 <= len(talker.asked) < 200
    again = ScriptedTalker()
    assert ended(soaking(tmp_path / "leaking", again, turns(300))) == ("leak", "failed")
    assert again.asked == []  # what was found is not drawn again


def test_few_turns_decide_nothing(tmp_path: Path) -> None:
    """Below 120 turns no trend is judged, however flat it looks, and a leak is not called one."""
    assert ended(soaking(tmp_path / "a", ScriptedTalker(), turns(60))) == ("amount", "inconclusive")
    leaking = ScriptedTalker(lambda number: a_turn(number, leak=8))
    assert ended(soaking(tmp_path / "b", leaking, turns(60))) == ("amount", "inconclusive")


def test_a_peak_over_the_limit_stops_at_its_turn(tmp_path: Path) -> None:
    """The turn is committed, and no other is asked."""
    gates = Gates(limit=Limits(text="1GiB", each=1 << 30), limit_from="--vram-budget")
    talker = ScriptedTalker(
        lambda number: a_turn(number, **({"peak": {"gpu0": reading(1100 * MIB)}} if number == 9 else {}))
    )
    soak = soaking(tmp_path, talker, turns(300), gates=gates)
    end = soak.run()
    soak.journal.close()
    verdict = soak.verdict(end)
    assert (end.reason, verdict.outcome, talker.asked[-1]) == ("budget", "failed", 9)
    assert "the peak of gpu0 was 1,100 MiB at turn 9, over 1GiB" in verdict.text


def test_an_interval_that_reaches_over_the_limit_decides_nothing(tmp_path: Path) -> None:
    """The lower end is within it: neither a failure nor a pass."""
    high = {"peak": {"gpu0": reading(900 * MIB, upper=3 << 30)}}
    soak = soaking(tmp_path, ScriptedTalker(lambda number: a_turn(number, **high)), turns(150))
    assert ended(soak) == ("amount", "inconclusive")


def test_what_was_not_measured_never_passes(tmp_path: Path) -> None:
    """A turn without a peak leaves the budget open, and so does a device that was never read."""
    hole: dict[str, Any] = {"peak": {"gpu0": Unmeasurable(reason="the driver was away")}}
    soak = soaking(tmp_path / "a", ScriptedTalker(lambda n: a_turn(n, **(hole if n == 50 else {}))), turns(150))
    outcome, text = gate(soak, "peak")
    assert outcome == "inconclusive"
    assert "the driver was away" in text
    soak = soaking(tmp_path / "b", ScriptedTalker(lambda n: a_turn(n, peak={}, idle={})), turns(150))
    assert ended(soak) == ("amount", "inconclusive")


def test_hours_count_what_was_soaked_and_not_what_lay_between(tmp_path: Path) -> None:
    """Turns take two seconds here: ten minutes are 300, over two processes with a night between them."""
    clock = ManualClock()
    amount = Amount(text="10m", seconds=600)

    def stop(number: int) -> None:
        if number == 101:
            raise KeyboardInterrupt

    first = ScriptedTalker(clock=clock, before=stop)
    soak = soaking(tmp_path, first, amount, clock=clock)
    assert soak.run().reason == "interrupted"
    soak.journal.close()
    clock.now += 30_000
    second = ScriptedTalker(clock=clock)
    assert ended(soaking(tmp_path, second, amount, clock=clock)) == ("amount", "passed")
    assert first.asked + second.asked == list(range(1, 301))


def test_a_server_that_dies_begins_a_segment_and_the_turn_is_asked_again(tmp_path: Path) -> None:
    """It is never a pass, since nobody knows why it died; out of memory is a failure."""
    talker = ScriptedTalker(dies=(70, 130))
    soak = soaking(tmp_path / "a", talker, turns(300))
    assert ended(soak) == ("amount", "inconclusive")
    assert talker.asked == list(range(1, 301))
    assert talker.begun == [(1, 1), (70, 2), (130, 3)]
    assert list(soak.series.segments) == [69, 129]
    assert ended(soaking(tmp_path / "b", ScriptedTalker(always=(5,)), turns(300))) == ("server", "inconclusive")
    dead = ScriptedTalker(dies=(70,), memory=True)
    assert ended(soaking(tmp_path / "c", dead, turns(300))) == ("server", "failed")


def test_speed_that_collapses_stops_and_speed_that_fades_fails(tmp_path: Path) -> None:
    """Compared phase by phase, since longer prompts decode more slowly in every cycle."""
    collapsed = ScriptedTalker(lambda number: a_turn(number, rate=30 if number < 200 else 9))
    assert ended(soaking(tmp_path / "a", collapsed, turns(600))) == ("throughput", "failed")
    fading = ScriptedTalker(lambda number: a_turn(number, rate=30 - number / 30))
    assert ended(soaking(tmp_path / "b", fading, turns(300))) == ("amount", "failed")
    steady = ScriptedTalker(lambda number: a_turn(number, rate=30 if number > 8 else 5))
    assert ended(soaking(tmp_path / "c", steady, turns(300))) == ("amount", "passed")


def test_a_rate_that_wanders_with_the_machine_is_no_loss_of_throughput(tmp_path: Path) -> None:
    """Noise that lasts for many turns, and no trend: of fifty such soaks hardly one fails, and a fade still does."""
    found: Counter[str] = Counter()
    for seed in range(50):
        chance, state, wander = random.Random(seed), 0.0, []
        for _ in range(150):
            state = 0.9 * state + chance.gauss(0, 0.2 * math.sqrt(1 - 0.81))
            wander.append(30 * math.exp(state))
        series = Series(period=PERIOD)
        for number, rate in enumerate(wander, start=1):
            series.add(a_turn(number, rate=rate), 2.0 * number)
        found[next(one.outcome for one in judge(series, Gates(), []).gates if one.name == "throughput")] += 1
    assert found["failed"] <= 1, found
    assert found["inconclusive"] > 10, found
    noisy = random.Random(1)
    fading = ScriptedTalker(lambda number: a_turn(number, rate=(30 - number / 20) * math.exp(noisy.gauss(0, 0.05))))
    outcome, text = gate(soaking(tmp_path, fading, turns(300)), "throughput")
    assert outcome == "failed"
    assert "98 % between" in text


def test_turns_without_an_answer_are_counted_beside_losses_and_shown(tmp_path: Path) -> None:
    """A warm-up that fails is called one; a turn that failed is in the table, and counts no call."""

    def failing(number: int) -> Turn:
        broken = {"result": "error", "error": "timed out", "calls": 1, "calls_right": 0, "kinds": ["no_call"]}
        return a_turn(number, **(broken if number in (40, 60) else {}))

    class Cold(ScriptedTalker):
        def begin(self, number: int, segment: int) -> Began:
            if not self.tried:
                self.tried = True
                raise RequestFailed("no answer within 30 s")
            return super().begin(number, segment)

        tried = False

    said: list[str] = []
    soak = soaking(tmp_path, Cold(failing), turns(130), told=said.append)
    outcome, text = gate(soak, "answers")
    assert outcome == "inconclusive"
    assert "2 of 130 turns have no answer besides" in text
    assert "once, first in the warm-up before turn 1: no answer within 30 s" in text
    assert said[:2] == [
        "warming up with the longest prompt before turn 1",
        "the warm-up before turn 1: no answer within 30 s",
    ]
    assert {40, 60} <= {turn.number for turn in soak.series.table()}
    assert not soak.series.kinds
    assert gate(soak, "tool calls")[1].startswith("128 of 128 tool calls right")


def test_answers_with_nothing_in_them_are_none(tmp_path: Path) -> None:
    """One in a hundred is let pass; more are open, though every request was answered and all else holds."""

    def emptied(every: int) -> ScriptedTalker:
        why = "the answer has neither text nor a call"
        return ScriptedTalker(lambda number: a_turn(number, **({} if number % every else {"nothing": why})))

    soak = soaking(tmp_path / "few", emptied(150), turns(150))
    outcome, text = gate(soak, "answers")
    assert (outcome, text) == ("passed", "149 of 150 turns were answered")
    assert 150 in {turn.number for turn in soak.series.table()}
    soak = soaking(tmp_path / "many", emptied(50), turns(150))
    assert ended(soak) == ("amount", "inconclusive")
    verdict = judge(soak.series, soak.gates, [])
    assert verdict.text.startswith(
        "after 150 turns: 3 of 150 turns have an answer that is empty or that nobody could read, the first"
    )
    assert [one.name for one in verdict.gates if one.outcome not in ("passed", "not judged")] == ["answers"]
    assert soak.series.unanswered[0].number == 50


@pytest.mark.parametrize(
    "fields",
    [{"result": "error", "error": "no answer within 300 s"}, {"nothing": "HTTP 500: the output was not parsed"}],
)
def test_a_server_that_answers_no_more_is_not_asked_for_a_night(tmp_path: Path, fields: dict[str, Any]) -> None:
    """Five turns in a row end the soak, four do not; it can go on, and asks no turn twice."""
    said: list[str] = []
    hung = ScriptedTalker(lambda number: a_turn(number, **(fields if number > 20 or 5 <= number < 9 else {})))
    soak = soaking(tmp_path, hung, turns(150), told=said.append)
    end = soak.run()
    soak.journal.close()
    assert (end.reason, hung.asked[-1]) == ("silent", 25)
    verdict = soak.verdict(end)
    assert (verdict.outcome, verdict.text) == ("inconclusive", end.text)
    assert end.text.startswith("no turn was answered any more, after 25 turns and ")
    again = ScriptedTalker()
    assert ended(soaking(tmp_path, again, turns(150))) == ("amount", "inconclusive")
    assert again.asked == list(range(26, 151))


def test_a_journal_that_is_removed_stops_the_soak(tmp_path: Path) -> None:
    """What is written to a removed file is lost: the soak does not go on for a night without one."""
    for name in ("removed", "moved"):
        folder = tmp_path / name

        def away(number: int, folder: Path = folder) -> None:
            if number == 50 and folder.name == "removed":
                (folder / "soak.jsonl").unlink()
            elif number == 50:
                folder.rename(tmp_path / "elsewhere")

        talker = ScriptedTalker(before=away)
        soak = soaking(folder, talker, turns(150))
        end = soak.run()
        soak.journal.close()
        assert end.reason == "disk"
        assert "soak.jsonl was removed, moved or replaced while the soak ran" in end.text
        assert soak.verdict(end).outcome == "inconclusive"
        assert talker.asked[-1] == 50
    assert soak_journal.read(tmp_path / "elsewhere").turns == 49


def test_only_a_pass_says_what_a_pass_does_not_prove(tmp_path: Path) -> None:
    """The report of one does, in its last lines; one that is open has no pass to speak of."""
    for name, count, outcome in (("a", 130, "PASSED"), ("b", 20, "INCONCLUSIVE")):
        soak = soaking(tmp_path / name, ScriptedTalker(), turns(count))
        end = soak.run()
        soak.journal.close()
        said = lines(document(soak.journal, soak.series, soak.verdict(end), end, amount=soak.amount.text))
        assert said[0].startswith(f"soak nightly: {outcome}")
        assert any(line.startswith("A pass holds for these conversations") for line in said) == (outcome == "PASSED")
        # But for the name of the folder, which is as long as it is.
        assert max(len(line) for line in said if str(tmp_path) not in line) <= 80


def test_tool_calls_are_judged_by_turn_and_by_fill(tmp_path: Path) -> None:
    """A rate that falls with the turns or with the context fails, though the whole is above the target."""
    gates = Gates(accuracy=0.8)
    late = ScriptedTalker(lambda n: a_turn(n, calls_right=int(n <= 240 or n % 2 == 0)))
    outcome, text = gate(soaking(tmp_path / "a", late, turns(300), gates=gates), "tool calls")
    assert outcome == "failed"
    assert "in turns 226-300" in text
    full = ScriptedTalker(
        lambda n: a_turn(n, context=4000 if n % 6 == 0 else 400, calls_right=int(n % 6 > 0 or n % 12 == 0))
    )
    outcome, text = gate(soaking(tmp_path / "b", full, turns(300), gates=gates), "tool calls")
    assert outcome == "failed"
    assert "context 75-100 %" in text
    assert gate(soaking(tmp_path / "c", ScriptedTalker(), turns(130), gates=gates), "tool calls")[0] == "passed"


def test_a_prompt_cache_below_its_cap_is_named_and_is_no_leak(tmp_path: Path) -> None:
    """Host memory that fills llama.cpp's cache is not called a leak; beyond the cap it is."""

    def filling(number: int) -> Turn:
        layers = {
            "process": reading(900 * MIB),
            "host": reading((500 + 2 * number) * MIB, source="host-anon", device="host"),
        }
        return a_turn(number, layers=layers)

    capped = Gates(caps={"prompt-cache": 8 << 30})
    outcome, text = gate(soaking(tmp_path / "a", ScriptedTalker(filling), turns(240), gates=capped), "host memory")
    assert outcome != "failed"
    assert "prompt cache" in text
    beyond = Gates(caps={"prompt-cache": 100 * MIB})
    assert (
        gate(soaking(tmp_path / "b", ScriptedTalker(filling), turns(240), gates=beyond), "host memory")[0] == "failed"
    )


def test_a_context_that_is_cut_fails(tmp_path: Path) -> None:
    """What was asked for is served at every turn, or the soak does not pass."""
    cut = ScriptedTalker(lambda number: a_turn(number, context_size=2048 if number > 100 else 4096))
    outcome, text = gate(soaking(tmp_path / "a", cut, turns(150)), "context")
    assert (outcome, "50 turns" in text) == ("failed", True)
    silent = ScriptedTalker(lambda number: a_turn(number, context_size=None))
    assert gate(soaking(tmp_path / "b", silent, turns(150)), "context")[0] == "inconclusive"


def test_a_full_disk_stops_the_soak_and_keeps_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the turn that found no room is left, and with room the soak goes on behind the last one."""
    room = [40_000]
    write = os.write

    def full(fd: int, data: bytes) -> int:
        if room[0] <= 0:
            raise OSError(28, "No space left on device")
        done = write(fd, bytes(data)[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(soak_journal.os, "write", full)
    talker = ScriptedTalker()
    assert ended(soaking(tmp_path, talker, turns(150))) == ("disk", "inconclusive")
    monkeypatch.undo()
    found = soak_journal.read(tmp_path)
    assert (found.torn, found.turns) == (0, len(talker.asked) - 1)
    again = ScriptedTalker()
    assert ended(soaking(tmp_path, again, turns(150))) == ("amount", "passed")
    assert again.asked == list(range(found.turns + 1, 151))
    assert room[0] <= 0


def test_a_full_disk_is_no_pass_however_many_turns_it_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 flat turns of 300 are not what was asked for."""

    def waits(fd: int) -> None:
        if len(talker.asked) > 200:
            raise OSError(28, "No space left on device")

    talker = ScriptedTalker()
    monkeypatch.setattr(soak_journal.os, "fsync", waits)
    soak = soaking(tmp_path, talker, turns(300))
    assert ended(soak) == ("disk", "inconclusive")
    assert soak.series.turns == 200


def test_the_line_of_a_turn_has_what_a_person_watches(tmp_path: Path) -> None:
    """Turn of how many, memory, what is left of the budget, slope with its interval, time to the end."""
    lines: list[str] = []
    clock = ManualClock()
    soak = soaking(tmp_path, ScriptedTalker(clock=clock), turns(150), told=lines.append, clock=clock)
    soak.run()
    soak.journal.close()
    last = lines[-2]
    for part in (
        "turn=149/150",
        "peak_gpu0=",
        "idle_gpu0=",
        "left_gpu0=",
        "slope=",
        "MiB/turn",
        "calls=149/149",
        "eta=2s",
    ):
        assert part in last, (part, last)
