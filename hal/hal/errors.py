"""Errors that a user can cause, each with the exit code of its cause.

Every message is one line: the thing (flag, file, tensor, field), the value seen, and what would be right.
"""

from __future__ import annotations


class HalError(Exception):
    """Base of every error that a user can cause or remedy; ``exit_code`` is what the command line returns."""

    exit_code = 1


class UsageError(HalError):
    """A flag, setting or configuration value is wrong."""

    exit_code = 2


class InputError(HalError):
    """An operator was called with arguments that break its contract (shape, dtype, range)."""

    exit_code = 2


class CheckpointError(HalError):
    """A checkpoint file, tensor or config field is missing, unexpected, mis-shaped or damaged."""

    exit_code = 3


class BackendError(HalError):
    """A backend was chosen that is unknown, broken, or has no device here."""

    exit_code = 4


class NoKernelError(HalError):
    """No kernel serves an operator where one is required (``--strict``, a fallback budget, a pinned plan)."""

    exit_code = 5


class MemoryLimitError(HalError):
    """An arena cannot hold what was asked for; the message names needed, free and the flag to turn."""

    exit_code = 6


class ContractError(HalError):
    """A kernel or plugin broke the contract that it declared; the host never falls through in silence."""

    exit_code = 7
