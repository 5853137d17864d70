"""The contract text of an operator: parsed once, it validates calls, binds axes and predicts outputs (hal.contract).

Toy contracts show the notation; then every declared operator is held to its own contract on every quick sample.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import hal_ops
from hal.contract import Call, Contract, Dim, TensorMeta, flatten
from hal.errors import ContractError, InputError
from hal.operator import LEVELS, OPERATORS, Judge, Operator, Sample, operator
from hal_ops.samples import digest

EVERY = pytest.mark.parametrize(
    "name", sorted(n for n, op in OPERATORS.items() if op.__module__.startswith("hal_ops."))
)
BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64


@dataclass(frozen=True)
class Pair:
    """A dataclass argument, as weights are."""

    data: Tensor
    scale: Tensor | None = None
    kind: str = "plain"


def toy(x: Tensor, weight: Tensor, k: int = 2) -> Tensor:
    """An operator body for contracts on two tensors and an integer."""
    return x[:, :k] + weight.sum()


def lookup(x: Tensor, extra: Tensor | None = None) -> Tensor:
    """An operator body with an optional tensor."""
    return x if extra is None else x + extra


def held(x: Tensor, pair: Pair, dtype: torch.dtype) -> Tensor:
    """An operator body with a dataclass argument and a named dtype."""
    return (x @ pair.data.T).to(dtype)


TOY = Contract.parse(toy, "x[T,D]:act, weight[2*D,ceil(D,128)]:f32 -> y[T,k]:x")


def refused(contract: Contract, *args: Any, **kwargs: Any) -> str:
    """The message of the one error that the call gives."""
    with pytest.raises(InputError) as caught:
        contract.call(args, kwargs)
    return str(caught.value)


def call_of(*args: Any, contract: Contract = TOY, **kwargs: Any) -> Call:
    return contract.call(args, kwargs)


# The notation -------------------------------------------------------------------------------------------------------


def test_a_contract_parses_into_patterns() -> None:
    assert [p.text() for p in TOY.inputs] == ["x[T,D]", "weight[2*D,ceil(D,128)]"]
    assert [(p.text(), p.dtypes) for p in TOY.outputs] == [("y[T,k]", "x")]
    parsed = Contract.parse(lookup, "x[N*,D]:act|int, extra[D]:any? -> y[N*,D]:x")
    assert [p.text() for p in parsed.inputs] == ["x[N*,D]", "extra[D]"]
    assert [p.optional for p in parsed.inputs] == [False, True]
    assert Contract.parse(lookup, "x[]:f32 ->").outputs == ()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x[T,D]:act", "has no '->'"),
        ("x[T,D] -> y[T]:x", "cannot be parsed at"),
        ("x(T):act -> y[T]:x", "cannot be parsed at"),
        ("z[T]:act -> y[T]:z", "operator toy: contract names 'z', which is no parameter"),
    ],
)
def test_a_wrong_contract_is_refused_when_it_is_declared(text: str, words: str) -> None:
    with pytest.raises(ContractError, match=words.replace("(", r"\(")):
        Contract.parse(toy, text)


@pytest.mark.parametrize(
    ("text", "scope", "size"),
    [
        ("T", {"T": 7}, 7),
        ("2*D", {"D": 5}, 10),
        ("ceil(D,128)", {"D": 129}, 2),
        ("S*(S+2)", {"S": 4}, 24),
        ("W//lanes", {"W": 9, "lanes": 2}, 4),
        ("max(T,1)", {"T": 0}, 1),
        ("3", {}, 3),
    ],
)
def test_a_dimension_is_a_name_or_an_expression(text: str, scope: dict[str, int], size: int) -> None:
    assert Dim.parse(text).value(scope) == size


def test_expressions_reach_nothing_but_axes() -> None:
    with pytest.raises(NameError):
        Dim.parse("open('x')").value({})


# Calls --------------------------------------------------------------------------------------------------------------


def test_axes_bind_to_the_first_argument_that_shows_them() -> None:
    call = call_of(torch.zeros(3, 130), torch.zeros(260, 2), 5)
    assert call.operator == "toy"
    assert call.axes == {"T": 3, "D": 130}
    assert call.scalars == {"k": 5}
    assert call.describe() == "T=3 D=130 | x:float32 weight:float32 | k=5"
    assert TOY.output_metas(call) == (((3, 5), F32),)


def test_defaults_and_keywords_count_as_given() -> None:
    call = call_of(weight=torch.zeros(8, 1), x=torch.zeros(0, 4, dtype=BF16))
    assert call.axes == {"T": 0, "D": 4}
    assert TOY.output_metas(call) == (((0, 2), BF16),)


def test_leading_dimensions_fold_into_one_axis_and_unfold_in_the_output() -> None:
    contract = Contract.parse(lookup, "x[N*,D]:act -> y[N*,D//2]:x")
    for shape in ((6,), (5, 6), (2, 5, 6), (0, 5, 6)):
        call = call_of(torch.zeros(shape), contract=contract)
        assert call.axes == {"N": math.prod(shape[:-1]), "D": 6}
        assert contract.output_metas(call) == (((*shape[:-1], 3), F32),)
    assert refused(contract, torch.zeros(())) == "lookup: x has shape [], right is x[N*,D]"


def test_an_optional_tensor_may_be_none_and_is_checked_when_given() -> None:
    contract = Contract.parse(lookup, "x[T]:act, extra[T]:f32? -> y[T]:x")
    assert call_of(torch.zeros(4), contract=contract).axes == {"T": 4}
    assert call_of(torch.zeros(4), torch.zeros(4), contract=contract).tensors.keys() == {"x", "extra"}
    words = refused(contract, torch.zeros(4), torch.zeros(5))
    assert words == "lookup: extra[T] has shape [5]; axis 0 (T) should be 4"


def test_a_dataclass_argument_is_named_field_by_field() -> None:
    contract = Contract.parse(held, "x[T,K]:act, pair.data[N,K]:act, pair.scale[N]:f32? -> y[T,N]:dtype")
    pair = Pair(torch.zeros(3, 8, dtype=BF16))
    call = call_of(torch.zeros(2, 8), pair, BF16, contract=contract)
    assert call.tensors.keys() == {"x", "pair.data"}
    assert call.scalars == {"pair.scale": None, "pair.kind": "plain", "dtype": BF16}
    assert contract.output_metas(call) == (((2, 3), BF16),)
    words = refused(contract, torch.zeros(2, 8), Pair(torch.zeros(3, 9)), BF16)
    assert words == "held: pair.data[N,K] has shape [3, 9]; axis 1 (K) should be 8"
    assert flatten("pair", pair)["pair.data"] == TensorMeta((3, 8), (8, 1), BF16, "cpu")


def test_a_double_precision_operand_makes_float32_outputs_double() -> None:
    contract = Contract.parse(lookup, "x[T]:f32 -> y[T]:f32")
    assert contract.output_metas(call_of(torch.zeros(2), contract=contract)) == (((2,), F32),)
    double = call_of(torch.zeros(2, dtype=torch.float64), contract=contract)
    assert contract.output_metas(double) == (((2,), torch.float64),)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ((torch.zeros(3, 4), torch.zeros(8)), "toy: weight has shape [8], right is weight[2*D,ceil(D,128)]"),
        ((torch.zeros(3, 4), torch.zeros(9, 1)), "weight[2*D,ceil(D,128)] has shape [9, 1]; axis 0 (2*D) should be 8"),
        ((torch.zeros(3, 4), torch.zeros(8, 2)), "[8, 2]; axis 1 (ceil(D,128)) should be 1"),
        ((torch.zeros(3, 4, dtype=I64), torch.zeros(8, 1)), "toy: x is int64, right is act"),
        ((torch.zeros(3, 4), torch.zeros(8, 1, dtype=BF16)), "toy: weight is bfloat16, right is f32"),
        ((torch.zeros(3, 4), None), "toy: weight is NoneType, right is a tensor weight[2*D,ceil(D,128)] of f32"),
        ((torch.zeros(3, 4), [[1.0]]), "toy: weight is list, right is a tensor weight[2*D,ceil(D,128)] of f32"),
        ((torch.zeros(3, 4),), "toy: missing a required argument: 'weight'; the signature is toy(x: "),
    ],
)
def test_an_error_names_operator_argument_seen_and_right(args: tuple[Any, ...], words: str) -> None:
    assert words in refused(TOY, *args)


def test_metadata_knows_dense_and_strided_tensors() -> None:
    base = torch.zeros(4, 6)
    assert TensorMeta.of(base).contiguous
    assert not TensorMeta.of(base.T).contiguous
    assert not TensorMeta.of(base[:, :3]).contiguous
    assert TensorMeta.of(base[:, :3]).rows
    assert not TensorMeta.of(base.T).rows
    assert TensorMeta.of(base[:0].T).contiguous
    assert TensorMeta.of(base[:, :1].T).contiguous == base[:, :1].T.is_contiguous()
    assert TensorMeta.of(base[:, :3]).nbytes == 48


# Declarations -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "level", "words"),
    [("rms_norm", "primitive", "operator rms_norm is declared twice"), ("fresh", "huge", "level 'huge' is none of")],
)
def test_a_declaration_that_cannot_stand_is_refused(name: str, level: Any, words: str) -> None:
    def body(x: Tensor) -> Tensor:
        return x

    body.__name__ = name
    before = list(OPERATORS)
    with pytest.raises(ContractError, match=words):
        operator("x[T]:act -> y[T]:x", level=level, judge=Judge("exact"))(body)
    assert list(OPERATORS) == before


def test_every_public_operator_of_the_package_is_declared() -> None:
    public = {n for n in hal_ops.__all__ if isinstance(getattr(hal_ops, n), Operator)}
    assert public == {n for n, op in OPERATORS.items() if op.__module__.startswith("hal_ops.")}
    assert {OPERATORS[n].index for n in OPERATORS} == set(range(len(OPERATORS)))


def test_a_call_through_an_operator_is_validated() -> None:
    with pytest.raises(InputError, match=r"rms_norm: weight\[D\] has shape \[5\]; axis 0 \(D\) should be 4"):
        hal_ops.rms_norm(torch.zeros(2, 4), torch.ones(5), 1e-6)


# Every operator -----------------------------------------------------------------------------------------------------


def leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of an argument with its name."""
    if isinstance(value, Tensor):
        yield name, value
    elif is_dataclass(value):
        for f in fields(value):
            yield from leaves(f"{name}.{f.name}", getattr(value, f.name))


def prints(op: Operator[..., Any], args: tuple[Any, ...]) -> dict[str, int]:
    """A fingerprint of the bytes of every tensor argument."""
    bound = op.contract.signature.bind(*args).arguments
    return {n: digest([t]) for name, value in bound.items() for n, t in leaves(name, value)}


def outputs_of(result: Any) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def quick(name: str) -> list[Sample]:
    return [s for s in OPERATORS[name].samples() if not s.full]


Metas = list[tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True)
class Run:
    """What one run of a reference on one sample showed."""

    sample: Sample
    call: Call
    digest: int
    changed: frozenset[str]
    outputs: Metas
    shares: bool


def metas(results: tuple[Tensor, ...]) -> Metas:
    return [(tuple(r.shape), r.dtype) for r in results]


def run(op: Operator[..., Any], sample: Sample) -> Run:
    args = sample.make()
    call, before, crc = op.contract.call(args, {}), prints(op, args), digest(args)
    results = outputs_of(op.reference(*args))
    changed = frozenset(n for n, now in prints(op, args).items() if now != before[n])
    own = {t.untyped_storage().data_ptr() for a in args for _, t in leaves("", a) if t.numel()}
    shares = any(r.untyped_storage().data_ptr() in own for r in results if r.numel())
    return Run(sample, call, crc, changed, metas(results), shares)


@cache
def runs(name: str) -> tuple[Run, ...]:
    """Every quick sample of an operator, run once for all tests."""
    return tuple(run(OPERATORS[name], s) for s in quick(name))


@EVERY
def test_the_shape_rule_is_the_real_output(name: str) -> None:
    for r in runs(name):
        assert r.outputs == list(OPERATORS[name].contract.output_metas(r.call)), r.sample.id


@EVERY
def test_declared_arguments_are_written_and_nothing_else_is(name: str) -> None:
    assert frozenset().union(*(r.changed for r in runs(name))) == set(OPERATORS[name].writes)


@EVERY
def test_outputs_never_share_memory_with_arguments(name: str) -> None:
    assert [r.sample.id for r in runs(name) if r.shares] == []


@EVERY
def test_fake_outputs_follow_the_shape_rule_without_memory(name: str) -> None:
    op = OPERATORS[name]
    for r in runs(name):
        meta = outputs_of(op.fake_outputs(r.call, torch.device("meta")))
        assert metas(meta) == r.outputs
        assert all(t.is_meta for t in meta)
    with FakeTensorMode():
        fake = [metas(outputs_of(op.fake_outputs(r.call, torch.device("cpu")))) for r in runs(name)]
    assert fake == [r.outputs for r in runs(name)]


@EVERY
def test_a_contract_reads_fake_arguments_as_it_reads_real_ones(name: str) -> None:
    r = next(r for r in reversed(runs(name)) if all(r.sample.axes.values()))
    args, mode = r.sample.make(), FakeTensorMode()
    fake = tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args)
    assert OPERATORS[name].contract.call(fake, {}) == r.call


@EVERY
def test_samples_have_unique_ids_and_cover_empty_work(name: str) -> None:
    op = OPERATORS[name]
    ids = [s.id for s in op.samples()]
    assert len(ids) == len(set(ids))
    empty = [r for r in runs(name) if r.call.axes[op.variable[0]] == 0]
    assert empty, f"no quick sample with {op.variable[0]} = 0"
    if "T" in {d.text for p in op.contract.inputs for d in p.dims}:
        assert any(r.call.axes["T"] == 0 for r in runs(name))


@EVERY
def test_making_a_sample_again_gives_the_same_bytes(name: str) -> None:
    for r in runs(name):
        if sum(m.nbytes for m in r.call.tensors.values()) <= 2**21:
            assert digest(r.sample.make()) == r.digest, r.sample.id


@EVERY
def test_two_samples_never_hold_the_same_bytes(name: str) -> None:
    """A family or a set of axes that draws the bytes of another one tests nothing new."""
    full = [r for r in runs(name) if all(r.sample.axes.values())]
    assert len({r.digest for r in full}) == len(full)


@EVERY
def test_cost_and_judging_rule_fit_the_contract(name: str) -> None:
    op = OPERATORS[name]
    assert op.level in LEVELS
    assert (op.level != "primitive") == op.composite
    assert set(op.writes) <= set(op.contract.signature.parameters)
    assert set(op.variable) <= {d.text for p in op.contract.inputs for d in p.dims if d.code is None}
    for r in runs(name):
        cost = op.cost(r.call)
        scope = {k: v for k, v in r.call.scalars.items() if isinstance(v, int)} | dict(r.call.axes)
        assert Dim.parse(op.judge.reduction).value(scope) >= 0
        if all(r.sample.axes.values()):
            assert cost.bytes > 0
            assert all(math.isfinite(v) and v >= 0 for v in cost.flops.values())
            assert Dim.parse(op.judge.reduction).value(scope) >= 1
