"""The table of a sandbox's life: every row is lived, nothing goes past it, and the diagram in the docs shows it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pool import core
from pool.core import events as ev
from pool.core.events import Policy
from pool.core.state import PoolState, SandboxState
from pool.core.transitions import TABLE, Phase, Trigger, follow
from scripts.diagram import DOCUMENT, redrawn
from tests.support.core import UNREACHABLE, UNUSABLE, Core

Row = tuple[Phase | None, Trigger]
A = ("agent", "a")
BARE = Policy(min_standby=0, max_sandboxes=2)
WARM = Policy(min_standby=1, max_sandboxes=2)


def _standing() -> Core:
    core = Core(WARM)
    core.start_all()
    return core


def _bound(policy: Policy = BARE) -> tuple[Core, ev.Grant]:
    core = Core(policy)
    return core, core.granted("a")


def _start_fails() -> None:
    Core(WARM).feed(ev.SandboxStartFailed(1, UNREACHABLE))


def _start_is_unknown() -> None:
    Core(WARM).feed(ev.SandboxStartUnknown(1, UNREACHABLE))


def _standby_ages() -> None:
    _standing().feed(ev.Tick(), after=WARM.standby_max_age)


def _standby_is_one_too_many() -> None:
    _standing().feed(ev.PolicyChanged(BARE))


def _standby_dies() -> None:
    _standing().feed(ev.SandboxDied(1, "killed"))


def _pool_closes_with_a_standby() -> None:
    _standing().feed(ev.CloseBegan(0.0))


def _sandbox_is_lost() -> None:
    _bound()[0].feed(ev.SandboxDied(1, "oom"))


def _bind_fails() -> None:
    core = _standing()
    core.acquire("a")
    core.feed(ev.BindFailed(1, UNUSABLE))


def _grant_is_declined() -> None:
    core, grant = _bound()
    core.feed(ev.GrantDeclined(A, grant.epoch))


def _session_idles() -> None:
    _bound()[0].feed(ev.Tick(), after=BARE.idle_timeout)


def _sandbox_is_used_up() -> None:
    core, grant = _bound(replace(BARE, max_calls=1))
    core.feed(ev.CallEnded(core.call(grant, "a")))


def _session_gives_way() -> None:
    core, _ = _bound(replace(BARE, max_sandboxes=1))
    core.acquire("b")
    core.feed(ev.Tick(), after=60.0)


def _session_is_closed() -> None:
    core, grant = _bound()
    core.feed(ev.SessionEnded(A, grant.epoch))


def _pool_closes_with_a_session() -> None:
    _bound()[0].feed(ev.CloseBegan(0.0))


def _stop_succeeds() -> None:
    core, grant = _bound()
    core.feed(ev.SessionEnded(A, grant.epoch))
    core.stop_all()


LIVES: dict[Row, Callable[[], object]] = {
    (None, Trigger.WANTED): lambda: Core(WARM),
    (Phase.STARTING, Trigger.STARTED): _standing,
    (Phase.STARTING, Trigger.START_FAILED): _start_fails,
    (Phase.STARTING, Trigger.START_UNKNOWN): _start_is_unknown,
    (Phase.STANDBY, Trigger.GIVEN): _bound,
    (Phase.STANDBY, Trigger.AGED): _standby_ages,
    (Phase.STANDBY, Trigger.SURPLUS): _standby_is_one_too_many,
    (Phase.STANDBY, Trigger.DIED): _standby_dies,
    (Phase.STANDBY, Trigger.CLOSING): _pool_closes_with_a_standby,
    (Phase.BOUND, Trigger.LOST): _sandbox_is_lost,
    (Phase.BOUND, Trigger.BIND_FAILED): _bind_fails,
    (Phase.BOUND, Trigger.DECLINED): _grant_is_declined,
    (Phase.BOUND, Trigger.IDLE): _session_idles,
    (Phase.BOUND, Trigger.RECYCLED): _sandbox_is_used_up,
    (Phase.BOUND, Trigger.RECLAIMED): _session_gives_way,
    (Phase.BOUND, Trigger.CLOSED): _session_is_closed,
    (Phase.BOUND, Trigger.CLOSING): _pool_closes_with_a_session,
    (Phase.STOPPING, Trigger.STOPPED): _stop_succeeds,
}


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0].value if row[0] else 'absent'}-{row[1].value}")
def test_every_row_of_the_table_is_lived(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    lived: set[Row] = set()
    move = PoolState.move

    def note(state: PoolState, box: SandboxState, trigger: Trigger, now: float) -> None:
        lived.add((box.phase, trigger))
        move(state, box, trigger, now)

    monkeypatch.setattr(PoolState, "move", note)
    LIVES[row]()
    assert row in lived


def test_every_phase_and_every_trigger_is_in_the_table() -> None:
    assert {phase for phase, _ in TABLE} == {*Phase, None} == {*TABLE.values()}
    assert {trigger for _, trigger in TABLE} == {*Trigger}


@pytest.mark.parametrize("phase", [*Phase, None])
@pytest.mark.parametrize("trigger", Trigger)
def test_what_the_table_lacks_cannot_happen(phase: Phase | None, trigger: Trigger) -> None:
    state, box = PoolState(BARE), SandboxState(1, phase)
    if (phase, trigger) in TABLE:
        assert follow(phase, trigger) is TABLE[phase, trigger]
        return
    with pytest.raises(LookupError, match=r"add the row to pool/core/transitions\.py"):
        state.move(box, trigger, 1.0)
    assert (box.phase, state.sandboxes) == (phase, {})


def _writes(tree: ast.AST) -> list[str]:
    """What in ``tree`` sets a phase, or puts a sandbox into the state or takes it out of them."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "phase" and not isinstance(node.ctx, ast.Load):
            found.append(ast.unparse(node))
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            found += [ast.unparse(node)] if ast.unparse(node.value).endswith("sandboxes") else []
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("replace", "setattr", "SandboxState")):
            found += [ast.unparse(node)] if "phase" in ast.unparse(node) else []
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("sandboxes.pop", "sandboxes.clear")):
            found.append(ast.unparse(node))
    return found


def test_only_one_place_moves_a_sandbox() -> None:
    found = {}
    for name in ("state", "handlers", "plan"):
        tree = ast.parse((Path(core.__file__).parent / f"{name}.py").read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (writes := _writes(node)):
                found[f"{name}.{node.name}"] = writes
    assert found == {"state.move": ["box.phase", "self.sandboxes[box.n]", "self.sandboxes[box.n]"]}


def test_the_diagram_in_the_docs_is_the_table() -> None:
    text = DOCUMENT.read_text("utf-8")
    assert redrawn(text) == text, "run: python scripts/diagram.py"


def test_a_document_without_its_marks_is_not_touched() -> None:
    with pytest.raises(ValueError, match="must hold these two lines"):
        redrawn("# Architecture\n")
