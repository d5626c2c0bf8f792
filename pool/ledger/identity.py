"""A pool's identity, ``pool.json`` in its state directory: a random id and a secret, made once and repaired where lost.

The id is in the name and the label of every container of the pool. The secret only makes session ids: with a new one the
same sessions have other ids in the logs, and nothing else changes.
"""

from __future__ import annotations

import errno
import json
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from executor.errors import PoolUnusable
from pool.ledger.private_files import NotOurs, read_private, write_durably

_VERSION = 1
_POOL_ID = re.compile(r"[0-9a-f]{12}\Z", re.ASCII)
_SECRET = re.compile(r"[0-9a-f]{64}\Z", re.ASCII)
_CONTAINER_NAME = re.compile(r"emberpool-([0-9a-f]{12})-[0-9a-f]+-[a-z0-9]+\Z", re.ASCII)

UNREADABLE = frozenset({errno.EIO, errno.EUCLEAN, errno.EBADMSG})
"""Errors with which a damaged disk or filesystem answers a read. All other errors are this moment's."""


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """``repaired`` says that the file was lost or damaged, and that this is what was written in its place."""

    pool_id: str
    secret: bytes
    repaired: bool = False


class _Damaged(Exception):
    pass


def load_identity(path: Path, containers: Iterable[str]) -> PoolIdentity:
    """Read ``pool.json``, or make it where it is missing or damaged. ``containers`` are the names in the ledger beside it.

    A repaired identity has the id in those names, so that the pool still recognises what it has made; the secret is
    new. Where they hold none, or more than one, the id is new too: it recognises nothing but what the ledger knows by its
    full ID. Raises ``PoolUnusable`` for a file that is another's or a newer version's, and ``OSError``.
    """
    names = list(containers)
    with suppress(FileNotFoundError, _Damaged):
        return _read(path)
    ids = {match[1] for name in names if (match := _CONTAINER_NAME.match(name))}
    pool_id = ids.pop() if len(ids) == 1 else secrets.token_hex(6)
    secret = secrets.token_bytes(32)
    path.with_name(f".new-{path.name}").unlink(missing_ok=True)
    # Without a file and without containers it is a new directory, or one whose first start was cut off.
    repaired = path.exists() or bool(names)
    write_durably(path, json.dumps({"version": _VERSION, "pool_id": pool_id, "secret": secret.hex()}))
    return PoolIdentity(pool_id, secret, repaired)


def _read(path: Path) -> PoolIdentity:
    try:
        content = json.loads(read_private(path))
    except NotOurs as error:
        raise PoolUnusable(f"{path} is damaged ({error}); somebody else made it. Look at it, and remove it") from error
    except OSError as error:
        if error.errno in UNREADABLE:
            raise _Damaged from error
        raise
    except (ValueError, RecursionError) as error:
        raise _Damaged from error
    if not isinstance(content, dict):
        raise _Damaged
    version, pool_id, secret = content.get("version"), str(content.get("pool_id")), str(content.get("secret"))
    if isinstance(version, int) and version > _VERSION:
        raise PoolUnusable(
            f"{path} was written by a newer emberpool (version {version}); use that, or another state_dir"
        )
    if version != _VERSION or not _POOL_ID.match(pool_id) or not _SECRET.match(secret):
        raise _Damaged
    return PoolIdentity(pool_id, bytes.fromhex(secret))
