"""Biases of a tool's name as biases of tokens, which are the server's own."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from pytest_vram.errors import BadSpec, RequestFailed, RequestTimeout
from pytest_vram.toolcalls.cases import Case

#: OpenAI's limits of a bias.
_LEAST, _MOST = -100.0, 100.0


def of_tools(client: object, biases: Mapping[str, float], cases: Sequence[Case], *, where: str) -> dict[str, float]:
    """Token id → bias, for the ``logit_bias`` of a request: every token of a tool's name has its bias.

    A token that several names share has the sum of theirs, from −100 to 100.

    :param client: has ``tokenize``, as :class:`pytest_vram.backends.VramClient`.
    :param where: the table that the biases come from, for messages.
    :raises BadSpec: no case offers a tool of that name, or the engine does not tell its tokens.
    :raises BackendDied: the connection was lost.
    """
    if not biases:
        return {}
    offered = {tool.name for case in cases for tool in case.tools}
    tokenize = getattr(client, "tokenize", None)
    summed: dict[str, float] = {}
    for name, bias in biases.items():
        if name not in offered:
            near = difflib.get_close_matches(name, offered, n=1)
            hint = f": did you mean {near[0]!r}?" if near else ""
            raise BadSpec(f"{where}.logit_bias: no case offers a tool {name!r}{hint}")
        try:
            tokens = tokenize(name) if callable(tokenize) else None
        except (RequestFailed, RequestTimeout) as error:
            raise BadSpec(
                f"{where}.logit_bias cannot be used with this engine, which does not tell the tokens of a text as"
                f" llama-server does: remove it ({error})"
            ) from None
        if tokens is None:
            raise BadSpec(f"{where}.logit_bias cannot be used here: this client does not tell the tokens of a text")
        for token in tokens:
            summed[str(token)] = min(_MOST, max(_LEAST, summed.get(str(token), 0.0) + bias))
    return summed
