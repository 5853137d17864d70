"""From choice to plan, on the real model: what ``bind`` decides, refuses and writes down, and that a step obeys it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hal_model.model as models
from hal.contract import Call
from hal.errors import ContractError, NoKernelError, UsageError
from hal.kernel import Claim, Kernel, Range, Reason, kernel
from hal.operator import OPERATORS
from hal.plan import Bucket, Plan, bind, diff, digest, load, save, to_dict
from hal_cpu.device import CpuDevice
from hal_model.checkpoint import Checkpoint, init_checkpoint
from hal_model.config import PRESETS
from hal_model.load import Wanted, load_weights
from hal_model.model import Model, Numerics, Traceable
from hal_model.state import Limits, State
from hal_ops import Weight, moe_combine, moe_sort, rms_norm

LIMITS = Limits(4, 256, 64)
CONFIG = replace(
    PRESETS["tiny"],
    num_hidden_layers=3,
    num_hash_layers=1,
    num_nextn_predict_layers=0,
    compress_ratios=(0, 4, 128),
    draft_ratios=(),
)
Kernels = Mapping[str, tuple[Kernel, ...]]


@pytest.fixture(scope="module")
def device() -> CpuDevice:
    return CpuDevice()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, device: CpuDevice) -> Model:
    out = tmp_path_factory.mktemp("plan") / "tiny"
    init_checkpoint(CONFIG, out)
    want = Wanted(torch.float32)
    weights, _ = load_weights(CONFIG, Checkpoint.open(out), want, device)
    return Model.build(CONFIG, weights, Numerics(torch.float32), device.device)


@pytest.fixture(scope="module")
def state(device: CpuDevice) -> State:
    return State(CONFIG, LIMITS, torch.float32, device)


@pytest.fixture(scope="module")
def traceable(model: Model, state: State) -> Traceable:
    return Traceable.of(model, LIMITS, state)


@pytest.fixture(scope="module")
def bound(traceable: Traceable) -> Callable[..., Plan]:
    """``bound(kernel, …, strict=…)``: the model bound to a backend that has these kernels."""
    return lambda *kernels, **how: bind(traceable, "fake", by_operator(kernels), "fake-1", **how)


def by_operator(kernels: Iterable[Kernel]) -> Kernels:
    out: dict[str, tuple[Kernel, ...]] = {}
    for k in kernels:
        out[k.operator] = (*out.get(k.operator, ()), k)
    return out


def decode(plan: Plan, model: Model, state: State, steps: int = 1) -> Tensor:
    """Logits after ``steps`` tokens of a fresh sequence, one a step, under the plan."""
    seq = state.open()
    try:
        for i in range(steps):
            batch = [(seq, [7 * i + 3])]
            step = state.prepare(batch)
            with plan.active(plan.bucket("decode", 1)), torch.inference_mode():
                out = models.forward(model, state.caches, step)
            state.commit(batch)
    finally:
        state.close(seq)
    return out


def chosen(plan: Plan, operator: str) -> dict[str, set[str]]:
    """Bucket -> who serves ``operator`` there."""
    out: dict[str, set[str]] = {}
    for bucket, decisions in plan.ledger.items():
        out[str(bucket)] = {d.chosen for (name, _), d in decisions.items() if name == operator}
    return out


# kernels of the fake backend: right ones unless said otherwise


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


NORM = kernel("rms_norm", priority=1)(norm)


def narrow_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return norm(x, weight, eps)


def experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:
    out: Tensor = OPERATORS["moe_experts"].reference(x, ids, weights, w13, w2, limit)
    return out


# wrong ones


def attend(x: Tensor, freqs: Tensor, kind: str, w: Any, cache: Any, s: Any, g: Any) -> Tensor:  # noqa: ARG001
    return x


def collapse(streams: Tensor, pre: Tensor) -> Tensor:  # noqa: ARG001
    return streams[:, 0]


def lazy(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # noqa: ARG001
    return x


def delegates(x: Tensor, ids: Tensor, weights: Tensor, w13: Weight, w2: Weight, limit: float) -> Tensor:  # noqa: ARG001
    order, _ = moe_sort(ids, w13.data.shape[0])
    return moe_combine(x[order // ids.shape[1]], order, x.shape[0])


@pytest.fixture(scope="module")
def plain(bound: Callable[..., Plan]) -> Plan:
    """No kernel at all."""
    return bound()


@pytest.fixture(scope="module")
def normed(bound: Callable[..., Plan]) -> Plan:
    """One kernel, which serves every norm."""
    return bound(NORM)


# --- buckets and decisions


def test_buckets_cover_every_step_once(traceable: Traceable) -> None:
    buckets = traceable.buckets()
    for phase, most in (("decode", LIMITS.max_batch_size), ("prefill", LIMITS.max_step_tokens)):
        for tokens in range(1, most + 1):
            assert sum(b.phase == phase and b.low <= tokens <= b.high for b in buckets) == 1


def test_without_kernels_references_serve_and_composites_are_entered(plain: Plan) -> None:
    for operator in ("decoder_layer", "attention", "moe", "moe_experts", "linear_fp8", "hc_enter", "compress_entries"):
        assert all(by == {"parts"} for by in chosen(plain, operator).values()), operator
    for operator in ("rms_norm", "matmul_fp8", "grouped_matmul_fp4", "sparse_attention", "index_topk", "sample"):
        assert all(by == {"reference"} for by in chosen(plain, operator).values()), operator


def test_fallbacks_are_listed_with_reasons_and_warned_of_once(
    bound: Callable[..., Plan], caplog: pytest.LogCaptureFixture
) -> None:
    picky = kernel("rms_norm", claim=Claim(dtypes={"x": (torch.bfloat16,)}))(narrow_norm)
    with caplog.at_level(logging.WARNING, "hal"):
        plan = bound(picky)
    assert plan.fallbacks()["rms_norm"].why().endswith("narrow_norm: dtype: x is float32, claimed bfloat16")
    assert plan.fallbacks()["rope"].why() == "no kernel registered"
    assert not {"attention", "moe_experts"} & set(plan.fallbacks())
    assert len(caplog.records) == 1
    for operator in plan.fallbacks():
        assert operator in caplog.text


def test_a_kernel_serves_its_operator_in_every_bucket(normed: Plan) -> None:
    plan = normed
    assert all(by == {NORM.name} for by in chosen(plan, "rms_norm").values())
    assert "rms_norm" not in plan.fallbacks()


def test_of_two_kernels_the_higher_priority_serves(bound: Callable[..., Plan]) -> None:
    low = kernel("rms_norm", priority=0)(narrow_norm)
    assert set.union(*chosen(bound(low, NORM), "rms_norm").values()) == {NORM.name}


def test_a_tie_is_an_error_that_names_both(bound: Callable[..., Plan]) -> None:
    other = kernel("rms_norm", priority=1)(narrow_norm)
    with pytest.raises(ContractError, match=r"rms_norm: kernels .*norm and .*narrow_norm tie at priority 1"):
        bound(NORM, other)


def test_kernels_that_never_meet_do_not_tie(bound: Callable[..., Plan]) -> None:
    """Same priority, claims apart: hidden states 256 wide and rows of 128."""
    wide = kernel("rms_norm", claim=Claim(axes={"D": Range(min=200)}))(norm)
    narrow = kernel("rms_norm", claim=Claim(axes={"D": Range(max=199)}))(narrow_norm)
    assert all(by == {wide.name, narrow.name} for by in chosen(bound(wide, narrow), "rms_norm").values())


def test_a_step_switches_by_constant_axes(bound: Callable[..., Plan], model: Model, state: State, plain: Plan) -> None:
    """A kernel for width 256 only: other widths run the reference, each call its own."""
    wide = kernel("rms_norm", claim=Claim(axes={"D": Range(min=256, max=256)}))(norm)
    plan = bound(wide)
    assert torch.equal(decode(plan, model, state), decode(plain, model, state))
    calls = {r.chosen: r.calls for r in plan.receipts.rows() if r.operator == "rms_norm"}
    assert calls == {wide.name: 2 * 3 + 1, "reference": 2 * 3 + 3}  # sites and head; queries, keys and compressors


def test_a_claimed_composite_serves_whole_and_its_parts_are_not_planned(
    bound: Callable[..., Plan], model: Model, state: State, plain: Plan
) -> None:
    claimed = kernel("moe_experts")(experts)
    plan = bound(claimed)
    assert all(by == {claimed.name} for by in chosen(plan, "moe_experts").values())
    assert not set.union(*chosen(plan, "moe_sort").values())
    assert torch.equal(decode(plan, model, state), decode(plain, model, state))


def test_a_composite_is_claimed_per_kind_of_layer(bound: Callable[..., Plan]) -> None:
    """``kind`` is a scalar of the call: a kernel may refuse all but sliding layers."""

    def only_sliding(call: Call) -> Iterable[Reason]:
        if call.scalars["kind"] != "sliding":
            yield Reason("kind", f"{call.scalars['kind']} layers are not served")

    claimed = kernel("attention", refuse=only_sliding)(attend)
    for decisions in bound(claimed).ledger.values():
        by_kind = {d.call.scalars["kind"]: d for (name, _), d in decisions.items() if name == "attention"}
        assert {k: d.chosen for k, d in by_kind.items()} == {"sliding": claimed.name, "csa": "parts", "hca": "parts"}
        assert "kind: csa layers are not served" in by_kind["csa"].why()


def test_a_kernel_that_refuses_one_edge_of_a_bucket_serves_none_of_it(bound: Callable[..., Plan]) -> None:
    """Refusing one token costs it the buckets that start at one, and no other."""

    def no_single_row(call: Call) -> Iterable[Reason]:
        if call.axes["T"] == 1:
            yield Reason("one-token", "a single token is not served")

    def rotate(x: Tensor, positions: Tensor, freqs: Tensor, inverse: bool = False) -> Tensor:
        out: Tensor = OPERATORS["rope"].reference(x, positions, freqs, inverse)
        return out

    # only attention's own rotations, so that T is the step's tokens
    k = kernel("rope", claim=Claim(axes={"H": Range(min=8)}), refuse=no_single_row)(rotate)
    for bucket, decisions in bound(k).ledger.items():
        by = {d.chosen for (name, _), d in decisions.items() if name == "rope" and d.call.axes["H"] >= 8}
        assert by == ({"reference"} if bucket.low == 1 else {k.name}), bucket


def test_the_edge_refusal_is_a_reason(bound: Callable[..., Plan]) -> None:
    def no_single_row(call: Call) -> Iterable[Reason]:
        return [Reason("one-token", "no")] if call.axes["T"] == 1 else []

    plan = bound(kernel("hc_pre", refuse=no_single_row)(collapse))
    decisions = plan.ledger[Bucket("prefill", 1, 16)]
    why = next(d.why() for (name, _), d in decisions.items() if name == "hc_pre")
    assert "bucket-edge: refuses the other end of the bucket" in why


# --- strict and budget


def test_strict_names_every_operator_without_kernel(bound: Callable[..., Plan], normed: Plan) -> None:
    missing = set(normed.fallbacks())
    with pytest.raises(NoKernelError, match="--strict") as e:
        bound(NORM, strict=True)
    for operator in missing:
        assert re.search(rf"\b{operator} \(", str(e.value))
    assert not re.search(r"\brms_norm \(", str(e.value))


def test_a_fallback_budget_is_an_upper_bound(bound: Callable[..., Plan], plain: Plan) -> None:
    count = len(plain.fallbacks())
    assert bound(fallback_budget=count).fallbacks()
    with pytest.raises(NoKernelError, match=f"--fallback-budget: {count} operators .* allowed {count - 1}: "):
        bound(fallback_budget=count - 1)


# --- plan files


def test_a_saved_plan_reads_back_and_serves_again(bound: Callable[..., Plan], tmp_path: Path, normed: Plan) -> None:
    plan = normed
    written = save(plan, tmp_path / "plan.json")
    body = load(tmp_path / "plan.json")
    assert body["digest"] == written == digest(body)
    assert not diff(body, to_dict(bound(NORM, pinned=body)))
    assert [f.name for f in tmp_path.iterdir()] == ["plan.json"]


def test_binding_again_gives_the_same_digest(bound: Callable[..., Plan], plain: Plan, normed: Plan) -> None:
    assert to_dict(bound(NORM))["digest"] == to_dict(normed)["digest"]
    assert to_dict(normed)["digest"] != to_dict(plain)["digest"]


def test_two_plans_differ_where_their_kernels_do(plain: Plan, normed: Plan) -> None:
    lines = diff(to_dict(plain), to_dict(normed))
    assert lines
    for line in lines:
        assert " rms_norm: reference@- -> " in line
        assert f"{NORM.name}@{NORM.source_hash}" in line


def test_a_tampered_plan_file_is_refused(tmp_path: Path, normed: Plan) -> None:
    path = tmp_path / "plan.json"
    save(normed, path)
    body = json.loads(path.read_text())
    next(e for e in body["buckets"]["decode:1-1"] if e["operator"] == "rms_norm")["chosen"] = "reference"
    path.write_text(json.dumps(body))
    with pytest.raises(UsageError, match=r"plan file .*plan\.json: digest .* is not that of the content"):
        load(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "write one with hal plan --save"),
        ("[]", "plan version 'list'"),
        ('{"version": 99}', "version 99, right is 1"),
    ],
)
def test_what_is_no_plan_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UsageError, match=f"plan file .*: .*{message}"):
        load(path)


def test_a_missing_plan_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"plan file .*none\.json"):
        load(tmp_path / "none.json")


def test_a_pinned_kernel_that_is_gone_is_refused(bound: Callable[..., Plan], normed: Plan) -> None:
    pinned = to_dict(normed)
    with pytest.raises(NoKernelError, match=r"plan file: rms_norm is pinned to .*:norm, but no kernel registered"):
        bound(pinned=pinned)


def test_a_pinned_plan_serves_the_pinned_kernel_though_a_better_one_came(
    bound: Callable[..., Plan], normed: Plan
) -> None:
    better = kernel("rms_norm", priority=9)(narrow_norm)
    plan = bound(NORM, better, pinned=to_dict(normed))
    assert set.union(*chosen(plan, "rms_norm").values()) == {NORM.name}
    newcomer = kernel("hc_pre")(collapse)
    assert set.union(*chosen(bound(NORM, newcomer, pinned=to_dict(normed)), "hc_pre").values()) == {"reference"}


def test_a_pinned_kernel_whose_source_changed_is_refused(bound: Callable[..., Plan], normed: Plan) -> None:
    pinned = to_dict(normed)
    for entries in pinned["buckets"].values():
        for entry in entries:
            if entry["operator"] == "rms_norm":
                entry["source_hash"] = "0" * 16
    with pytest.raises(NoKernelError, match=r"--plan: the saved plan cannot be served here: .*rms_norm: .*@0{16} -> "):
        bound(NORM, pinned=pinned)


@pytest.mark.parametrize(("field", "value"), [("backend", "other"), ("arch", "fake-2")])
def test_a_plan_of_another_backend_or_architecture_is_refused(
    bound: Callable[..., Plan], field: str, value: str, normed: Plan
) -> None:
    with pytest.raises(NoKernelError, match=f"{field}: {value} -> fake"):
        bound(NORM, pinned=to_dict(normed) | {field: value})


def test_a_plan_for_other_limits_is_refused(model: Model, device: CpuDevice, plain: Plan) -> None:
    limits = Limits(8, 256, 64)
    wider = Traceable.of(model, limits, State(CONFIG, limits, torch.float32, device))
    with pytest.raises(NoKernelError, match="decode:5-8"):
        bind(wider, "fake", {}, "fake-1", pinned=to_dict(plain))


# --- steps under a plan


def test_a_plan_gives_the_bits_of_the_references(model: Model, state: State, plain: Plan) -> None:
    seq = state.open()
    checked = models.forward(model, state.caches, state.prepare([(seq, [3])]))
    state.close(seq)
    assert torch.equal(decode(plain, model, state), checked)


def test_receipts_count_calls(bound: Callable[..., Plan], model: Model, state: State) -> None:
    plan = bound(NORM)
    decode(plan, model, state, steps=2)
    calls = {(r.operator, r.via): r.calls for r in plan.receipts.rows()}
    assert calls["decoder_layer", "parts"] == 2 * 3
    assert calls["rms_norm", "kernel"] == 2 * (3 * 4 + 3 + 1)  # sites, query and key; compressors; head
    assert calls["lm_head", "parts"] == 2
    references = sum(n for (_, via), n in calls.items() if via == "reference")
    assert plan.receipts.fallback_calls() == references > 0
    plan.receipts.reset()
    assert not plan.receipts.rows()


def test_steps_look_nothing_up(bound: Callable[..., Plan], model: Model, state: State) -> None:
    plan = bound(NORM)
    decode(plan, model, state, steps=10)
    assert plan.lookups == 0
    bound(NORM)
    assert plan.lookups > 0, "the counter must be able to move"


def test_a_bucket_that_is_not_in_the_plan_is_refused(plain: Plan) -> None:
    assert str(plain.bucket("prefill", 17)) == "prefill:17-64"
    for phase, tokens in (("prefill", 65), ("decode", 5), ("decode", 0), ("warmup", 1)):
        with pytest.raises(UsageError, match=f"{phase} step of {tokens} tokens: the plan's buckets are decode:1-1, "):
            plain.bucket(phase, tokens)


def test_a_call_that_was_not_traced_is_refused(plain: Plan) -> None:
    untraced = r"operator linear_int8 was not in the plan at .*; bind did not trace it"
    with plain.active(Bucket("decode", 1, 1)), pytest.raises(ContractError, match=untraced):
        OPERATORS["linear_int8"](torch.ones(1, 8), torch.ones(4, 8, dtype=torch.int8), torch.ones(4))


def test_an_untraced_width_of_a_switched_operator_is_refused(bound: Callable[..., Plan]) -> None:
    plan = bound(kernel("rms_norm", claim=Claim(axes={"D": Range(min=256, max=256)}))(norm))
    with (
        plan.active(Bucket("decode", 1, 1)),
        pytest.raises(ContractError, match="rms_norm was not in the plan at N=1 D=8"),
    ):
        rms_norm(torch.ones(1, 8), torch.ones(8), 1e-6)


# --- watermark


def test_the_watermark_marks_what_a_kernel_produced(bound: Callable[..., Plan]) -> None:
    plan = bound(NORM, watermark=True)
    with plan.active(Bucket("decode", 1, 1)):
        out = rms_norm(torch.ones(1, 256), torch.ones(256), 1e-6)
    assert out.hal_kernel == NORM.name  # type: ignore[attr-defined]


def test_a_whole_step_runs_under_the_watermark(
    bound: Callable[..., Plan], model: Model, state: State, normed: Plan
) -> None:
    plan = bound(NORM, watermark=True)
    assert torch.equal(decode(plan, model, state, steps=3), decode(normed, model, state, steps=3))


def test_the_watermark_catches_a_kernel_that_calls_an_operator(
    bound: Callable[..., Plan], model: Model, state: State
) -> None:
    claimed = kernel("moe_experts")(delegates)
    plan = bound(claimed, watermark=True)
    with pytest.raises(ContractError, match=r"kernel .*delegates of moe_experts calls operator moe_sort"):
        decode(plan, model, state)


def test_the_watermark_catches_a_kernel_that_returns_its_input(
    bound: Callable[..., Plan], model: Model, state: State
) -> None:
    plan = bound(kernel("rms_norm")(lazy), watermark=True)
    with pytest.raises(ContractError, match=r"kernel .*lazy of rms_norm returns an argument as its output"):
        decode(plan, model, state)


def test_without_the_watermark_such_a_kernel_goes_unseen(
    bound: Callable[..., Plan], model: Model, state: State, plain: Plan
) -> None:
    """Why the mode exists: numbers are wrong and nothing complains."""

    wrong = decode(bound(kernel("rms_norm")(lazy)), model, state)
    assert not torch.allclose(wrong, decode(plain, model, state), atol=0.1)
