"""Frames: a 4-byte big-endian length, then that many bytes of JSON."""

from __future__ import annotations

import msgspec

from pytest_vram.keeper.messages import LARGEST, Reply, Request

_ENCODER = msgspec.json.Encoder()
_REQUESTS: msgspec.json.Decoder[Request] = msgspec.json.Decoder(Request)
_REPLIES: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(Reply)
HEADER = 4


class BadFrame(Exception):
    """A frame that is too long or not a message; the connection it came on is of no more use."""


class NotARequest(Exception):
    """A request with something in it that cannot be; the connection it came on is still of use.

    :ivar op: the kind of request that it was meant for. :ivar number: the one that its reply carries.
    """

    def __init__(self, text: str, op: str, number: int = 0) -> None:
        super().__init__(text)
        self.op = op
        self.number = number


class _Tag(msgspec.Struct):
    op: str
    number: int = 0


def frame(message: Request | Reply) -> bytes:
    """The message as a frame.

    :raises BadFrame: larger than :data:`~pytest_vram.keeper.messages.LARGEST`, or not encodable.
    """
    try:
        body = _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, msgspec.MsgspecError) as error:
        raise BadFrame(f"the message cannot be written as JSON: {error}") from None
    if len(body) > LARGEST:
        raise BadFrame(f"the message has {len(body):,} bytes and the largest allowed is {LARGEST:,}")
    return len(body).to_bytes(HEADER, "big") + body


def length(header: bytes) -> int:
    """Length of the body that follows.

    :raises BadFrame: longer than allowed.
    """
    size = int.from_bytes(header, "big")
    if size > LARGEST:
        raise BadFrame(f"a message of {size:,} bytes was announced and the largest allowed is {LARGEST:,}")
    return size


def request(body: bytes) -> Request:
    """Decode a request.

    :raises NotARequest: it says what it is, and what is wrong. :raises BadFrame: not even that.
    """
    try:
        return _REQUESTS.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        try:
            tag = msgspec.json.decode(body, type=_Tag)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            raise BadFrame(f"not a request: {error}") from None
        raise NotARequest(str(error), tag.op, tag.number) from None


def reply(body: bytes) -> Reply:
    """Decode a reply.

    :raises BadFrame: with what is wrong.
    """
    try:
        return _REPLIES.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadFrame(f"not a reply: {error}") from None
