"""A configured engine command that is not on this host: every command reports it in the same words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from pool.cli.call import call
from pool.cli.config import config_app
from pool.cli.doctor import doctor

PROBLEM = (
    "sandbox.binary: there is no command no-such-engine on this host (PATH is /usr/bin:/bin); install it, or change the "
    "setting (empty: docker or podman, whichever answers)"
)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("EMBERPOOL_ENGINE_HOME", raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    file = tmp_path / "emberpool.toml"
    file.write_text(
        f'[sandbox]\nbinary = "no-such-engine"\n[pool]\nstate_dir = "{tmp_path}/state"\novercommit = true\n'
    )
    return str(file)


def invoke(*words: str) -> Result:
    app = typer.Typer()
    app.add_typer(config_app, name="config")
    app.command("doctor")(doctor)
    app.command("call")(call)
    with capture_logs():  # the command itself sends logs to stderr
        return CliRunner().invoke(app, words)


def test_config_check_doctor_and_call_report_it_in_the_same_words(config: str) -> None:
    checked = invoke("config", "check", config)
    assert (checked.exit_code, checked.stderr) == (1, f"{PROBLEM}\n")
    examined = invoke("doctor", "--config", config, "--json")
    checks = {check["name"]: check for check in json.loads(examined.stdout)["checks"]}
    assert examined.exit_code == 1
    assert checks["host"]["detail"] == checks["engine"]["detail"] == PROBLEM
    assert checks["engine"]["remedy"] == "install the command, or correct sandbox.binary"
    called = invoke("call", "--config", config, "--", "true")
    assert (called.exit_code, called.stderr) == (1, f"error: EngineUnavailable: {PROBLEM}\n")


def test_call_says_that_a_retry_does_not_help(config: str) -> None:
    called = invoke("call", "--config", config, "--json", "--", "true")
    assert json.loads(called.stdout) == {
        "error": "EngineUnavailable",
        "reason": "engine_unavailable",
        "message": PROBLEM,
        "retryable": False,
        "retry_after": None,
        "started": False,
    }
