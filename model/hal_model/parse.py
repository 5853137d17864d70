"""What a model wrote, taken apart: reasoning, content, tool calls (spec section 6.4).

The rules, in order:

1. The text ends at the first EOS, which is never shown. Without one it was cut: finish is "length". A caller that
   saw the ids says so itself.
2. Thinking: reasoning ends at ``</think>`` or at the marker of a tool call, whichever comes first. A text that
   has neither is all reasoning when it was cut, and all content (with a warning) when it ended by itself.
3. Tool calls are read one after the other. What cannot be read as a call stays in the content as it was written,
   with a warning: nothing is lost and nothing is guessed.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from hal_model.special_tokens import DSML, EOS, THINK_END, THINK_START

Finish = Literal["stop", "length", "tool_calls"]

_BLOCK = re.compile(rf"\n{{0,2}}<{DSML}(?=tool_calls|invoke)")
_OPEN = re.compile(rf"\n{{0,2}}<{DSML}tool_calls>\s*")
_CLOSE = re.compile(rf"\s*</{DSML}tool_calls>")
_INVOKE = re.compile(rf'\s*<{DSML}invoke name="([^"\n]+)">\s*')
_INVOKE_END = re.compile(rf"\s*</{DSML}invoke>")
_PARAMETER = re.compile(
    rf'\s*<{DSML}parameter name="([^"\n]+)" string="(true|false)">(.*?)</{DSML}parameter>', re.DOTALL
)


@dataclass(frozen=True)
class ToolCall:
    """A call: `arguments` is the JSON text of an object, numbers spelt as the model spelt them."""

    name: str
    arguments: str

    @property
    def values(self) -> dict[str, Any]:
        """The arguments decoded: strings as written, everything else from JSON."""
        decoded: dict[str, Any] = json.loads(self.arguments)
        return decoded


@dataclass(frozen=True)
class Completion:
    """One answer. `warning` says what was not as the format wants it; None when all was."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish: Finish
    warning: str | None = None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _argument(value: str, is_string: bool) -> str | None:
    """JSON text of one parameter; None when a value said to be JSON is not."""
    if is_string:
        return json.dumps(value, ensure_ascii=False)
    try:
        json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return None
    return value.strip()


def _parse_call(text: str, at: int) -> tuple[ToolCall, int] | None:
    """The call that starts at `at` and the place after it, or None when there is no complete well-formed one."""
    head = _INVOKE.match(text, at)
    if head is None:
        return None
    at, arguments = head.end(), {}
    while parameter := _PARAMETER.match(text, at):
        name, is_string, raw = parameter.groups()
        value = _argument(raw, is_string == "true")
        # A marker inside a value means a tag was forgotten; the history could not frame it either.
        if value is None or name in arguments or DSML in raw:
            return None
        arguments[name], at = value, parameter.end()
    tail = _INVOKE_END.match(text, at)
    if tail is None:
        return None
    members = (f"{json.dumps(name, ensure_ascii=False)}: {value}" for name, value in arguments.items())
    return ToolCall(head[1], "{" + ", ".join(members) + "}"), tail.end()


def _parse_block(text: str) -> tuple[tuple[ToolCall, ...], str, str | None]:
    """Calls of a text that starts at a marker, what is left over, and a warning."""
    opened = _OPEN.match(text)
    at = opened.end() if opened else 0
    calls = []
    while step := _parse_call(text, at):
        calls.append(step[0])
        at = step[1]
    closed = _CLOSE.match(text, at) if calls else None
    rest = text[closed.end() if closed else at if calls else 0 :]
    if rest.strip():
        return tuple(calls), rest, "part of the tool-call text is malformed or cut; it stays in the content"
    if not (opened and closed):
        return tuple(calls), "", f"the tool-call block has no {'closing' if opened else 'opening'} tag"
    return tuple(calls), "", None


def _split_reasoning(text: str, thinking: bool, ended: bool) -> tuple[str, str, str | None]:
    """Reasoning, the rest, and a warning (rule 2)."""
    if not thinking:
        return "", text, None
    text = text.removeprefix(THINK_START)
    tag, block = text.find(THINK_END), _BLOCK.search(text)
    if block is not None and (tag < 0 or block.start() < tag):
        return text[: block.start()], text[block.start() :], f"reasoning has no {THINK_END} before the tool calls"
    if tag >= 0:
        return text[:tag], text[tag + len(THINK_END) :], None
    if ended:
        return "", text, f"the answer has no {THINK_END}; all of it is shown as content"
    return text, "", None


def parse_completion(text: str, *, thinking: bool, ended: bool | None = None) -> Completion:
    """Take the text of one answer apart; never raises, and loses nothing but blank space around a tool-call block.

    `thinking` is the decision that made the prompt (`prompt.decide_thinking`). `ended`: whether the answer ended, by
    the EOS id or a stop string, rather than being cut. A caller that has the ids gives it; EOS spelt out in the text
    is then plain text.
    """
    if ended is None:
        body, eos, _ = text.partition(EOS)
        ended = bool(eos)
    else:
        body = text.removesuffix(EOS)
    reasoning, content, first = _split_reasoning(body, thinking, ended)
    calls: tuple[ToolCall, ...] = ()
    second = None
    if block := _BLOCK.search(content):
        calls, left, second = _parse_block(content[block.start() :])
        content = content[: block.start()] + left
    if not (first or second) and DSML in reasoning + content:
        second = f"a tool-call marker {DSML!r} stands outside a tool call"
    finish: Finish = "length" if not ended else "tool_calls" if calls else "stop"
    return Completion(reasoning, content, calls, finish, "; ".join(w for w in (first, second) if w) or None)
