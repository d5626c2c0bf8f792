"""Who owns which sandbox, and when: the warm pool, its sessions and its supervisor."""

from executor.errors import EmberpoolError as EmberpoolError
from executor.result import CallResult as CallResult
from executor.sandbox.files import FileInfo as FileInfo
from executor.sandbox.stream import CallStream as CallStream
from executor.sandbox.stream import Output as Output
from pool import logs as logs
from pool.config.load import Settings as Settings
from pool.config.load import load_settings as load_settings
from pool.pool import SandboxPool as SandboxPool
from pool.session import Session as Session
