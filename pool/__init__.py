"""Who owns which sandbox, and when: the warm pool, its sessions and its supervisor."""

from executor.result import CallResult as CallResult
from executor.result import EmberpoolError as EmberpoolError
from pool.config import Settings as Settings
from pool.config import load_settings as load_settings
from pool.pool import SandboxPool as SandboxPool
from pool.session import Session as Session
