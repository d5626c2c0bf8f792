"""Plain exec: what is concluded where neither the engine's events nor its answers say how a call ended."""

from __future__ import annotations

from typing import Any, cast

import pytest

from executor.engine.attached import PROVED, Attached, Proven
from executor.engine.events import EventHub
from executor.engine.process import Capped
from executor.engine.protocol import Engine
from executor.errors import EngineUnavailable, SandboxDied
from executor.sandbox.plain import PlainExec

pytestmark = pytest.mark.anyio


class Away:
    """An engine that answers nothing."""

    async def inspect(self, name: str) -> dict[str, Any]:
        raise EngineUnavailable("away")


@pytest.mark.parametrize(
    ("python", "proof", "started"), [(True, b"", False), (True, PROVED, True), (False, None, True)]
)
async def test_a_lost_call_of_which_no_event_came_has_only_not_begun_where_the_proof_says_so(
    python: bool, proof: bytes | None, started: bool
) -> None:
    """The event of an exec may only be late, and an image without Python gives no proof: the program may have run."""
    hub = EventHub()
    watch = hub.watch("box")
    poisoned: list[str] = []

    async def kill(why: str) -> bool:
        return True

    plain = PlainExec(
        engine=cast(Engine, Away()), hub=hub, watch=watch, user="1:1", python=python, image_env=(), witness="",
        cpu_seconds=None, cpus=1.0, poison=poisoned.append, kill=kill,
    )  # fmt: skip
    stdout = Capped(10) if proof is None else Proven(10)
    stdout.add(proof or b"")
    end = Attached(stdout, Capped(10), "client", 255, 0.1)
    error = await plain._no_exit(end, watch.expect(("true",)))
    assert isinstance(error, SandboxDied)
    assert error.started is started
    assert poisoned
