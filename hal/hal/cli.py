"""The command line ``hal``: its own commands, and those that other packages bring through the group ``hal.commands``.

Every error of :class:`hal.errors.HalError` becomes one line on stderr and the exit code of its class.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from hal import errors
from hal.doctor import Finding, examine, exit_code, judge_backend
from hal.entries import Entry, entries
from hal.errors import BackendError, ContractError, HalError, UsageError
from hal.hookspecs import API_VERSION
from hal.plugin import DeviceInfo
from hal.plugins import Backend, Backends, describe, load
from hal.quiet import captured
from hal.versions import installed

INTERRUPTED = 130
CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 120}


@dataclass(frozen=True)
class Broken:
    """A command of another package that cannot be used, and why."""

    name: str
    error: str


def command_name(entry: Entry) -> str:
    """What a command is called before it is loaded: the entry's name, else its attribute's."""
    return entry.name or entry.value.rpartition(":")[2].replace("_", "-")


def load_command(entry: Entry) -> tuple[click.Command | Broken, list[str]]:
    """Load one command of another package, and what it printed meanwhile; never raises for the package's sake."""
    name = command_name(entry)
    with captured() as printed:
        try:
            found = entry.load()
        # Another package's code: whatever it raises must not take the other commands down.
        except (Exception, SystemExit) as e:  # noqa: BLE001
            return Broken(name, f"{entry.origin}: {describe(e)}"), printed
    if isinstance(found, click.Command):
        return found, printed
    return Broken(name, f"{entry.origin}: is a {type(found).__name__}, right is a click.Command"), printed


class Commands(click.Group):
    """A group that finds the commands of other packages by name and loads one only when it is wanted."""

    def others(self) -> dict[str, Entry | Broken]:
        """Name -> entry of every command that is not hal's own; a name claimed twice is broken."""
        out: dict[str, Entry | Broken] = {}
        for entry in entries("hal.commands", "HAL_COMMANDS"):
            name = command_name(entry)
            rival = out.get(name)
            if name in self.commands:
                out[name] = Broken(name, f"{entry.origin}: hal itself has a command of that name")
            elif rival is not None:
                first = rival.origin if isinstance(rival, Entry) else rival.error
                out[name] = Broken(name, f"two packages bring it: {first}; {entry.origin}")
            else:
                out[name] = entry
        return out

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Every name that can be given."""
        return sorted({*super().list_commands(ctx), *self.others()})

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command; hal's own first. ContractError if it is another package's and broken."""
        own = super().get_command(ctx, name)
        other = self.others().get(name)
        if own is not None or other is None:
            return own
        found, printed = load_command(other) if isinstance(other, Entry) else (other, [])
        for text in printed:
            click.echo(text, err=True)
        if isinstance(found, Broken):
            raise ContractError(f"command {name} is broken: {found.error}; repair or uninstall the package")
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the help's table of commands, then those that are broken, each with its error."""
        rows, broken = [(n, c.get_short_help_str(80)) for n, c in self.commands.items()], []
        for name, other in self.others().items():
            found = load_command(other)[0] if isinstance(other, Entry) else other
            if isinstance(found, Broken):
                broken.append((name, found.error))
            else:
                rows.append((name, found.get_short_help_str(80)))
        for title, table in (("Commands", sorted(rows)), ("Broken commands", broken)):
            if table:
                with formatter.section(title):
                    formatter.write_dl(table)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        """Write the exit codes, read from the error classes."""
        with formatter.section("Exit codes"):
            formatter.write_dl(exit_codes())

    def invoke(self, ctx: click.Context) -> None:
        """Run the command; what it returns is of no meaning, ``ctx.exit`` sets the exit code."""
        super().invoke(ctx)


def exit_codes() -> list[tuple[str, str]]:
    """Code -> causes, from the docstrings of :mod:`hal.errors`; codes that share a number share a row."""
    rows: dict[int, list[str]] = {}
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, HalError) and cls is not HalError:
            rows.setdefault(cls.exit_code, []).append((cls.__doc__ or "").splitlines()[0].replace("``", ""))
    out = [(str(code), " ".join(causes)) for code, causes in sorted(rows.items())]
    first = [("0", "Done."), (str(HalError.exit_code), "Any other error; for doctor, a finding of level error.")]
    return [*first, *out, (str(INTERRUPTED), "Interrupted.")]


def main() -> None:
    """Run the command line and exit; warnings of the framework go to stderr in the form of its errors."""
    logging.basicConfig(format="hal: %(message)s", level=logging.WARNING)
    sys.exit(run(sys.argv[1:]))


def run(args: Sequence[str]) -> int:
    """Run ``hal`` with ``args``; the exit code. An error is one line on stderr, a bug of ours keeps its traceback."""
    try:
        result = cli.main(list(args), prog_name="hal", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except HalError as e:
        return _fail(" ".join(str(e).splitlines()), e.exit_code)
    except click.UsageError as e:
        where = f" (try '{e.ctx.command_path} --help')" if e.ctx else ""
        return _fail(f"{e.format_message()}{where}", UsageError.exit_code)
    except click.ClickException as e:
        return _fail(e.format_message(), e.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED


def _fail(message: str, code: int) -> int:
    click.echo(f"hal: error: {message}", err=True)
    return code


def _show_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"hal-v4 {installed('hal-v4') or 'not installed, run from its source tree'}")
        ctx.exit()


@click.group(cls=Commands, context_settings=CONTEXT, no_args_is_help=True)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show it and exit."
)
def cli() -> None:
    """DeepSeek V4 on many chips: one model, kernels from plugins, proofs from a conformance suite."""


def _json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(command)


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, sort_keys=True))


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns of text, as wide as needed."""
    lines = [tuple(head), *map(tuple, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _devices(backend: Backend) -> tuple[DeviceInfo, ...]:
    return backend.probe.devices if backend.probe else ()


def _device_text(backend: Backend) -> str:
    return ", ".join(f"{d.index}: {d.name} ({d.arch})" for d in _devices(backend)) or "-"


def _counts(backend: Backend) -> Mapping[str, list[str]] | None:
    """Operator -> kernel names after a forced registration; ``None`` for a broken backend, whose errors tell why."""
    try:
        return {op: [k.name for k in kernels] for op, kernels in backend.kernels(force=True).items()}
    except BackendError:
        return None


def _backend_data(backend: Backend, kernels: Mapping[str, list[str]] | None) -> dict[str, Any]:
    return {
        "name": backend.name,
        "state": backend.state,
        "origin": backend.origin,
        "info": asdict(backend.info) if backend.info else None,
        "devices": [vars(d) | {"details": dict(d.details)} for d in _devices(backend)],
        "reasons": list(backend.probe.reasons) if backend.probe else [],
        "errors": list(backend.errors),
        "notes": list(backend.notes),
        "kernels": kernels,
    }


def _kernel_text(kernels: Mapping[str, list[str]] | None) -> str:
    return "-" if kernels is None else f"{sum(map(len, kernels.values()))} for {len(kernels)} operators"


def _backend_lines(backend: Backend, check: bool, kernels: Mapping[str, list[str]] | None) -> list[str]:
    """Everything known of one backend, for people."""
    info = backend.info
    lines = [f"name: {backend.name}", f"state: {backend.state}", f"origin: {backend.origin}"]
    if info:
        lines += [f"{k}: {v}" for k, v in (("vendor", info.vendor), ("description", info.description)) if v]
        lines += [f"maturity: {info.maturity}", f"stands on: {', '.join(info.stands_on) or 'nothing further'}"]
    lines += [f"device: {d.index}: {d.name} ({d.arch}) {_details(d.details)}".rstrip() for d in _devices(backend)]
    lines += [f"reason: {r}" for r in (backend.probe.reasons if backend.probe else ())]
    lines += [f"error: {e}" for e in backend.errors]
    lines += [f"note: {n}" for n in backend.notes]
    return lines + ([f"kernels: {_kernel_text(kernels)}"] if check else [])


def _details(details: Mapping[str, str]) -> str:
    return ", ".join(f"{k} {v}" for k, v in details.items())


def _select(found: Backends, name: str | None) -> list[Backend]:
    if name is None:
        return list(found)
    found.named(name, f"backends {name}")
    return [b for b in found if b.name == name]


@cli.command()
@click.argument("name", required=False)
@_json_option
@click.option(
    "--check", is_flag=True, help="Register the kernels too, on a device or not; exit with 4 if one is broken."
)
@click.pass_context
def backends(ctx: click.Context, name: str | None, as_json: bool, check: bool) -> None:
    """List the backends: state, device, and why not. With NAME, everything known of that one."""
    chosen = _select(load(), name)
    kernels = [_counts(b) if check else None for b in chosen]
    if as_json:
        data = [_backend_data(b, k) for b, k in zip(chosen, kernels, strict=True)]
        _print_json({"api": ".".join(map(str, API_VERSION)), "backends": data})
    elif name is not None:
        parts = ["\n".join(_backend_lines(b, check, k)) for b, k in zip(chosen, kernels, strict=True)]
        click.echo("\n\n".join(parts))
    else:
        _print_table(chosen, check, kernels)
    if check and any(b.state == "broken" for b in chosen):
        ctx.exit(BackendError.exit_code)


def _print_table(chosen: list[Backend], check: bool, kernels: Sequence[Mapping[str, list[str]] | None]) -> None:
    head = ["NAME", "STATE", "DEVICE", *(["KERNELS"] if check else []), "WHY"]
    rows = [
        [b.name, b.state, _device_text(b), *([_kernel_text(k)] if check else []), b.why() or "-"]
        for b, k in zip(chosen, kernels, strict=True)
    ]
    click.echo(table(head, rows))


def _facts() -> dict[str, Any]:
    names = ("hal-v4", "torch", "numpy", "safetensors", "triton", "torch-npu")
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: installed(name) for name in names},
        "backends": {b.name: b.state for b in load()},
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("HAL_")},
    }


@cli.command()
@_json_option
def info(as_json: bool) -> None:
    """Show what a bug report needs: versions, platform, backends, HAL_* variables."""
    facts = _facts()
    if as_json:
        _print_json(facts)
        return
    rows = [("python", facts["python"]), ("platform", facts["platform"])]
    rows += [(k, v or "not installed") for k, v in facts["versions"].items()]
    rows += [(f"backend {k}", v) for k, v in facts["backends"].items()]
    click.echo(table(("WHAT", "VALUE"), [*rows, *facts["environment"].items()]))


def _with_remedy(finding: Finding) -> str:
    return f"{finding.seen} -> {finding.remedy}" if finding.remedy else finding.seen


@cli.command()
@_json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Judge the machine and its software from metadata. Exits with 1 on an error."""
    findings: tuple[Finding, ...] = (*examine(), *map(judge_backend, load()))
    if as_json:
        _print_json({"findings": [asdict(f) for f in findings]})
    else:
        click.echo(table(("LEVEL", "SUBJECT", "SEEN"), [(f.level, f.subject, _with_remedy(f)) for f in findings]))
    ctx.exit(exit_code(findings))
