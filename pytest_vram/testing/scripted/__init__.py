"""A backend that answers tool calls as a script says: with a set true accuracy, a mix of defects, and faults."""

from __future__ import annotations

from pytest_vram.testing.scripted.answering import Answerer, answer
from pytest_vram.testing.scripted.asking import ScriptedClient
from pytest_vram.testing.scripted.process import ScriptedBackend, backend_table, scripted_backend
from pytest_vram.testing.scripted.recording import Asked, read_record
from pytest_vram.testing.scripted.script import FAULTS, WRONG_KINDS, Burst, Fault, Script, read_script
from pytest_vram.testing.scripted.serving import ScriptedServer, serving
from pytest_vram.testing.scripted.shapes import ScriptedReply

__all__ = [
    "FAULTS",
    "WRONG_KINDS",
    "Answerer",
    "Asked",
    "Burst",
    "Fault",
    "Script",
    "ScriptedBackend",
    "ScriptedClient",
    "ScriptedReply",
    "ScriptedServer",
    "answer",
    "backend_table",
    "read_record",
    "read_script",
    "scripted_backend",
    "serving",
]
