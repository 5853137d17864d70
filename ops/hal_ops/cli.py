"""``hal ops``: the operators and their contracts."""

from __future__ import annotations

import difflib
import json
from typing import Any

import click

from hal.errors import UsageError
from hal.operator import OPERATORS, Operator


def describe(op: Operator[..., Any]) -> dict[str, Any]:
    """An operator's contract as data."""
    contract = op.contract
    return {
        "name": op.name,
        "version": op.version,
        "level": op.level,
        "composite": op.composite,
        "signature": f"{op.name}{contract.signature}",
        "inputs": [p.text() + f":{p.dtypes}" for p in contract.inputs],
        "outputs": [p.text() + f":{p.dtypes}" for p in contract.outputs],
        "writes": list(op.writes),
        "variable": list(op.variable),
        "judge": vars(op.judge),
        "samples": len(op.samples()),
        "summary": (op.__doc__ or "").split("\n")[0],
    }


@click.command()
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True)
def ops(name: str | None, as_json: bool) -> None:
    """List the operators by level, or the whole contract of NAME."""
    from hal.plugins import load_operators

    load_operators()
    if name is not None and name not in OPERATORS:
        near = difflib.get_close_matches(name, OPERATORS, 1)
        raise UsageError(f"operator {name!r} is unknown" + (f"; did you mean {near[0]}?" if near else "; see hal ops"))
    chosen = [describe(op) for op in OPERATORS.values() if name in (None, op.name)]
    if as_json:
        click.echo(json.dumps(chosen, indent=1))
    elif name:
        click.echo(_page(chosen[0], OPERATORS[name]))
    else:
        for o in chosen:
            click.echo(f"{o['name']:<22} {o['level']:<10} {o['summary']}")


def _page(o: dict[str, Any], op: Operator[..., Any]) -> str:
    lines = [f"{o['signature']}", f"level {o['level']}, version {o['version']}, judged: {o['judge']['kind']}"]
    lines += [f"in   {t}" for t in o["inputs"]] + [f"out  {t}" for t in o["outputs"]]
    lines += [f"writes {', '.join(o['writes'])}"] if o["writes"] else []
    return "\n".join([*lines, f"{o['samples']} samples", "", op.__doc__ or ""])
