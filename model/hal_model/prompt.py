"""The prompt encoder of DeepSeek V4: turns to text and to token ids (spec sections 6.2 and 6.3).

A prompt is a list of pieces, `Special` for one special token and plain strings for everything else. `encode_messages`
joins them; `prompt_ids` looks the special tokens up and encodes the text between them without any, so that a marker
written by a user, a tool or a file stays text. For ordinary data both say the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hal.errors import UsageError
from hal_model.messages import Call, Message, Turn, read_turns
from hal_model.prompt_texts import PromptTexts, Special
from hal_model.special_tokens import ASSISTANT, BOS, DSML, EOS, LATEST_REMINDER, TASKS, THINK_END, THINK_START, USER
from hal_model.tokenizer import Tokenizer

_BOS, _EOS, _USER, _ASSISTANT = Special(BOS), Special(EOS), Special(USER), Special(ASSISTANT)
_THINK, _END_THINK, _DSML, _REMINDER = Special(THINK_START), Special(THINK_END), Special(DSML), Special(LATEST_REMINDER)


def decide_thinking(thinking: bool | None, effort: str | None) -> bool:
    """The one decision that prompt and parser share: think when asked to, or when an effort above "none" is named.

    Raises UsageError when the two contradict each other.
    """
    wants = None if effort is None else effort != "none"
    if thinking is None:
        return bool(wants)
    if wants is not None and wants != thinking:
        right = "drop one of the two, or use effort 'none' exactly when thinking is off"
        raise UsageError(f"effort: {effort!r} with thinking={thinking}; {right}")
    return thinking


@dataclass(frozen=True)
class _Rules:
    """What holds for every turn of one prompt."""

    texts: PromptTexts
    thinking: bool
    keep: bool  # reasoning of earlier turns stays
    last_user: int

    def think_token(self, i: int) -> Special:
        """The token that opens the answer to turn `i`."""
        return _THINK if self.thinking and (self.keep or i >= self.last_user) else _END_THINK


def _last_user(turns: Sequence[Turn]) -> int:
    return max((i for i, turn in enumerate(turns) if turn.role in ("user", "developer")), default=-1)


def _drop_reasoning(turns: Sequence[Turn]) -> list[Turn]:
    """Before the last user turn: assistant turns lose their reasoning, developer turns go (step 4)."""
    last = max(_last_user(turns), 0)
    before = [replace(turn, reasoning="") for turn in turns[:last] if turn.role != "developer"]
    return [*before, *turns[last:]]


def _call_pieces(call: Call) -> list[str]:
    pieces: list[str] = ["<", _DSML, f'invoke name="{call.name}">\n']
    for n, (name, value, is_string) in enumerate(call.arguments):
        head = f'parameter name="{name}" string="{"true" if is_string else "false"}">{value}</'
        pieces += ["\n<" if n else "<", _DSML, head, _DSML, "parameter>"]
    return [*pieces, "\n</", _DSML, "invoke>"]


def _calls_pieces(calls: Sequence[Call]) -> list[str]:
    """The tool-call block (step 6); nothing without calls."""
    if not calls:
        return []
    body = [["\n", *_call_pieces(call)] for call in calls]
    return ["\n\n<", _DSML, "tool_calls>", *itertools.chain(*body), "\n</", _DSML, "tool_calls>"]


def _instruction_pieces(turn: Turn, texts: PromptTexts) -> list[str]:
    pieces: list[str] = [turn.content]
    if turn.tools:
        pieces += ["\n\n", *texts.tools_block(turn.tools)]
    if turn.response_format:
        pieces += ["\n\n", *texts.response_format_block(turn.response_format)]
    return pieces


def _user_pieces(turn: Turn) -> list[str]:
    texts = [f"<tool_result>{b.text}</tool_result>" if b.kind == "tool_result" else b.text for b in turn.blocks]
    return [_USER, "\n\n".join(texts)]


def _assistant_pieces(turns: Sequence[Turn], i: int, rules: _Rules) -> list[str]:
    turn = turns[i]
    answers_task = i > 0 and turns[i - 1].task is not None
    reasons = rules.thinking and not answers_task and (rules.keep or i > rules.last_user)
    reasoning: list[str] = [turn.reasoning, _END_THINK] if reasons else []
    return [*reasoning, turn.content, *_calls_pieces(turn.calls), *([] if turn.wo_eos else [_EOS])]


def _body(turns: Sequence[Turn], i: int, rules: _Rules) -> list[str]:
    turn = turns[i]
    if turn.role == "user":
        return _user_pieces(turn)
    if turn.role == "assistant":
        return _assistant_pieces(turns, i, rules)
    if turn.role == "latest_reminder":
        return [_REMINDER, turn.content]
    return [*([_USER] if turn.role == "developer" else []), *_instruction_pieces(turn, rules.texts)]


def _transition(turns: Sequence[Turn], i: int, rules: _Rules) -> list[str]:
    """What opens the next answer, after turn `i`."""
    if i + 1 < len(turns) and turns[i + 1].role not in ("assistant", "latest_reminder"):
        return []
    task = turns[i].task
    if task == "action":
        return [_ASSISTANT, _THINK if rules.thinking else _END_THINK, Special(TASKS[task])]
    if task is not None:
        return [Special(TASKS[task])]
    return [_ASSISTANT, rules.think_token(i)] if turns[i].role in ("user", "developer") else []


def _effort_prefix(thinking: bool, effort: str | None, texts: PromptTexts) -> str:
    decide_thinking(thinking, effort)
    return texts.effort_prefix(effort) if thinking else ""


def prompt_pieces(
    messages: Sequence[Message],
    *,
    thinking: bool,
    texts: PromptTexts,
    drop_thinking: bool = True,
    effort: str | None = None,
    context: Sequence[Message] | None = None,
) -> list[str]:
    """Pieces of the prompt, `Special` or ordinary text; see `encode_messages` for arguments and errors."""
    turns, first = read_turns(messages, context or ())
    prefix = _effort_prefix(thinking, effort, texts)
    keep = not drop_thinking or any(turn.tools for turn in turns)
    if thinking and not keep:
        before = turns[: min(first, max(_last_user(turns), 0))]
        first -= sum(turn.role == "developer" for turn in before)
        turns = _drop_reasoning(turns)
    rules = _Rules(texts, thinking, keep, _last_user(turns))
    pieces: list[str] = [] if context else [_BOS, prefix]
    for i in range(first, len(turns)):
        pieces += _body(turns, i, rules) + _transition(turns, i, rules)
    return [piece for piece in pieces if piece]


def encode_messages(
    messages: Sequence[Message],
    *,
    thinking: bool,
    texts: PromptTexts,
    drop_thinking: bool = True,
    effort: str | None = None,
    context: Sequence[Message] | None = None,
) -> str:
    """The prompt as text.

    `messages` are OpenAI-style: role system, user, assistant, tool, developer or latest_reminder; `content` a string or
    a list of text parts; `tools` and `response_format` on a system or developer message; `tool_calls` and
    `reasoning_content` on an assistant message; `task` and `wo_eos` as in spec 6.2 (`mask` has no effect on a prompt).
    `context` holds messages encoded before: they are not rendered and BOS is not written again.

    Raises UsageError naming message, field and value; CheckpointError when the checkpoint lacks a text that is needed.
    """
    pieces = prompt_pieces(
        messages, thinking=thinking, texts=texts, drop_thinking=drop_thinking, effort=effort, context=context
    )
    return "".join(pieces)


def prompt_ids(
    messages: Sequence[Message],
    *,
    tokenizer: Tokenizer,
    thinking: bool,
    texts: PromptTexts,
    drop_thinking: bool = True,
    effort: str | None = None,
    context: Sequence[Message] | None = None,
) -> list[int]:
    """The prompt as token ids: special ids stand only where the encoder wrote them, whatever the messages hold.

    Arguments and errors as `encode_messages`; CheckpointError also when the tokenizer lacks a special token.
    """
    pieces = prompt_pieces(
        messages, thinking=thinking, texts=texts, drop_thinking=drop_thinking, effort=effort, context=context
    )
    ids: list[int] = []
    for special, run in itertools.groupby(pieces, key=lambda piece: isinstance(piece, Special)):
        if special:
            ids += [tokenizer.token_id(piece) for piece in run]
        else:
            ids += tokenizer.encode("".join(run), allow_special=False)
    return ids
