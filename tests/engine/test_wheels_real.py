"""Wheels of compiled code under the hardened profile: numpy and pandas compute, and pip installs into a directory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from anyio import to_thread

from executor.sandbox.mount import Mount
from executor.sandbox.profile import Limits
from executor.sandbox.request import Call
from tests.engine.conftest import Room

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

COMPUTE = """
import sys
sys.path.insert(0, "/wheels/site")
import numpy, pandas, threading
a = numpy.random.default_rng(1).random((300, 300))
assert abs(numpy.linalg.inv(a) @ a - numpy.eye(300)).max() < 1e-6
frame = pandas.DataFrame({"k": ["a", "b", "a"], "v": [1, 2, 3]})
assert frame.groupby("k").v.sum().to_dict() == {"a": 4, "b": 2}
frame.to_csv("/tmp/x.csv"); assert len(pandas.read_csv("/tmp/x.csv")) == 3
print(numpy.__name__, pandas.__name__)
"""
INSTALL = """
import glob, subprocess, sys
pip, six = glob.glob("/wheels/pip-*.whl")[0], glob.glob("/wheels/six-*.whl")[0]
done = subprocess.run([sys.executable, pip + "/pip", "install", "--no-index", "--no-deps", "--quiet",
                       "--disable-pip-version-check", "--target", "/tmp/site", six])
sys.path.insert(0, "/tmp/site")
import six
print(done.returncode, six.__file__)
"""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # the host's side is not what is tested here


def download(place: Path, version: str) -> None:
    """Fetch the wheels for a Python of the image's version."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    foreign = ["--only-binary", ":all:", "--python-version", version, "--implementation", "cp"]
    subprocess.run([*pip, "install", "--target", place / "site", *foreign, "numpy", "pandas"], check=True, timeout=110)
    subprocess.run([*pip, "download", "--no-deps", "-d", place, "pip", "six"], check=True, timeout=110)
    for file in (place, *place.rglob("*")):
        file.chmod(0o755)  # the calls' uid reads them


@pytest.mark.full  # downloads 50 MB of wheels
@pytest.mark.timeout(300)
async def test_numpy_pandas_and_pip_work_in_a_session(real_engine: Room, tmp_path: Path) -> None:
    wheels = real_engine.place / "wheels"
    wheels.mkdir()
    version = (await real_engine.cold(Call(code="import sys; print('%d.%d' % sys.version_info[:2])"))).stdout.decode()
    await to_thread.run_sync(download, wheels, version.strip())
    changes = {"mounts": (Mount(str(wheels), "/wheels", ("ro",)),), "limits": Limits(memory_mb=1024)}
    async with real_engine.armed(profile=changes) as box:
        for call, said in ((Call(code=COMPUTE), b"numpy pandas\n"), (Call(code=INSTALL), b"0 /tmp/site/six.py\n")):
            done = await box.call(call)
            assert (done.exit_code, done.stdout, done.stderr) == (0, said, b"")
