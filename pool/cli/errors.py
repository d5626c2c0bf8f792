"""How a command ends that could not do its work: one line on stderr, or an object, and an exit status."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from executor.errors import EmberpoolError
from pool.cli.output import say
from pool.config.load import ConfigError

REFUSED, INTERRUPTED = 1, 130


@contextmanager
def reported(*, as_json: bool = False) -> Iterator[None]:
    """Turn every refusal in the block into a message to the user of the command, and its exit status."""
    try:
        yield
    except ConfigError as error:
        say_problems(error)
        raise typer.Exit(REFUSED) from None
    except EmberpoolError as error:
        if as_json:
            typer.echo(json.dumps(error_object(error)))
        else:
            say(f"error: {type(error).__name__}: {error}", err=True)
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        say("error: interrupted", err=True)
        raise typer.Exit(INTERRUPTED) from None


def say_problems(error: ConfigError) -> None:
    """Say what is wrong with a configuration or a manifest, each problem on a line of its own."""
    for number, problem in enumerate(error.problems):
        say(f"{'' if number else 'error: '}{problem}", err=True)


def error_object(error: EmberpoolError) -> dict[str, Any]:
    """An error as an object: what happened, and whether a retry can help."""
    return {
        "error": type(error).__name__,
        "reason": error.reason,
        "message": str(error),
        "retryable": error.retryable,
        "retry_after": error.retry_after,
        "started": error.started,
    }
