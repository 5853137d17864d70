"""Texts of the special tokens that a V4 prompt is built from (spec section 6.1)."""

from __future__ import annotations

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK_START = "<think>"
THINK_END = "</think>"
DSML = "｜DSML｜"
LATEST_REMINDER = "<｜latest_reminder｜>"

# Value of a message's `task` key -> token that asks for it.
TASKS = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}

# Every special token that the prompt encoder can write, in the id order of the byte tokenizer.
PROMPT_TOKENS = (BOS, EOS, PAD, USER, ASSISTANT, THINK_START, THINK_END, DSML, LATEST_REMINDER, *TASKS.values())
