"""The ledger of a plan as rows: operator, where, who serves it, evidence, cost, and every reason against the others."""

from __future__ import annotations

import difflib
from typing import Any

from hal.errors import UsageError
from hal.operator import OPERATORS
from hal.plugins import load_operators
from hal_model.config import ModelConfig
from hal_model.session import plan_only
from hal_model.settings import Settings


def explain_rows(
    settings: Settings, config: ModelConfig, operator: str | None, shape: str | None
) -> list[dict[str, Any]]:
    """Decisions of the model's plan, of one operator or all, at the axes of ``shape`` or all.

    Raises:
        UsageError: unknown operator, a shape that is not ``AXIS=SIZE,…``, or an axis that no chosen operator has.
    """
    load_operators()
    if operator is not None and operator not in OPERATORS:
        near = difflib.get_close_matches(operator, OPERATORS, 1)
        hint = f"did you mean {near[0]}?" if near else "see hal ops"
        raise UsageError(f"operator {operator!r} is unknown; {hint}")
    wanted = parse_shape(shape)
    choice, plan = plan_only(settings, config)
    calls = [d.call for decisions in plan.ledger.values() for d in decisions.values()]
    known = {axis: None for c in calls if operator in (None, c.operator) for axis in c.axes}
    strange = [axis for axis in wanted if known and axis not in known]
    if strange:
        raise UsageError(f"--shape {shape!r}: no axis {strange[0]} here, right is one of {', '.join(known)}")
    rows = []
    for bucket, decisions in plan.ledger.items():
        for d in decisions.values():
            if operator in (None, d.operator) and all(d.call.axes.get(a) == v for a, v in wanted.items()):
                rows.append({"backend": choice.backend.name, "bucket": str(bucket), **d.as_dict()})
    return sorted(rows, key=lambda r: (list(OPERATORS).index(r["operator"]), r["bucket"]))


def parse_shape(text: str | None) -> dict[str, int]:
    """``"T=1,N=1024"`` -> axes.

    Raises:
        UsageError: another form.
    """
    axes = {}
    for part in filter(None, (text or "").split(",")):
        name, equals, size = part.partition("=")
        if not name.strip() or not equals or not size.strip().isdecimal():
            raise UsageError(f"--shape {text!r}: {part!r}, right is AXIS=SIZE, separated by commas")
        axes[name.strip()] = int(size)
    return axes


def render(rows: list[dict[str, Any]]) -> str:
    """Rows for a terminal: one line per operator and choice, the reasons of those refused below it."""
    if not rows:
        return "no operator of the plan matches"
    lines, width = [], max(len(r["operator"]) for r in rows)
    seen: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in rows:
        seen.setdefault((r["operator"], r["chosen"]), []).append(r)
    for (name, chosen), group in seen.items():
        buckets = sorted({r["bucket"] for r in group})
        where = "every bucket" if len(buckets) == len({r["bucket"] for r in rows}) else ", ".join(buckets)
        lines.append(f"{name:<{width}}  {chosen}  [{group[0]['evidence']}]  {where}")
        reasons = {(x["kernel"], reason) for r in group for x in r["refused"] for reason in x["reasons"]}
        lines += [f"{'':<{width}}    not {kernel}: {reason}" for kernel, reason in sorted(reasons)]
    return "\n".join(lines)
