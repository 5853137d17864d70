"""Parsing of completions: well-formed answers exactly, malformed ones without loss."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal_model.parse import Completion, parse_completion

EOS = "<｜end▁of▁sentence｜>"
OPEN, CLOSE = "<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"


def invoke(name: str, *parameters: str) -> str:
    return "\n".join([f'<｜DSML｜invoke name="{name}">', *parameters, "</｜DSML｜invoke>"])


def parameter(name: str, value: str, string: bool = True) -> str:
    return f'<｜DSML｜parameter name="{name}" string="{str(string).lower()}">{value}</｜DSML｜parameter>'


def block(*invokes: str) -> str:
    return "\n\n" + "\n".join([OPEN, *invokes, CLOSE])


CALL = invoke("add", parameter("a", "1", string=False), parameter("s", 'x<y | z 3>&2 "q"\n'))


def calls(answer: Completion) -> list[tuple[str, object]]:
    return [(call.name, call.values) for call in answer.tool_calls]


ADD = ("add", {"a": 1, "s": 'x<y | z 3>&2 "q"\n'})


@pytest.mark.parametrize(
    ("text", "reasoning", "content", "finish", "warned"),
    [
        ("hi", "hi", "", "length", False),
        ("hi" + EOS, "", "hi", "stop", True),
        ("</think>", "", "", "length", False),
        ("r</think>a" + EOS, "r", "a", "stop", False),
        ("r</think>a", "r", "a", "length", False),
        ("<think>r</think>a" + EOS, "r", "a", "stop", False),
        ("r</think>a</think>b" + EOS, "r", "a</think>b", "stop", False),
        ("r</think>a" + EOS + "junk", "r", "a", "stop", False),
    ],
)
def test_reasoning_ends_by_a_stated_rule(text: str, reasoning: str, content: str, finish: str, warned: bool) -> None:
    answer = parse_completion(text, thinking=True)
    assert (answer.reasoning, answer.content, answer.finish) == (reasoning, content, finish)
    assert (answer.warning is not None) is warned


@pytest.mark.parametrize(("text", "finish"), [("a", "length"), ("a" + EOS, "stop"), ("", "length")])
def test_without_thinking_all_is_content(text: str, finish: str) -> None:
    assert parse_completion(text, thinking=False) == Completion("", text.removesuffix(EOS), (), finish)  # type: ignore[arg-type]


def test_the_caller_may_say_that_the_answer_ended() -> None:
    assert parse_completion("a", thinking=False, ended=True) == Completion("", "a", (), "stop")
    spelt = parse_completion(f"the mark {EOS} ends" + EOS, thinking=False, ended=True)
    assert (spelt.content, spelt.finish) == (f"the mark {EOS} ends", "stop")


def test_calls_are_decoded() -> None:
    answer = parse_completion("r</think>c" + block(CALL, invoke("now")) + EOS, thinking=True)
    assert (answer.reasoning, answer.content, answer.finish, answer.warning) == ("r", "c", "tool_calls", None)
    assert calls(answer) == [ADD, ("now", {})]


def test_numbers_keep_their_spelling() -> None:
    text = block(
        invoke("f", parameter("x", "1.50", string=False), parameter("y", "12345678901234567890", string=False))
    )
    answer = parse_completion(text + EOS, thinking=False)
    assert answer.tool_calls[0].arguments == '{"x": 1.50, "y": 12345678901234567890}'


def test_a_call_ends_reasoning_that_was_never_closed() -> None:
    answer = parse_completion("r" + block(CALL) + EOS, thinking=True)
    assert (answer.reasoning, answer.content, calls(answer)) == ("r", "", [ADD])
    assert answer.warning is not None
    assert "reasoning" in answer.warning


@pytest.mark.parametrize(
    ("text", "tag"),
    [("\n\n" + CALL + "\n" + CLOSE, "opening"), ("\n\n" + OPEN + "\n" + CALL, "closing"), (CALL, "opening")],
)
def test_a_missing_outer_tag_costs_no_call(text: str, tag: str) -> None:
    answer = parse_completion("c" + text + EOS, thinking=False)
    assert (answer.content, calls(answer), answer.finish) == ("c", [ADD], "tool_calls")
    assert answer.warning is not None
    assert tag in answer.warning


@pytest.mark.parametrize("text", ["r</think>a <｜DSML｜ b", "r <｜DSML｜ s</think>a", "r\n\n<｜DSML｜"])
def test_a_marker_outside_a_call_is_warned_of(text: str) -> None:
    answer = parse_completion(text, thinking=True)
    assert "｜DSML｜" in answer.reasoning + answer.content
    assert answer.warning is not None


@pytest.mark.parametrize(
    "bad",
    [
        invoke("f", parameter("a", "True", string=False)),
        invoke("f", parameter("a", "NaN", string=False)),
        invoke("f", parameter("a", "1"), parameter("a", "2")),
        invoke("f", '<｜DSML｜parameter name="a">1</｜DSML｜parameter>'),
        invoke("f", '<｜DSML｜parameter name="a" string="true">1', parameter("b", "2")),
        invoke("f", "free text"),
        "<｜DSML｜invoke>\n</｜DSML｜invoke>",
        "",
    ],
)
def test_what_is_no_call_stays_in_the_content(bad: str) -> None:
    answer = parse_completion("c" + block(bad) + EOS, thinking=False)
    assert (answer.content, answer.tool_calls, answer.finish) == ("c" + block(bad), (), "stop")
    assert answer.warning is not None


def test_calls_before_a_malformed_one_are_kept_and_the_rest_is_shown() -> None:
    answer = parse_completion(block(CALL, "<｜DSML｜invoke oops") + EOS, thinking=False)
    assert calls(answer) == [ADD]
    assert answer.content == "\n<｜DSML｜invoke oops\n" + CLOSE
    assert answer.warning is not None


def test_text_after_a_block_is_kept() -> None:
    answer = parse_completion(block(CALL) + " and more" + EOS, thinking=False)
    assert (answer.content, calls(answer)) == (" and more", [ADD])
    assert answer.warning is not None


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(0, len(block(CALL, CALL))), thinking=st.booleans())
def test_no_cut_loses_text(cut: int, thinking: bool) -> None:
    text = ("r</think>" if thinking else "") + "c" + block(CALL, CALL)[:cut]
    answer = parse_completion(text, thinking=thinking)
    assert answer.finish == "length"
    assert answer.reasoning == ("r" if thinking else "")
    rest = block(CALL, CALL)[:cut]
    if answer.tool_calls:
        rest = rest.replace(OPEN, "").replace(CALL, "", len(answer.tool_calls)).replace(CLOSE, "")
    assert calls(answer) == [ADD] * len(answer.tool_calls)
    assert answer.content.split() == ("c" + rest).split()
    assert (answer.warning is None) is ("｜DSML｜" not in text or text.endswith(CLOSE))
