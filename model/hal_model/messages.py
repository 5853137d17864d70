"""OpenAI-style messages, checked and merged into the turns of a prompt (spec section 6.2, steps 1 and 2).

Every refusal is a UsageError of one line: where (``messages[3].tool_calls[0].id``), what was seen, what is right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NoReturn

from hal.errors import UsageError
from hal_model.special_tokens import DSML, TASKS

Message = Mapping[str, Any]
ROLES = ("system", "user", "assistant", "tool", "developer", "latest_reminder")


@dataclass(frozen=True)
class Block:
    """Part of a user turn: its own text, or the result of the tool call `call_id`."""

    kind: Literal["text", "tool_result"]
    text: str
    call_id: str = ""


@dataclass(frozen=True)
class Call:
    """A tool call of the history. `arguments`: (name, value text, whether the value is a string) each."""

    name: str
    arguments: tuple[tuple[str, str, bool], ...]
    call_id: str = ""


@dataclass(frozen=True)
class Turn:
    """One message after merging; `tools` and `response_format` are JSON texts."""

    role: str
    content: str = ""
    blocks: tuple[Block, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[str, ...] = ()
    response_format: str = ""
    task: str | None = None
    wo_eos: bool = False


@dataclass
class _Ids:
    """Tool-call ids seen so far; `unnamed` when the latest assistant turn made calls without ids."""

    known: set[str] = field(default_factory=set)
    unnamed: bool = False


def _refuse(where: str, value: object, right: str) -> NoReturn:
    shown = repr(value)
    raise UsageError(f"{where}: {shown if len(shown) <= 80 else shown[:77] + '...'}; {right}")


def _text(where: str, value: object) -> str:
    """`value` when it is a string that has UTF-8 bytes."""
    if not isinstance(value, str):
        _refuse(where, value, "it must be a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        _refuse(where, value[error.start], "a lone surrogate has no UTF-8 bytes; send whole characters")
    return value


def _json(where: str, value: object) -> str:
    try:
        return _text(where, json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: not a JSON value ({error})") from error


def _mapping(where: str, value: object) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        _refuse(where, value, "it must be an object")
    return value


def _sequence(where: str, value: object) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        _refuse(where, value, "it must be a list")
    return value


def _text_parts(where: str, value: object, of_tool: bool) -> list[str]:
    """Texts of `content`: a string or a list of typed parts; a tool result may be empty or hold parts not shown."""
    if isinstance(value, str):
        return [_text(where, value)]
    if not isinstance(value, (list, tuple)) or not (value or of_tool):
        _refuse(where, value, "it must be a string or a list of text parts")
    texts = []
    for n, part in enumerate(value):
        kind = _mapping(f"{where}[{n}]", part).get("type")
        if kind == "text":
            texts.append(_text(f"{where}[{n}].text", part.get("text")))
        elif of_tool:
            texts.append(_text(f"{where}[{n}].type", f"[Unsupported {kind}]"))
        else:
            _refuse(f"{where}[{n}].type", kind, "the model reads text only: use 'text'")
    return texts


def _content(where: str, message: Message, optional: bool = False) -> str:
    value = message.get("content")
    if value is None and optional:
        return ""
    return "\n\n".join(_text_parts(f"{where}.content", value, of_tool=False))


def _tools(where: str, message: Message) -> tuple[str, ...]:
    schemas = []
    for n, tool in enumerate(_sequence(f"{where}.tools", message.get("tools") or [])):
        at = f"{where}.tools[{n}]"
        kind = _mapping(at, tool).get("type", "function")
        if kind != "function":
            _refuse(f"{at}.type", kind, "it must be 'function'")
        schemas.append(_json(f"{at}.function", _mapping(f"{at}.function", tool.get("function"))))
    return tuple(schemas)


def _framable(where: str, text: str, attribute: bool = False) -> str:
    """`text` when a tool call can hold it: the format has no escape, so a marker inside would rewrite the prompt."""
    if DSML in text:
        _refuse(where, text, f"a tool call cannot hold the marker {DSML!r}; remove this call from the history")
    if attribute and (not text or '"' in text or "\n" in text):
        _refuse(where, text, "a name in a tool call is not empty and has no quotation mark and no line break")
    return text


def _arguments(where: str, text: str) -> tuple[tuple[str, str, bool], ...]:
    """Parameters of a call from its JSON text; a text that is not JSON becomes one parameter named `arguments`."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = {"arguments": text}
    if not isinstance(values, dict):
        _refuse(where, text, "it must be the JSON text of an object")
    return tuple(
        (
            _framable(f"{where}: name", _text(where, key), attribute=True),
            _framable(f"{where}.{key}", _text(where, value) if isinstance(value, str) else _json(where, value)),
            isinstance(value, str),
        )
        for key, value in values.items()
    )


def _call(where: str, call: object) -> Call:
    body = _mapping(where, call)
    function = _mapping(f"{where}.function", body.get("function"))
    name = _framable(f"{where}.function.name", _text(f"{where}.function.name", function.get("name")), attribute=True)
    at = f"{where}.function.arguments"
    call_id = body.get("id") or function.get("id") or ""
    return Call(name, _arguments(at, _text(at, function.get("arguments"))), _text(f"{where}.id", call_id))


def _assistant(where: str, message: Message, ids: _Ids) -> Turn:
    listed = _sequence(f"{where}.tool_calls", message.get("tool_calls") or [])
    calls = tuple(_call(f"{where}.tool_calls[{n}]", call) for n, call in enumerate(listed))
    reasoning = _text(f"{where}.reasoning_content", message.get("reasoning_content") or "")
    if calls:
        ids.known.update(call.call_id for call in calls if call.call_id)
        ids.unnamed = any(not call.call_id for call in calls)
    content = _content(where, message, optional=bool(calls or reasoning))
    return Turn("assistant", content, reasoning=reasoning, calls=calls, wo_eos=bool(message.get("wo_eos")))


def _instructions(where: str, role: str, message: Message) -> Turn:
    """A system or developer message, the two that carry tools and a response format."""
    tools = _tools(where, message)
    wanted = message.get("response_format")
    response_format = _json(f"{where}.response_format", wanted) if wanted else ""
    content = _content(where, message, optional=role == "system" and bool(tools or response_format))
    if role == "developer" and not content:
        _refuse(f"{where}.content", content, "a developer message has a text")
    return Turn(role, content, tools=tools, response_format=response_format)


def _tool_result(where: str, message: Message, ids: _Ids) -> Block:
    call_id = _text(f"{where}.tool_call_id", message.get("tool_call_id") or "")
    if call_id not in ids.known and not (call_id == "" and ids.unnamed):
        _refuse(f"{where}.tool_call_id", call_id, "it must be the id of a tool call in an earlier assistant message")
    texts = _text_parts(f"{where}.content", message.get("content"), of_tool=True)
    return Block("tool_result", "\n\n".join(texts), call_id)


def _role(where: str, message: Message) -> str:
    role = message.get("role")
    if role not in ROLES:
        _refuse(f"{where}.role", role, f"use one of {', '.join(ROLES)}")
    if role not in ("system", "developer"):
        for key in ("tools", "response_format"):
            if message.get(key):
                _refuse(f"{where}.{key}", message[key], f"a {role} message has none: put it on the system message")
    return str(role)


def _task(where: str, message: Message) -> str | None:
    task = message.get("task")
    if task is not None and (not isinstance(task, str) or task not in TASKS):
        _refuse(f"{where}.task", task, f"use one of {', '.join(TASKS)}")
    return task


def _add_user(turns: list[Turn], where: str, blocks: tuple[Block, ...], task: str | None, tool: bool) -> None:
    """Append blocks to the user turn before, or start one (step 1: text never joins a turn that has a task)."""
    last = turns[-1] if turns else None
    if last is None or last.role != "user" or (last.task is not None and not tool):
        turns.append(Turn("user", blocks=blocks, task=task))
        return
    if task is not None:
        _refuse(f"{where}.task", task, "this message joins the user turn before it; put the task on that turn's first")
    turns[-1] = replace(last, blocks=last.blocks + blocks)


def _read(messages: Sequence[Message], name: str, ids: _Ids) -> list[Turn]:
    """Check messages and merge user texts and tool results into user turns (step 1)."""
    turns: list[Turn] = []
    for n, message in enumerate(_sequence(name, messages)):
        where = f"{name}[{n}]"
        role, task = _role(where, _mapping(where, message)), _task(where, message)
        if role == "user":
            texts = _text_parts(f"{where}.content", message.get("content"), of_tool=False)
            _add_user(turns, where, tuple(Block("text", text) for text in texts), task, tool=False)
        elif role == "tool":
            _add_user(turns, where, (_tool_result(where, message, ids),), task, tool=True)
        elif role == "assistant":
            turns.append(replace(_assistant(where, message, ids), task=task))
        elif role == "latest_reminder":
            turns.append(Turn(role, _content(where, message), task=task))
        else:
            turns.append(replace(_instructions(where, role, message), task=task))
    return turns


def _sort_results(turns: list[Turn]) -> list[Turn]:
    """Put tool results of a user turn into the order of the latest calls (step 2); texts keep their places."""
    order: dict[str, int] = {}
    done = []
    for turn in turns:
        if turn.calls:
            order = {call.call_id: n for n, call in enumerate(turn.calls) if call.call_id}
        results = [block for block in turn.blocks if block.kind == "tool_result"]
        queue = iter(sorted(results, key=lambda block: order.get(block.call_id, 0)))
        done.append(replace(turn, blocks=tuple(next(queue) if b.kind == "tool_result" else b for b in turn.blocks)))
    return done


def read_turns(messages: Sequence[Message], context: Sequence[Message] = ()) -> tuple[list[Turn], int]:
    """Turns of `context` followed by those of `messages`, and how many belong to the context.

    Raises UsageError naming the message, the field, the value and what is right.
    """
    ids = _Ids()
    before = _read(context, "context", ids)
    turns = _read(messages, "messages", ids)
    if not turns:
        _refuse("messages", list(messages), "a prompt needs at least one message")
    return _sort_results(before + turns), len(before)
