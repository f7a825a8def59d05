"""A model of recall: what a scripted backend answers to a question of a recall check, from what the request holds."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pytest_vram.testing.scripted import drawing
from pytest_vram.testing.scripted.script import Script

_QUESTION = re.compile(r"What is the ([^?\n]{1,200})\? It is written in (\S{1,300})\. ")


def recalled(script: Script, body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The assistant's message; ``None``: the request asks for no fact.

    A fact that stands anywhere in the messages is used, for a share of the facts that the script sets. What is not
    there is read again where a tool for that is offered.
    """
    listed = body.get("messages")
    messages = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    if not messages or messages[-1].get("role") != "user":
        return None
    asked = _QUESTION.search(str(messages[-1].get("content")))
    if asked is None:
        return None
    label, path = asked.group(1), asked.group(2)
    told = re.compile(rf"The {re.escape(label)} is (\S+?)\.(?:\s|$)")
    found = [match for one in messages[:-1] for match in told.findall(str(one.get("content")))]
    if found and drawing.uniform(script.seed, label, "recall") < script.recall:
        return {"role": "assistant", "content": found[-1]}
    if found or not body.get("tools"):
        return {"role": "assistant", "content": "I do not know that any more."}
    function = {"name": "file_read", "arguments": json.dumps({"path": path})}
    call = {"id": "c00000000", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}
