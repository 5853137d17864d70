"""Generation: sampling, penalties, stopping, batching, and what comes back after an error.

Two kinds of logits: those of a small real model, and those of a bigram table (row: current token, column: next one), which
takes the place of the network alone, so that every text and every distribution can be written down; state, plan,
penalties and sampling stay the real ones.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hal import plan as plans
from hal.errors import InputError, MemoryLimitError, NoKernelError, UsageError
from hal_model.checkpoint import init_checkpoint
from hal_model.config import PRESETS
from hal_model.generate import StopFilter, generate
from hal_model.session import Session, open_session, plan_only
from hal_model.settings import Sampling, Settings
from hal_model.tokenizer import write_byte_tokenizer

Ids = list[int]
Rules = Mapping[Any, str | Mapping[Any, float]]
Bigram = Callable[[Session, Rules], None]
Open = Callable[..., Session]

GREEDY = Sampling(temperature=0.0, max_tokens=6)
PROMPTS: list[Ids] = [[0, 70, 80, 90, 100, 110, 120], [0, 66], [0, 9, 8, 7, 6]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers, one of each kind; quantised weights."""
    out = tmp_path_factory.mktemp("generate") / "small"
    config = replace(
        PRESETS["tiny"],
        num_hidden_layers=3,
        num_hash_layers=1,
        compress_ratios=(0, 4, 128),
        draft_ratios=(),
        num_nextn_predict_layers=0,
        n_routed_experts=4,
    )
    init_checkpoint(config, out)
    write_byte_tokenizer(out, config.vocab_size)
    return out


@pytest.fixture(scope="module")
def open_(checkpoint: Path) -> Open:
    """``open_(**settings)``: a session of at most 64 tokens, three sequences, chunks of 16."""

    def opened(**settings: Any) -> Session:
        base: dict[str, Any] = {"model": checkpoint, "max_seq_len": 64, "max_batch_size": 3, "max_step_tokens": 16}
        return open_session(Settings(backend="cpu", **(base | settings)))

    return opened


@pytest.fixture(scope="module")
def session(open_: Open) -> Session:
    return open_()


@pytest.fixture
def bigram(monkeypatch: pytest.MonkeyPatch) -> Bigram:
    """``bigram(session, {"A": "B", "B": {"C": 1.0, "D": 0.5}})``: logits of the next token; -50 where nothing is said."""

    def install(session: Session, rules: Rules) -> None:
        size = session.config.vocab_size
        table = torch.full((size, size), -50.0)
        for token, follow in rules.items():
            for next_token, logit in ({follow: 9.0} if isinstance(follow, str) else follow).items():
                table[id_of(session, token), id_of(session, next_token)] = logit

        def forward(_model: Any, _caches: Any, step: Any) -> Tensor:
            return table[step.tokens[step.last]]

        monkeypatch.setattr("hal_model.generate.forward", forward)

    return install


def id_of(session: Session, token: str | int) -> int:
    if isinstance(token, int):
        return token
    if token == "<eos>":
        return session.config.eos_token_id
    (found,) = session.tokenizer.encode(token, allow_special=False)
    return found


def ids(session: Session, text: str) -> Ids:
    return session.tokenizer.encode(text, allow_special=False)


def tokens(session: Session, prompts: Sequence[Sequence[int]], params: Sampling) -> list[Ids]:
    """New tokens of every prompt."""
    out: list[Ids] = [[] for _ in prompts]
    for piece in generate(session, prompts, params):
        out[piece.index].append(piece.token)
    return out


def run(session: Session, prompt: str, **params: Any) -> tuple[list[str], str | None]:
    """Visible texts of one greedy answer, step by step, and why it ended."""
    pieces = list(
        generate(session, [ids(session, prompt)], Sampling(**({"temperature": 0.0, "max_tokens": 8} | params)))
    )
    assert [p.finish for p in pieces[:-1]] == [None] * (len(pieces) - 1), "only the last piece ends an answer"
    return [p.text for p in pieces], pieces[-1].finish


def everything_came_back(session: Session) -> bool:
    """No slot and no page is in use."""
    every = [session.state.open() for _ in range(session.settings.max_batch_size)]
    slots = [seq.slot for seq in every]
    for seq in every:
        session.state.close(seq)
    return session.state.arena.used == 0 and slots == list(range(len(slots)))


# The real model


def test_greedy_repeats_itself_and_a_batch_says_what_each_prompt_says_alone(session: Session) -> None:
    alone = [tokens(session, [p], GREEDY)[0] for p in PROMPTS]
    assert tokens(session, PROMPTS, GREEDY) == alone
    assert tokens(session, [PROMPTS[0]], GREEDY) == [alone[0]]
    assert all(len(a) == 6 for a in alone)
    assert len({tuple(a) for a in alone}) == 3, "different prompts, or the comparison proves nothing"


def test_short_prefill_chunks_change_nothing(session: Session, open_: Open) -> None:
    whole = tokens(open_(max_step_tokens=512), PROMPTS, GREEDY)
    assert tokens(open_(max_step_tokens=3), PROMPTS, GREEDY) == whole
    assert tokens(session, PROMPTS, GREEDY) == whole


def test_a_chunk_may_be_shorter_than_the_batch(session: Session, open_: Open) -> None:
    assert tokens(open_(max_step_tokens=1), PROMPTS, GREEDY) == tokens(session, PROMPTS, GREEDY)


def test_more_prompts_than_slots_all_finish_and_each_in_order(session: Session, open_: Open) -> None:
    few = open_(max_batch_size=2)
    many = [*PROMPTS, [0, 33], [0, 44, 45]]
    progress: list[tuple[int, int]] = []
    pieces = list(generate(few, many, GREEDY, lambda done, total: progress.append((done, total))))
    answers = [[p.token for p in pieces if p.index == i] for i in range(5)]
    assert answers == [tokens(session, [p], GREEDY)[0] for p in many]
    assert [p.index for p in pieces if p.finish] == [0, 1, 2, 3, 4]
    assert [total for _, total in progress] == [19] * 5
    assert [done for done, _ in progress] == [7, 9, 14, 16, 19]
    assert everything_came_back(few)


def test_the_seed_decides_and_nothing_else_does(session: Session) -> None:
    def drawn(seed: int) -> list[Ids]:
        return tokens(session, [PROMPTS[0]], Sampling(temperature=1.0, seed=seed, max_tokens=6))

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1) != tokens(session, [PROMPTS[0]], GREEDY)


@pytest.mark.parametrize("held", ["stored", "dense", "int8"])
def test_every_weight_format_generates(open_: Open, held: str) -> None:
    one = open_(weight_format=held)
    formats = {one.model.weights.layers[0].attn.wq_a.format, one.model.weights.layers[0].moe.w13.format}
    assert formats == {"stored": {"fp8", "fp4"}}.get(held, {held})
    (answer,) = tokens(one, [PROMPTS[0]], GREEDY)
    assert len(answer) == 6
    if held == "dense":
        assert [answer] == tokens(open_(weight_format="stored"), [PROMPTS[0]], GREEDY), (
            "FP8 and FP4 are exact in bfloat16"
        )


def test_the_structural_model_in_float32_generates(session: Session, open_: Open) -> None:
    structural = open_(dtype="float32", quantised_state=False)
    assert structural.model.numerics == type(session.model.numerics)(torch.float32, False)
    (answer,) = tokens(structural, [PROMPTS[0]], GREEDY)
    assert len(answer) == 6
    assert structural.state.arena.capacity > session.state.arena.capacity


def test_arenas_tell_capacity_use_and_peak(open_: Open) -> None:
    fresh = open_()
    weights, state, workspace = fresh.arenas()
    assert (weights.name, state.name, workspace.name) == ("weights", "state", "workspace")
    assert weights.used == weights.peak == weights.capacity > 0
    assert (state.used, state.peak) == (0, 0)
    running = generate(fresh, PROMPTS, GREEDY)
    next(running)
    during = fresh.arenas()[1]
    assert 0 < during.used <= during.peak < during.capacity == state.capacity
    list(running)
    after = fresh.arenas()
    assert after[1].used == 0
    assert after[1].peak > during.used, "three sequences need more pages than one"
    assert after[2].used <= after[2].peak <= after[2].capacity


def test_logits_that_are_not_finite_are_refused_by_sequence_and_everything_comes_back(session: Session) -> None:
    for value in ("nan", "inf"):
        lm_head = session.model.weights.lm_head.clone()
        lm_head[17] = float(value)
        weights = replace(session.model.weights, lm_head=lm_head)
        broken = replace(session, model=replace(session.model, weights=weights))
        with pytest.raises(InputError, match=r"logits of sequence 0 hold NaN or infinity; .*--check-values"):
            list(generate(broken, PROMPTS, GREEDY))
        assert everything_came_back(broken)
    assert len(tokens(session, PROMPTS, GREEDY)[0]) == 6, "the session lives on"


def test_the_broken_sequence_is_named_not_its_neighbours(session: Session, bigram: Bigram) -> None:
    bigram(session, {"a": "b", "b": "a", "x": "y", "y": {"z": float("nan")}})
    running = generate(session, [ids(session, t) for t in "axb"], GREEDY)
    assert [next(running).index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(InputError, match="logits of sequence 1 hold NaN"):
        next(running)
    assert everything_came_back(session)


def test_leaving_early_gives_slots_and_pages_back(session: Session) -> None:
    running = generate(session, PROMPTS, GREEDY)
    list(itertools.islice(running, 5))
    assert session.state.arena.used > 0
    assert isinstance(running, Generator)
    running.close()
    assert everything_came_back(session)


def test_the_weight_cache_is_written_once_and_read_after_that(open_: Open, tmp_path: Path) -> None:
    plain = tokens(open_(weight_format="int8"), PROMPTS, GREEDY)
    assert tokens(open_(weight_format="int8", weight_cache=tmp_path), PROMPTS, GREEDY) == plain
    (stored,) = tmp_path.glob("*.bin")
    written = stored.stat().st_mtime_ns
    assert tokens(open_(weight_format="int8", weight_cache=tmp_path), PROMPTS, GREEDY) == plain
    assert stored.stat().st_mtime_ns == written
    stored.write_bytes(stored.read_bytes()[:-1] + b"\x55")
    with pytest.raises(Exception, match=f"weight cache {re.escape(str(stored))}: content does not match its digest"):
        open_(weight_format="int8", weight_cache=tmp_path)
    open_(weight_format="stored", weight_cache=tmp_path)
    assert len(list(tmp_path.glob("*.bin"))) == 2, "another format is another entry"


def test_a_weight_cache_that_cannot_be_written_is_named(open_: Open, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--weight-cache .*file.*; right is a folder on a writable disk"):
        open_(weight_cache=tmp_path / "file")


# Plans


def test_a_saved_plan_serves_and_says_the_same(session: Session, open_: Open, tmp_path: Path) -> None:
    made = plan_only(session.settings, session.config)[1]
    digest = plans.save(made, tmp_path / "plan.json")
    pinned = open_(plan=tmp_path / "plan.json")
    assert plans.to_dict(pinned.plan)["digest"] == digest == plans.to_dict(session.plan)["digest"]
    assert tokens(pinned, PROMPTS[:1], GREEDY) == tokens(session, PROMPTS[:1], GREEDY)


def test_a_plan_that_was_changed_is_refused(session: Session, open_: Open, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plans.save(session.plan, path)
    honest = path.read_text()
    path.write_text(honest.replace('"reference"', '"faster"', 1))
    with pytest.raises(UsageError, match=r"plan file .*: digest \w{64} is not that of the content"):
        open_(plan=path)
    body = json.loads(honest)
    entry = next(e for e in body["buckets"]["decode:1-1"] if e["operator"] == "sample")
    entry["chosen"] = "faster"
    path.write_text(json.dumps(body | {"digest": plans.digest(body)}))
    with pytest.raises(NoKernelError, match="sample is pinned to faster"):
        open_(plan=path)


def test_a_plan_for_other_limits_is_refused(session: Session, open_: Open, tmp_path: Path) -> None:
    plans.save(session.plan, tmp_path / "plan.json")
    with pytest.raises(NoKernelError, match=r"--plan: the saved plan cannot be served here: decode:3-3 "):
        open_(plan=tmp_path / "plan.json", max_batch_size=4)


# Limits


def test_a_prompt_that_is_too_long_names_both_numbers_before_any_work(session: Session) -> None:
    message = "prompt of 59 tokens + max_tokens 6 = 65 exceed max_seq_len 64; shorten the prompt"
    with pytest.raises(UsageError, match=re.escape(message)):
        generate(session, [[0], [5] * 59], GREEDY)
    assert len(tokens(session, [[5] * 58], GREEDY)[0]) == 6, "one token less fits"


def test_an_empty_prompt_and_an_id_outside_the_vocabulary_are_refused(session: Session) -> None:
    with pytest.raises(UsageError, match="prompt has no tokens, right is at least one"):
        generate(session, [[0], []], GREEDY)
    for wrong in (512, -1):
        with pytest.raises(InputError, match=f"token id {wrong} is outside the vocabulary, right is 0 to 511"):
            generate(session, [[0, wrong]], GREEDY)


def test_memory_that_is_too_small_is_refused_with_a_length_that_does_fit(open_: Open) -> None:
    long = 2**20
    with pytest.raises(MemoryLimitError) as caught:
        open_(max_seq_len=long, max_batch_size=2**14)
    advice = re.search(r"\(max_seq_len (\d+) would fit\)", str(caught.value))
    assert advice, str(caught.value)
    assert 0 < int(advice[1]) < long
    assert "--max-seq-len" in str(caught.value)
    with pytest.raises(MemoryLimitError, match=r"no max_seq_len fits: the weights need \d+ bytes alone"):
        open_(memory_share=1e-9)


def test_a_length_beyond_the_context_names_the_context(open_: Open) -> None:
    with pytest.raises(UsageError, match="max_seq_len = 1048577, right is at most the model's context of 1048576"):
        open_(max_seq_len=2**20 + 1)


# Sampling


def test_a_sequence_draws_the_same_alone_in_company_and_in_any_company(session: Session, bigram: Bigram) -> None:
    """Fault B57: i-th prompt and seed s = one prompt and seed s + i, given equal logits."""
    flat = dict.fromkeys("abcdefgh", 0.0)
    bigram(session, {c: flat | ({"<eos>": 0.5} if c in "efgh" else {}) for c in "abcdefgh"})
    prompts = [ids(session, c) for c in "abcde"]
    for params in (Sampling(seed=42, max_tokens=12), Sampling(seed=42, max_tokens=12, presence_penalty=0.5)):
        together = tokens(session, prompts, params)
        alone = [tokens(session, [p], replace(params, seed=42 + i))[0] for i, p in enumerate(prompts)]
        assert together == alone
        assert len({tuple(a) for a in alone}) == 5
        assert len({len(a) for a in alone}) > 1, "some neighbour must have ended early"


def frequencies(session: Session, count: int, params: Sampling) -> dict[str, float]:
    """Shares of the first token after "a" over ``count`` seeds."""
    drawn = [t[0] for t in tokens(session, [ids(session, "a")] * count, replace(params, max_tokens=1))]
    return {c: drawn.count(id_of(session, c)) / count for c in "wxyz"}


P = {"w": 0.5, "x": 0.3, "y": 0.15, "z": 0.05}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "plain": ({}, P),
    "temperature": ({"temperature": 0.5}, {c: p * p / 0.365 for c, p in P.items()}),
    "top-k": ({"top_k": 2}, {"w": 0.625, "x": 0.375, "y": 0, "z": 0}),
    "top-p": ({"top_p": 0.7}, {"w": 0.625, "x": 0.375, "y": 0, "z": 0}),
    "min-p": ({"min_p": 0.4}, {"w": 0.625, "x": 0.375, "y": 0, "z": 0}),
    "top-k, top-p and min-p": ({"top_k": 3, "top_p": 0.9, "min_p": 0.5}, {"w": 0.625, "x": 0.375, "y": 0, "z": 0}),
}


@pytest.mark.parametrize("case", SHAPES)
def test_shares_of_drawn_tokens_are_those_of_the_definition(session: Session, bigram: Bigram, case: str) -> None:
    """Fault B58; 400 draws, five standard deviations."""
    settings, expected = SHAPES[case]
    bigram(session, {"a": {c: torch.tensor(p).log().item() for c, p in P.items()}})
    seen = frequencies(session, 400, Sampling(**settings))
    for c, p in expected.items():
        assert abs(seen[c] - p) <= 5 * (p * (1 - p) / 400) ** 0.5, (c, seen)


def test_presence_is_paid_once_and_frequency_every_time(session: Session, bigram: Bigram) -> None:
    bigram(session, {c: {"a": 3.0, "b": 2.8} for c in "pab"})

    def answer(**penalty: float) -> str:
        return "".join(run(session, "p", max_tokens=6, **penalty)[0])

    assert answer() == "aaaaaa"
    assert answer(presence_penalty=0.5) == "abaaaa"
    assert answer(frequency_penalty=0.5) == "ababab"
    assert answer(frequency_penalty=0.05) == "aaaaab"
    assert answer(presence_penalty=-0.5, frequency_penalty=0.3) == "aaabbb"


def test_repetition_counts_the_prompt_too_divides_positive_and_multiplies_negative_logits(
    session: Session, bigram: Bigram
) -> None:
    bigram(session, {"p": {"a": 3.0, "b": 2.0}, "b": {"c": -1.0, "d": -1.9}})
    assert run(session, "ap", max_tokens=1)[0] == ["a"]
    assert run(session, "ap", max_tokens=1, repetition_penalty=1.4)[0] == ["a"]
    assert run(session, "ap", max_tokens=1, repetition_penalty=1.6)[0] == ["b"]
    assert run(session, "cb", max_tokens=1, repetition_penalty=1.8)[0] == ["c"]
    assert run(session, "cb", max_tokens=1, repetition_penalty=2.0)[0] == ["d"]
    assert run(session, "ap", max_tokens=1, presence_penalty=2.0, frequency_penalty=2.0)[0] == ["a"], "not the prompt"


def test_penalties_shift_what_is_drawn(session: Session, bigram: Bigram) -> None:
    logits = {c: torch.tensor(p).log().item() + 5.0 for c, p in P.items()}
    bigram(session, {"a": logits, "w": logits})
    prompt = ids(session, "wa")
    drawn = tokens(session, [prompt] * 400, Sampling(max_tokens=1, repetition_penalty=1.5))
    shifted = torch.tensor([logits["w"] / 1.5, logits["x"], logits["y"], logits["z"]]).softmax(0)[0].item()
    seen = [d[0] for d in drawn].count(id_of(session, "w")) / 400
    assert abs(seen - shifted) <= 5 * (shifted * (1 - shifted) / 400) ** 0.5
    assert shifted < 0.25, "far from the 0.5 without the penalty"


# Ends


def test_an_answer_ends_at_the_end_token_which_is_not_shown(session: Session, bigram: Bigram) -> None:
    bigram(session, {"a": "b", "b": "c", "c": "<eos>", "<eos>": "d", "d": "d"})
    assert run(session, "a") == (["b", "c", ""], "stop")
    texts, finish = run(session, "a", ignore_eos=True, max_tokens=5)
    assert (texts[:2], texts[3:], finish) == (["b", "c"], ["d", "d"], "length")


def test_an_answer_has_at_most_max_tokens_tokens(session: Session, bigram: Bigram) -> None:
    bigram(session, {"a": "b", "b": "a"})
    for most in (1, 2, 5):
        texts, finish = run(session, "a", max_tokens=most)
        assert ("".join(texts), finish) == ("babab"[:most], "length")


def test_nothing_of_a_stop_text_is_shown_and_what_only_began_like_one_is(session: Session, bigram: Bigram) -> None:
    """Fault B54."""
    bigram(session, {"a": "E", "E": "N", "N": "D", "D": ".", ".": "!", "!": "!"})
    assert run(session, "a", stop=("END.",)) == (["", "", "", ""], "stop")
    bigram(session, {"a": "E", "E": "N", "N": "X", "X": "<eos>"})
    assert run(session, "a", stop=("END.",)) == (["", "", "ENX", ""], "stop")
    bigram(session, {"a": "E", "E": "N", "N": "D", "D": "<eos>"})
    assert run(session, "a", stop=("END.",)) == (["", "", "", "END"], "stop"), "held text is released at the end"
    assert run(session, "a", stop=("END.",), max_tokens=2) == (["", "EN"], "length")


def test_a_stop_text_on_the_last_token_counts_as_a_stop(session: Session, bigram: Bigram) -> None:
    bigram(session, {"a": "b", "b": "c", "c": "d"})
    assert run(session, "a", stop=("d",), max_tokens=3) == (["b", "c", ""], "stop")


def test_a_character_of_several_tokens_appears_whole(session: Session, bigram: Bigram) -> None:
    first, second = ids(session, "é")
    bigram(session, {"a": {first: 9.0}, first: {second: 9.0}, second: {first: 9.0}})
    assert run(session, "a", max_tokens=2) == (["", "é"], "length")
    assert run(session, "a", max_tokens=3) == (["", "é", "\ufffd"], "length")
    assert run(session, "a", max_tokens=4, stop=("éé",)) == (["", "", "", ""], "stop")


# StopFilter


def cuts(text: str) -> list[list[str]]:
    """Every way to cut ``text`` into pieces."""
    ways = []
    for n in range(len(text)):
        for at in itertools.combinations(range(1, len(text)), n):
            edges = [0, *at, len(text)]
            ways.append([text[a:b] for a, b in itertools.pairwise(edges)])
    return ways


STOPS: list[tuple[tuple[str, ...], str, str, bool]] = [
    ((), "abEND.", "abEND.", False),
    (("END.",), "abEND.cd", "ab", True),
    (("END.",), "EENEND.", "EEN", True),
    (("END.",), "abENDx", "abENDx", False),
    (("END.",), "abEND", "abEND", False),
    (("aab",), "aaaab!", "aa", True),
    (("abab",), "abaabab", "aba", True),
    (("abcd", "c"), "xabcde", "xab", True),
    (("c", "abcd"), "xabcde", "xab", True),
    (("bc", "abc"), "xxabc!", "xx", True),
    (("xy", "yz"), "axyz", "a", True),
]


@pytest.mark.parametrize(("stops", "text", "shown", "stopped"), STOPS)
def test_how_a_text_is_cut_into_tokens_does_not_matter(
    stops: tuple[str, ...], text: str, shown: str, stopped: bool
) -> None:
    for way in cuts(text):
        one, out, met = StopFilter(stops), "", False
        for piece in way:
            more, met = one.push(piece)
            out += more
            assert shown.startswith(out), f"{way}: {out!r} was shown too early"
            if met:
                break
        assert (out + ("" if met else one.finish()), met) == (shown, stopped), way


def test_only_what_may_begin_a_stop_text_is_held_back() -> None:
    one = StopFilter(("END.", "\n\n"))
    assert one.push("abc") == ("abc", False)
    assert one.push("xEN") == ("x", False)
    assert one.push("E") == ("EN", False)
    assert one.push("\n") == ("E", False)
    assert one.push("q") == ("\nq", False)
    assert one.finish() == ""
