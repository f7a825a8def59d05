"""Calls written as Python: ``[read_log(path="/var/log/syslog", lines=5)]``, as Llama 3.2 and 4, LFM2 and Gemma 3 do."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

from pytest_vram.toolcalls.cases import Tool
from pytest_vram.toolcalls.tolerant import Defect

#: ``name(``, perhaps behind a bracket.
CALL = re.compile(r"\[?\s{0,50}[A-Za-z_][\w.-]{0,150}\s?\(", re.ASCII)
_NAME = re.compile(r"[A-Za-z_][\w.-]{0,150}", re.ASCII)
_MARK = re.compile(r"[\"'()\[\]{}]")
_STRING_ENDS = {quote: re.compile(r"\\.|" + quote, re.DOTALL) for quote in ('"', "'", '"""', "'''")}
_PAIRS = {"(": ")", "[": "]", "{": "}"}
#: Python's parser takes much memory for each character, and its stack for each level.
LONGEST, _DEEPEST = 200_000, 60
_JSON_WORDS = {"true": True, "false": False, "null": None, "none": None}


class Written(NamedTuple):
    """Calls written as Python. :ivar calls: name, arguments and defects of each."""

    calls: list[tuple[str, Any, list[Defect]]]
    end: int


def read(text: str, start: int, tools: Mapping[str, Tool]) -> Written | None:
    """Read a list of calls, or one call, that begins at ``start``; ``None``: it is neither."""
    end, defect = _extent(text, start)
    source = text[start:end]
    if defect is not None:
        match = _NAME.search(source[:300])
        return Written([(match[0], None, [defect])], end) if match is not None else None
    if len(source) > LONGEST:
        return None
    tree = _tree(source)
    if isinstance(tree, str):
        match = _NAME.search(source[:300])
        if match is None:
            return None
        kind = "duplicate_key" if "repeated" in tree else "wrapper_mismatch"
        return Written([(match[0], None, [Defect(kind, start, f"this is no call in Python: {tree}")])], end)
    nodes = tree.elts if isinstance(tree, ast.List | ast.Tuple) else [tree]
    calls = [_call(node, start, tools) for node in nodes if isinstance(node, ast.Call)]
    if not calls or len(calls) < len(nodes):
        return None
    return Written(calls, end)


def _extent(text: str, start: int) -> tuple[int, Defect | None]:
    """Where the brackets that open at ``start`` are closed, strings left out."""
    open_brackets: list[tuple[str, int]] = []
    at = start
    while True:
        match = _MARK.search(text, at, start + LONGEST + 1)
        if match is None:
            if open_brackets:
                detail = f"the bracket {open_brackets[-1][0]!r} is never closed"
                return len(text), Defect("missing_bracket", open_brackets[-1][1], detail)
            return len(text), Defect("missing_bracket", start, "this call is never closed")
        mark, at = match[0], match.end()
        if mark in "\"'":
            quote = mark * 3 if text.startswith(mark * 3, match.start()) else mark
            closed = _string_end(text, match.start() + len(quote), start + LONGEST + 1, quote)
            if closed is None:
                return len(text), Defect("unterminated_string", match.start(), "this string is never closed")
            at = closed
        elif mark in _PAIRS:
            open_brackets.append((mark, match.start()))
        else:
            if not open_brackets or _PAIRS[open_brackets[-1][0]] != mark:
                if any(_PAIRS[one] == mark for one, _ in open_brackets):
                    detail = f"the bracket {open_brackets[-1][0]!r} is not closed before {mark!r}"
                    return at, Defect("missing_bracket", open_brackets[-1][1], detail)
                return at, Defect("extra_bracket", match.start(), f"the bracket {mark!r} closes nothing")
            open_brackets.pop()
            if not open_brackets:
                return at, None
        if len(open_brackets) > _DEEPEST:
            return at, Defect("wrapper_mismatch", at, f"brackets are nested more than {_DEEPEST} deep")


def _string_end(text: str, at: int, limit: int, quote: str) -> int | None:
    """Offset after the quotation mark that closes a string; an escaped one does not."""
    return next((match.end() for match in _STRING_ENDS[quote].finditer(text, at, limit) if match[0] == quote), None)


def _tree(source: str) -> ast.expr | str:
    """The expression, or what is wrong with it."""
    with warnings.catch_warnings():
        # An escape such as "\d" warns; it means what it says.
        warnings.simplefilter("ignore")
        try:
            return ast.parse(source.strip(), mode="eval").body
        except SyntaxError as error:
            return error.msg or "it cannot be read"
        except (ValueError, RecursionError, MemoryError) as error:
            return str(error)[:100] or "it cannot be read"


def _call(node: ast.Call, at: int, tools: Mapping[str, Tool]) -> tuple[str, Any, list[Defect]]:
    name = _dotted(node.func)
    defects: list[Defect] = []
    if name == "print" and len(node.args) == 1 and isinstance(node.args[0], ast.Call) and "print" not in tools:
        return _call(node.args[0], at, tools)
    arguments: dict[str, Any] = {}
    if node.args:
        only = node.args[0]
        if len(node.args) == 1 and not node.keywords and isinstance(only, ast.Dict):
            arguments = _value(only, defects, at)
        else:
            tool = tools.get(name)
            properties = tool.parameters.get("properties") if tool is not None else None
            names = list(properties) if isinstance(properties, Mapping) else []
            for index, inner in enumerate(node.args):
                key = names[index] if index < len(names) else f"argument {index + 1}"
                arguments[key] = _value(inner, defects, at)
        defects.append(Defect("wrapper_mismatch", at, "an argument is given without its name"))
    for keyword in node.keywords:
        if keyword.arg is None:
            defects.append(Defect("wrapper_mismatch", at, "arguments are unpacked with '**'"))
        else:
            arguments[keyword.arg] = _value(keyword.value, defects, at)
    return name, arguments, defects


def _dotted(node: ast.expr) -> str:
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    parts.append(node.id if isinstance(node, ast.Name) else ast.unparse(node)[:80])
    return ".".join(reversed(parts))


def _value(node: ast.expr, defects: list[Defect], at: int) -> Any:
    """The value of an argument; what is no literal is kept as its source."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str | int | float | bool | None):
            return node.value
    elif isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(inner, defects, at) for inner in node.elts]
    elif isinstance(node, ast.Dict):
        return {
            str(_value(key, defects, at)): _value(inner, defects, at)
            for key, inner in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        inner = _value(node.operand, defects, at)
        if isinstance(inner, int | float) and not isinstance(inner, bool):
            return -inner if isinstance(node.op, ast.USub) else inner
    elif isinstance(node, ast.Name) and node.id.lower() in _JSON_WORDS:
        return _JSON_WORDS[node.id.lower()]
    source = ast.unparse(node)[:200]
    defects.append(Defect("wrapper_mismatch", at, f"{source!r} is not a value but something to be computed"))
    return source
