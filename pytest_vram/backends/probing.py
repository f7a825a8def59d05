"""A probe of a running backend: what it takes beyond its boot once it serves.

An engine warms up with a token or two, so a boot proves little about requests. The probe sends what makes a deployment
grow: short prompts (the first requests of all), a prompt of more than one full ubatch, one that nearly fills the
context, several requests at once, an image where a projector is loaded; then it lets the server rest. Memory is read
before, within and after each step by the keeper, of the backend alone.
"""

from __future__ import annotations

import base64
import functools
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from pytest_vram.backends import engine as engine_named
from pytest_vram.backends import lengths
from pytest_vram.backends.growth import HOST, Growth, Outcome, Step, growth_of, risen
from pytest_vram.backends.record import RequestRecord
from pytest_vram.backends.turns import ask
from pytest_vram.bootlog.boot import Boot
from pytest_vram.bootlog.serving import caches_of
from pytest_vram.errors import BackendError, BadInput, KeeperError, RequestFailed, RequestTimeout
from pytest_vram.keeper.messages import Close, Closed, Figures, Now, Open, Opened
from pytest_vram.readings import Measured

if TYPE_CHECKING:
    from pytest_vram.backends.pool import Pool, RunningBackend
    from pytest_vram.backends.reply import Reply

#: Tokens of the context that stay free for the answer, and for openings that a tokenizer cuts in its own way.
ROOM = 32
#: What an engine evaluates at once where neither its log nor the spec says: llama.cpp's default.
UBATCH = 512
#: Attention makes a token of a long prompt dearer than one of a short prompt.
SLOWER = 0.7
#: Tokens of each answer.
ANSWER = 8
#: Most requests at once.
MOST_AT_ONCE = 64
#: Shares of the time that is left: for the near-full prompt, and for each round of several requests.
_SHARE = 0.4
#: Seconds that each request may take beyond what its prompt was reckoned to.
_PATIENCE = 30.0
_LEAST_SECONDS = 1.0
#: Tokens of context below which the first prompts are short ones: of some tokenizers a word is five.
_SMALL = 1024
_EDGE = 128
PHASE = "serving"


class _Gone(Exception):
    """The step did not end as it should. :ivar outcome: how. :ivar error: what said so."""

    def __init__(self, outcome: Outcome, error: BaseException) -> None:
        super().__init__(str(error))
        self.outcome: Outcome = outcome
        self.error = error


class Probe:
    """One probe, from the first prompt to the rest at the end.

    :param at_once: how many requests to send at once, one round for each number; ``None``: as many as it has slots.
    :param seconds: of the whole probe; what does not fit into them is sent shorter, or not at all, and said.
    :param settle: seconds that memory may take to come to rest after each step.
    """

    def __init__(
        self,
        backend: RunningBackend,
        pool: Pool,
        *,
        at_once: Sequence[int] | None = None,
        seconds: float = 120.0,
        settle: float = 2.0,
    ) -> None:
        _check(at_once, seconds, settle)
        self._backend = backend
        self._pool = pool
        self._at_once = at_once
        self._settle = settle
        self._deadline = time.monotonic() + seconds
        self._window = pool.window()
        self._steps: list[Step] = []
        self._size: lengths.Lengths | None = None
        self._rate: float | None = None
        self._openings = iter(range(10, 10**9))
        self._ended = ""

    def run(self) -> Growth:
        """Take every step; what goes wrong in one is its outcome.

        :raises KeeperError: the keeper is lost, so that nothing can be measured any more.
        """
        before = self._backend.boot
        cached = self._caches()
        self._take("short prompts", self._short_prompts)
        self._take("full ubatch", self._full_ubatch)
        self._take("near-full context", self._near_full)
        for count in self._rounds():
            self._take(f"{count} in flight", functools.partial(self._together, count))
        self._take("image", self._image, missing=self._why_no_image())
        self._take("idle", lambda: Step(name="", outcome="served"))
        return growth_of(
            self._steps,
            self._at_ready(),
            before.entries,
            cached=cached,
            unmeasured=self._why_unmeasured(),
        )

    # ------------------------------------------------------------ steps

    def _short_prompts(self) -> Step:
        """The first requests: they also tell how many tokens a word has."""
        records: list[RequestRecord] = []

        def count(words: int) -> int:
            reply = self._chat(lengths.text(words, self._opening()))
            records.append(reply.record)
            if reply.tokens_in is None:
                raise ValueError("the server answered without the number of prompt tokens in `usage`")
            return reply.tokens_in

        try:
            self._size = lengths.measured(count, small=(self._context() or _SMALL) < _SMALL)
        except ValueError as error:  # they were answered, and longer prompts cannot be made to measure
            return msgspec.structs.replace(_served(records), reason=str(error))
        return _served(records)

    def _full_ubatch(self) -> Step:
        wanted = self._ubatch() + 16
        context = self._context()
        if context is not None and wanted > context - ROOM:
            step = self._prompt(context - ROOM)
            reason = f"a context of {context:,} tokens has no room for a ubatch of {wanted - 16:,}"
            return msgspec.structs.replace(step, outcome="shortened", reason=reason, wanted=wanted)
        return self._prompt(wanted)

    def _near_full(self) -> Step:
        context = self._context()
        if context is None:
            return _not_here("neither the server nor its log says how long its context is")
        if self._size is not None and context - ROOM < self._size.tokens_of(1):
            return _not_here(f"a context of {context:,} tokens has no room for a prompt")
        return self._limited(context - ROOM, 1)

    def _together(self, count: int) -> Step:
        """So many requests at once, each with as long a prompt as its share of the context and of the time allows."""
        context = self._context()
        if context is None:
            return self._limited(self._ubatch(), count)
        share = context if self._total() is None else min(context, (self._total() or 0) // count)
        if self._size is not None and share - ROOM < self._size.tokens_of(1):
            return _not_here(f"{count} requests at once would have {share:,} tokens of context each")
        return self._limited(share - ROOM, count)

    def _limited(self, wanted: int, count: int) -> Step:
        """``count`` prompts of ``wanted`` tokens, or of as many as there is time for."""
        tokens, reason = wanted, ""
        if self._rate is not None:
            # A machine may be slower in a moment than it was: no request is planned to use up its whole time.
            seconds = min(max(0.0, self._left()) * _SHARE, self._backend.target.timeout * _SHARE)
            reach = int(self._rate * SLOWER * seconds / count)
            if reach < wanted and wanted > self._ubatch():
                tokens = max(reach, min(wanted, self._ubatch()))  # what was evaluated already, it can take again
                reason = (
                    f"{count} prompt{'' if count == 1 else 's'} of {wanted:,} tokens would take about"
                    f" {wanted * count / (self._rate * SLOWER):.0f} s here, and there were {seconds:.0f} s for it"
                )
        step = self._prompt(tokens, count)
        if reason and step.outcome == "served":
            return msgspec.structs.replace(step, outcome="shortened", reason=reason, wanted=wanted)
        return step

    def _prompt(self, tokens: int, count: int = 1) -> Step:
        size = self._size
        if size is None:
            return _not_here("how many tokens a word has is not known, since the server does not count prompt tokens")
        texts = [lengths.text(size.words_for(tokens), self._opening()) for _ in range(count)]
        records = self._send([functools.partial(self._chat, text) for text in texts])
        step = msgspec.structs.replace(_served(records), wanted=tokens)
        if count == 1:
            record = records[0]
            read = sum(step.tokens)
            self._rate = record.prompt_tokens_per_second or read / max(record.latency, 1e-3)
        return step

    def _image(self) -> Step:
        content = [
            {"type": "text", "text": "What is this?"},
            {"type": "image_url", "image_url": {"url": data_uri(png(_EDGE, _EDGE))}},
        ]
        return _served([self._chat([{"role": "user", "content": content}]).record])

    # ------------------------------------------------------------ one step

    def _take(self, name: str, act: Callable[[], Step], *, missing: str = "") -> None:
        """Take a step. :param missing: what there would have to be for it, where that is not here."""
        resting = name == "idle"
        if missing:
            self._steps.append(Step(name=name, outcome="skipped", reason=missing))
            return
        if not resting and (self._ended or self._left() < _LEAST_SECONDS):
            outcome: Outcome = "skipped" if self._ended else "no_time"
            reason = self._ended or "the time of the probe was used up by the steps before"
            self._steps.append(Step(name=name, outcome=outcome, reason=reason))
            return
        began = time.monotonic()
        before = self._now(0.0)
        failed_before = self._backend.boot.failure
        window = self._open(name)
        boot: Boot | None = None
        try:
            step = act()
        except _Gone as gone:
            boot = self._backend.read_boot()
            step = self._broken(gone, boot, boot.failure != failed_before)
        finally:
            closed = self._close(window)
        after = self._now(self._settle)
        if step.outcome == "skipped":
            self._steps.append(msgspec.structs.replace(step, name=name))
            return
        peak, base = _with_host(closed.backend, closed.host), dict(closed.baseline_backend)
        gone_now = step.outcome in ("died", "out_of_memory") and not self._alive()
        if gone_now:
            self._ended = f"the server ended in step {name!r}"
        idle = {} if gone_now else after[0]
        self._steps.append(
            msgspec.structs.replace(
                step,
                name=name,
                before=before[0],
                base=base,
                peak=peak,
                after=idle,
                growth=risen(idle, before[0]),
                transient=risen({label: figure for label, figure in peak.items() if label in base}, base),
                settled=after[1],
                prompt_cache=self._caches() or None,
                seconds=round(time.monotonic() - began, 3),
            )
        )

    def _broken(self, gone: _Gone, boot: Boot, new: bool) -> Step:
        failure = boot.failure if new else None
        outcome = gone.outcome
        if failure is not None and failure.kind == "out_of_memory":
            outcome = "out_of_memory"
        reason = str(gone.error).split("\n", 1)[0][:400]
        return Step(name="", outcome=outcome, reason=reason, failure=failure, requests=1)

    def _chat(self, messages: Any) -> Reply:
        """One request.

        :raises _Gone: it was not served.
        """
        timeout = min(self._backend.target.timeout, max(self._left(), 0.0) + _PATIENCE)
        target = msgspec.structs.replace(self._backend.target, timeout=timeout)
        client = self._pool.client_of(target, self._backend, serial=False)
        return _asked(lambda: client.chat(messages, max_tokens=ANSWER, temperature=0))

    @staticmethod
    def _send(calls: Sequence[Callable[[], Reply]]) -> list[RequestRecord]:
        """Make these calls at the same moment.

        :raises _Gone: of the first of them that was not served.
        """
        if len(calls) == 1:
            return [calls[0]().record]
        records: list[RequestRecord] = []
        failures: list[BaseException] = []
        together = threading.Barrier(len(calls))

        def go(call: Callable[[], Reply]) -> None:
            try:
                together.wait(_PATIENCE)
                records.append(call().record)
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits for it
                failures.append(error)

        # Daemons: whoever interrupts the probe ends the server, and with it these.
        threads = [threading.Thread(target=go, args=(call,), daemon=True) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
        if failures:
            raise failures[0]
        return records

    # ------------------------------------------------------------ what is known of the server

    def _opening(self) -> str:
        """A number of its own for each prompt, so that nothing of an earlier one is used again."""
        return str(next(self._openings))

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _alive(self) -> bool:
        return self._pool.fate(self._backend.key) is None

    def _ubatch(self) -> int:
        for value in (self._backend.boot.facts.get("ubatch"), self._backend.asked.get("ubatch")):
            if isinstance(value, int) and value > 0:
                return value
        return UBATCH

    def _context(self) -> int | None:
        """Tokens that one request may have, as the server says, else its log, else the spec."""
        facts, asked = self._backend.boot.facts, self._backend.asked
        said = self._properties().context_per_slot
        slots = self._slots()
        shared = facts.get("kv_unified") is True
        wanted = asked.get("context")
        share = wanted // (1 if shared or not slots else slots) if isinstance(wanted, int) else None
        for value in (said, facts.get("context_per_slot"), share):
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def _total(self) -> int | None:
        value = self._backend.boot.facts.get("context")
        return value if isinstance(value, int) and value > 0 else None

    def _slots(self) -> int | None:
        facts, asked = self._backend.boot.facts, self._backend.asked
        for value in (self._properties().slots, facts.get("slots"), asked.get("slots")):
            if isinstance(value, int) and value > 0:
                return value
        return None

    def _rounds(self) -> list[int]:
        if self._at_once is not None:
            return list(self._at_once)
        slots = self._slots() or 1
        # One slot serves one request after the other: the near-full prompt has shown what that takes.
        return [min(slots, MOST_AT_ONCE)] if slots > 1 else []

    def _properties(self) -> Any:
        try:
            return self._backend.properties()
        except BackendError:
            return engine_named(self._backend.engine).properties({})

    def _why_no_image(self) -> str:
        """Why no image is sent: by what the server says, else by the projector's buffers in its log; empty: it is."""
        if "/props" in engine_named(self._backend.engine).property_paths():
            try:
                said = self._backend.client.get("/props")
            except BackendError:
                said = None
            modalities = said.get("modalities") if isinstance(said, dict) else None
            if isinstance(modalities, dict) and isinstance(modalities.get("vision"), bool):
                return "" if modalities["vision"] else "no projector for images is loaded"
        boot = self._backend.boot
        if "projector" in boot.buckets:
            return ""
        return (
            "no projector is among its buffers" if boot.evidence == "complete" else "whether it takes images is unknown"
        )

    def _caches(self) -> int:
        found = caches_of(self._backend.log)
        return (found.prompts or 0) + found.checkpoints

    # ------------------------------------------------------------ memory

    def _open(self, name: str) -> int | None:
        if self._window is None:
            return None
        opened = ask(self._pool.keeper, Open(kind="phase", name=f"{PHASE}: {name}", parent=self._window))
        if not isinstance(opened, Opened):
            raise KeeperError(f"the keeper answered the opening of a phase with {type(opened).__name__}")
        return opened.window

    def _close(self, window: int | None) -> Closed:
        if window is None:
            return Closed(t0=0, t1=0)
        closed = ask(self._pool.keeper, Close(window=window))
        if not isinstance(closed, Closed):
            raise KeeperError(f"the keeper answered the end of a phase with {type(closed).__name__}")
        return closed

    def _now(self, settle: float) -> tuple[dict[str, Measured], bool]:
        """Idle memory of the backend, and whether it was at rest."""
        if self._window is None:
            return {}, True
        figures = ask(self._pool.keeper, Now(window=self._window, settle=settle), settle + 30)
        if not isinstance(figures, Figures):
            raise KeeperError(f"the keeper answered a question for figures with {type(figures).__name__}")
        return _with_host(figures.backend, figures.host), figures.settled

    def _at_ready(self) -> dict[str, Measured]:
        return dict(self._backend.running.at_ready) if self._window is not None else {}

    def _why_unmeasured(self) -> str:
        if self._window is None:
            return "no window was open in which the backend's memory could be read"
        if self._pool.context.predicted:
            return "nothing is measured in this run (--vram-device=predicted)"
        return ""


def _check(at_once: Sequence[int] | None, seconds: float, settle: float) -> None:
    """:raises BadInput: a value that cannot be used."""
    for name, value, most in (("seconds", seconds, 86_400), ("settle", settle, 600)):
        given: object = value  # tests are rarely type-checked
        if isinstance(given, bool) or not isinstance(given, (int, float)) or not 0 < given <= most:
            raise BadInput(f"probe({name}={value!r}): write a number of seconds above 0 and up to {most}")
    rounds: object = at_once
    if rounds is not None and (isinstance(rounds, str) or not isinstance(rounds, Sequence)):
        raise BadInput(f"probe(at_once={at_once!r}): write a list of how many requests to send at once, such as [1, 2]")
    for count in at_once or ():
        one: object = count
        if isinstance(one, bool) or not isinstance(one, int) or not 1 <= one <= MOST_AT_ONCE:
            raise BadInput(f"probe(at_once=…): {count!r} requests at once cannot be sent: write 1 to {MOST_AT_ONCE}")


def _asked(call: Callable[[], Reply]) -> Reply:
    try:
        return call()
    except RequestTimeout as error:
        raise _Gone("timed_out", error) from None
    except RequestFailed as error:
        raise _Gone("refused", error) from None
    except BackendError as error:  # it is gone, or the keeper gives no turn at it any more
        raise _Gone("died", error) from None


def _with_host(figures: Mapping[str, Measured], host: Measured | None) -> dict[str, Measured]:
    """The figures by device, and the host's beside them where no device is the host."""
    return dict(figures) if host is None or HOST in figures else {**figures, HOST: host}


def _not_here(reason: str) -> Step:
    return Step(name="", outcome="skipped", reason=reason)


def _served(records: Sequence[RequestRecord]) -> Step:
    return Step(
        name="",
        outcome="served",
        requests=len(records),
        in_flight=at_most_at_once(records),
        tokens=[record.tokens_in for record in records if record.tokens_in is not None],
    )


def at_most_at_once(records: Sequence[RequestRecord]) -> int:
    """How many of these requests were on their way at the same time, at most."""
    events = [(record.t, 1) for record in records]
    events += [(record.t + int(record.latency * 1e9), -1) for record in records]
    running = most = 0
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    return most


def png(width: int, height: int) -> bytes:
    """A PNG image of a gradient in three colours, 8 bits each."""
    rows = b"".join(
        b"\0" + b"".join(bytes((x * 255 // width, y * 255 // height, (x ^ y) & 255)) for x in range(width))
        for y in range(height)
    )
    parts = [b"\x89PNG\r\n\x1a\n"]
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for kind, data in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
        parts += [struct.pack(">I", len(data)), kind, data, struct.pack(">I", zlib.crc32(kind + data))]
    return b"".join(parts)


def data_uri(image: bytes) -> str:
    """A PNG image as the URL that an OpenAI-compatible request carries."""
    return f"data:image/png;base64,{base64.b64encode(image).decode('ascii')}"
