"""Commands about a model: generate, init-checkpoint, plan, explain."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from hal.errors import UsageError
from hal_model.progress import Bar, report_table
from hal_model.settings import Sampling, Settings, default_of, merge, read_yaml


def _option(name: str, **kwargs: Any) -> Callable[[Any], Any]:
    """A flag whose default comes from the settings; a flag not given stays out of the way of ``--config``."""
    setting = name.lstrip("-").split("/")[0].replace("-", "_")
    default = default_of(setting)
    about = kwargs.pop("help")
    shown = "" if default in (None, (), False) else f" [default: {default}]"
    return click.option(name, setting, default=None, help=about + shown, **kwargs)


def _options(*groups: list[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    def decorate(fn: Any) -> Any:
        for option in reversed([o for group in groups for o in group]):
            fn = option(fn)
        return fn

    return decorate


CONFIG = [
    click.option("--config", "config_file", type=click.Path(path_type=Path), help="YAML file of the same settings.")
]
BACKEND = [_option("--backend", help="auto or the name of a backend (see hal backends).")]
RUN = [
    _option("--dtype", help="Carrier: bfloat16 as released, or float32."),
    _option("--quantised-state/--no-quantised-state", help="Round state rows as trained, or run the structural model."),
    _option("--weight-format", help="auto (what the backend wants), stored, dense or int8."),
    _option("--max-seq-len", type=int, help="Longest sequence, prompt and answer together, in tokens."),
    _option("--max-batch-size", type=int, help="Most sequences at once."),
    _option("--max-step-tokens", type=int, help="Longest prefill chunk, in tokens."),
    _option("--memory-share", type=float, help="Part of the free memory that may be used."),
    _option("--threads", type=int, help="CPU threads."),
    _option("--affinity", help="CPUs to run on, such as 0-3,6."),
    _option("--weight-cache", type=click.Path(path_type=Path), help="Folder that keeps converted weights."),
    _option("--strict", is_flag=True, help="Forbid references: every operator needs a kernel."),
    _option("--fallback-budget", type=int, help="Most operators that may run their reference."),
    _option("--plan", type=click.Path(path_type=Path), help="Serve exactly this plan file, or refuse."),
    _option("--check-values", is_flag=True, help="Decode and judge every weight before running."),
]
SAMPLING = [
    _option("--temperature", type=float, help="0 is greedy."),
    _option("--top-k", type=int, help="Keep the k likeliest tokens; 0 keeps all."),
    _option("--top-p", type=float, help="Keep the likeliest tokens up to this probability."),
    _option("--min-p", type=float, help="Drop tokens below this times the likeliest."),
    _option("--seed", type=int, help="Seed of the first sequence."),
    _option("--repetition-penalty", type=float, help="Divide logits of tokens that occurred; 1 is none."),
    _option("--presence-penalty", type=float, help="Subtract once from tokens that were generated."),
    _option("--frequency-penalty", type=float, help="Subtract per occurrence in the generated text."),
    _option("--max-tokens", type=int, help="Most new tokens per prompt."),
    click.option("--stop", multiple=True, help="Text that ends generation (may be given several times)."),
    _option("--ignore-eos", is_flag=True, help="Go on past the end-of-sentence token."),
]


def _settings(config_file: Path | None, model: Path | None, flags: Mapping[str, Any]) -> Settings:
    given = {k: v for k, v in flags.items() if v is not None and v != ()}
    if model is not None:
        given["model"] = model
    return merge(read_yaml(config_file) if config_file else {}, given)


@click.command()
@click.argument("checkpoint", required=False, type=click.Path(path_type=Path))
@click.option(
    "-p", "--prompt", "prompts", multiple=True, help="Prompt; several run as a batch. [default: standard input]"
)
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the chat format.")
@click.option("--system", help="System message.")
@click.option("--thinking/--no-thinking", default=None, help="Let the model think first.")
@click.option("--effort", help="Reasoning effort, as the checkpoint's encoder knows it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object at the end instead of streamed text.")
@click.option("--report/--no-report", default=True, help="Print receipts and memory to standard error.")
@_options(CONFIG, BACKEND, RUN, SAMPLING)
def generate(
    checkpoint: Path | None,
    prompts: tuple[str, ...],
    raw: bool,
    system: str | None,
    thinking: bool | None,
    effort: str | None,
    as_json: bool,
    report: bool,
    config_file: Path | None,
    **flags: Any,
) -> None:
    """Generate text from CHECKPOINT (an official V4 folder; without one, a tiny random one)."""
    settings = _settings(config_file, checkpoint, flags)
    if raw and (system or effort or thinking is not None):
        raise UsageError("--raw takes the text as it is; --system, --thinking and --effort belong to the chat format")
    texts = prompts or (_stdin(),)
    from hal_model import generate as run  # late: it brings torch, and an error in a flag should not wait for that
    from hal_model.session import open_session

    bar = Bar("load", "B")
    session = open_session(settings, bar.update)
    bar.close()
    for note in session.notes:
        click.echo(f"hal: {note}", err=True)
    ids = [_encode(session, text, raw, system, thinking, effort) for text in texts]
    start = time.perf_counter()
    prefill = Bar("prefill", "tokens")
    answers = _stream(run.generate(session, ids, settings.sampling, prefill.update_count), len(ids), as_json, prefill)
    seconds = time.perf_counter() - start
    if as_json:
        click.echo(json.dumps(_result(session, answers, ids, seconds), ensure_ascii=False, indent=1))
    elif report:
        click.echo(report_table(session, sum(len(a["tokens"]) for a in answers), seconds), err=True)


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as e:
        raise UsageError(f"standard input: byte {e.object[e.start]:#04x} at {e.start}, right is UTF-8") from e


def _encode(
    session: Any, text: str, raw: bool, system: str | None, thinking: bool | None, effort: str | None
) -> list[int]:
    """Token ids of one prompt, chat format unless ``raw``."""
    from hal_model.prompt import decide_thinking, prompt_ids
    from hal_model.prompt_texts import PromptTexts

    tokenizer = session.tokenizer
    if raw:
        return [tokenizer.bos_id, *tokenizer.encode(text, allow_special=False)]
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    texts = PromptTexts.from_checkpoint(session.settings.model) if session.settings.model else PromptTexts()
    on = decide_thinking(thinking, effort) if thinking is not None or effort is not None else False
    return prompt_ids(messages, tokenizer=tokenizer, thinking=on, texts=texts, effort=effort)


def _stream(pieces: Any, count: int, quiet: bool, prefill: Bar) -> list[dict[str, Any]]:
    """Print pieces as they come (one prompt) or whole answers in order of prompts (several)."""
    answers: list[dict[str, Any]] = [{"text": "", "tokens": [], "finish": None} for _ in range(count)]
    for piece in pieces:
        answer = answers[piece.index]
        answer["text"] += piece.text
        answer["tokens"].append(piece.token)
        answer["finish"] = piece.finish
        if count == 1 and not quiet:
            prefill.close()
            click.echo(piece.text, nl=False)
    prefill.close()
    if not quiet:
        click.echo("" if count == 1 else "\n".join(f"[{i}] {a['text']}" for i, a in enumerate(answers)))
    return answers


def _result(session: Any, answers: list[dict[str, Any]], ids: list[list[int]], seconds: float) -> dict[str, Any]:
    return {
        "backend": session.choice.backend.name,
        "answers": [a | {"prompt_tokens": len(p)} for a, p in zip(answers, ids, strict=True)],
        "seconds": seconds,
        "receipts": [vars(r) for r in session.plan.receipts.rows()],
        "arenas": [vars(a) for a in session.arenas()],
        "notes": list(session.notes),
    }


@click.command("init-checkpoint")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--preset", help="tiny, small, flash, pro, flash-base, pro-base, flash-0731, pro-0813. [default: tiny-chat]"
)
@click.option(
    "--config-json", type=click.Path(path_type=Path), help="A config.json of any geometry instead of a preset."
)
@click.option(
    "--experts",
    type=click.Choice(("fp4", "fp8", "bf16", "f32")),
    default="fp4",
    show_default=True,
    help="Format of routed experts.",
)
@click.option(
    "--dense",
    type=click.Choice(("fp8", "bf16", "f32")),
    default="fp8",
    show_default=True,
    help="Format of other linears.",
)
@click.option("--seed", default=0, show_default=True, type=int)
def init_checkpoint_command(
    out: Path, preset: str | None, config_json: Path | None, experts: str, dense: str, seed: int
) -> None:
    """Write a random checkpoint in the official format to OUT, streamed: any geometry, little memory."""
    config = geometry(preset if preset or config_json else "tiny-chat", config_json)
    from hal_model.checkpoint import init_checkpoint

    bar = Bar("write", "B")
    written = init_checkpoint(config, out, seed=seed, experts=experts, dense=dense, progress=bar.update)  # type: ignore[arg-type]
    bar.close()
    _write_tokenizer(out, config.vocab_size)
    click.echo(f"{out}: {written.tensors} tensors, {written.nbytes} bytes, {written.shards} shards")


def _write_tokenizer(out: Path, vocab_size: int) -> None:
    """Complete a new checkpoint by a tokenizer, or remove it: nothing half-written may remain."""
    from hal_model.tokenizer import write_byte_tokenizer

    try:
        write_byte_tokenizer(out, vocab_size)
    except OSError as e:
        shutil.rmtree(out, ignore_errors=True)
        raise UsageError(f"{out}: cannot be written ({e}); right: a folder on a writable disk with room") from e
    except BaseException:
        shutil.rmtree(out, ignore_errors=True)
        raise


def geometry(preset: str | None, config_json: Path | None) -> Any:
    """The config of a preset's name or of a file.

    Raises:
        UsageError: both or neither, or an unknown preset.
    """
    from hal_model.config import PRESETS, ModelConfig

    if (preset is None) == (config_json is None):
        raise UsageError("give either --preset or --config-json")
    if config_json is not None:
        return ModelConfig.from_dir(config_json)
    if preset not in PRESETS:
        raise UsageError(f"--preset {preset!r}, right is one of {', '.join(PRESETS)}")
    return PRESETS[preset]


TARGET = [
    click.argument("checkpoint", required=False, type=click.Path(path_type=Path)),
    click.option("--preset", help="Plan a released geometry without its weights: tiny, flash, pro, … [default: tiny]"),
]


def _target(checkpoint: Path | None, preset: str | None) -> Any:
    from hal_model.config import ModelConfig

    if checkpoint is not None and preset is not None:
        raise UsageError(f"--preset {preset}: a checkpoint is given too, {checkpoint}; right is one of them")
    if checkpoint is not None:
        return ModelConfig.from_dir(checkpoint)
    return geometry(preset or "tiny", None)


@click.command()
@_options(TARGET)
@click.option("--save", type=click.Path(path_type=Path), help="Write the plan to this file.")
@click.option(
    "--diff", "diff_with", type=click.Path(path_type=Path), help="Compare with this plan file; exit 1 if they differ."
)
@click.option("--json", "as_json", is_flag=True)
@_options(CONFIG, BACKEND, RUN)
def plan(
    checkpoint: Path | None,
    preset: str | None,
    save: Path | None,
    diff_with: Path | None,
    as_json: bool,
    config_file: Path | None,
    **flags: Any,
) -> None:
    """Resolve every operator of a model on a backend: print, save or compare the plan."""
    settings = _settings(config_file, checkpoint, flags)
    config = _target(settings.model, preset)
    if save and not save.parent.is_dir():
        raise UsageError(f"--save {save}: {save.parent} is no folder, right is a file in a folder that can be written")

    from hal import plan as plans
    from hal_model.session import plan_only

    _, made = plan_only(settings, config, plans.load(settings.plan) if settings.plan else None)
    body = plans.to_dict(made)
    if save:
        try:
            plans.save(made, save)
        except OSError as e:
            raise UsageError(f"--save {save}: {e}; right is a file in a folder that can be written") from e
    if diff_with:
        lines = plans.diff(plans.load(diff_with), body)
        click.echo("\n".join(lines) or "the plans serve the same kernels")
        raise SystemExit(1 if lines else 0)
    if as_json:
        click.echo(json.dumps(body, indent=1, sort_keys=True))
    else:
        click.echo(
            f"{made.backend} on {made.arch}, digest {body['digest'][:16]}" + (f", saved to {save}" if save else "")
        )
        for bucket, decisions in made.ledger.items():
            served = sorted({(d.operator, d.chosen) for d in decisions.values() if d.via != "parts"})
            kernels = sum(1 for _, chosen in served if chosen != "reference")
            click.echo(f"  {bucket}: {kernels} of {len(served)} operators served by kernels")


@click.command()
@click.argument("operator", required=False)
@_options(TARGET[1:])
@click.option("--shape", help="Only calls with these axes, such as T=1,N=1024.")
@click.option("--json", "as_json", is_flag=True)
@_options(CONFIG, BACKEND, RUN)
def explain(
    operator: str | None, preset: str | None, shape: str | None, as_json: bool, config_file: Path | None, **flags: Any
) -> None:
    """Print the ledger: for every operator (or OPERATOR), who serves it at which shapes, and why not others."""
    from hal_model.explain import explain_rows, render

    settings = _settings(config_file, None, flags)
    rows = explain_rows(settings, _target(settings.model, preset), operator, shape)
    click.echo(json.dumps(rows, indent=1) if as_json else render(rows))


__all__ = ["Sampling", "explain", "generate", "init_checkpoint_command", "plan"]
