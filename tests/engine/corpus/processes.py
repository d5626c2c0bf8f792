"""Processes, signals, threads and event loops of a program's own."""

_MAIN = "if __name__ == '__main__':\n"

PROGRAMS = {
    **{
        f"multiprocessing_{way}": (
            "import multiprocessing as m\ndef f(q, n):\n    q.put((n * 2, __name__))\n"
            + _MAIN
            + f"    c = m.get_context('{way}')\n    q = c.Queue()\n    p = c.Process(target=f, args=(q, 21))\n    p.start()\n"
            "    print(q.get())\n    p.join()\n    print(p.exitcode)\n"
        )
        for way in ("fork", "spawn", "forkserver")
    },
    "multiprocessing_pool": "import multiprocessing as m\ndef f(n):\n    return n * n\n"
    + _MAIN
    + "    with m.Pool(2) as p:\n        print(p.map(f, range(5)))\n",
    "multiprocessing_error": "import multiprocessing as m\ndef f():\n    raise ValueError('child')\n"
    + _MAIN
    + "    p = m.Process(target=f)\n    p.start()\n    p.join()\n    print(p.exitcode)\n",
    "multiprocessing_exit": "import multiprocessing as m, sys, os\ndef f():\n    print('child', end='')\n    sys.exit(5)\n"
    + _MAIN
    + "    print('parent', end='')\n    p = m.Process(target=f)\n    p.start()\n    p.join()\n    print(p.exitcode)\n",
    "multiprocessing_unjoined": "import multiprocessing as m, time\ndef f():\n    time.sleep(0.1)\n    print('child')\n"
    + _MAIN
    + "    m.Process(target=f).start()\n    print('parent')\n",
    "multiprocessing_spawn_error": "import multiprocessing as m\ndef f():\n    raise ValueError('child')\n"
    + _MAIN
    + "    p = m.get_context('spawn').Process(target=f)\n    p.start()\n    p.join()\n    print(p.exitcode)\n",
    "multiprocessing_method": "import multiprocessing as m\nprint(m.get_start_method(), m.current_process().name, m.parent_process())\n",
    "process_pool": "from concurrent.futures import ProcessPoolExecutor\ndef f(n):\n    return n + 1\n"
    + _MAIN
    + "    with ProcessPoolExecutor(2) as e:\n        print(list(e.map(f, range(3))))\n",
    "shared_memory": "from multiprocessing import shared_memory\ns = shared_memory.SharedMemory(create=True, size=10)\ns.buf[:2] = b'ab'\nprint(bytes(s.buf[:2]))\ns.close()\ns.unlink()\n",
    "subprocess": "import subprocess, sys\nprint(subprocess.run(['sh', '-c', 'echo $0; cat; exit 3'], input=b'in', capture_output=True))\n",
    "subprocess_inherits": "import subprocess\nprint('first', flush=True)\nprint(subprocess.call(['sh', '-c', 'echo out; echo err >&2; kill -9 $$']))\n",
    "subprocess_python": "import subprocess, sys\nprint(sys.executable)\nprint(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv, sys.flags.isolated)'], capture_output=True).stdout)\n",
    "subprocess_missing": "import subprocess\nsubprocess.run(['no-such'])\n",
    "subprocess_fds": "import subprocess\nprint(subprocess.run(['sh', '-c', 'ls /proc/self/fd'], capture_output=True).stdout)\nprint(subprocess.run(['ls', '/proc/self/fd'], close_fds=False, capture_output=True).stdout)\n",
    "subprocess_signals": "import subprocess\nprint(subprocess.run(['grep', '-E', 'Sig|Shd', '/proc/self/status'], capture_output=True).stdout.decode())\n",
    "subprocess_own_file": "import subprocess, sys\nprint(open(__file__).read() == 'x' or len(open(sys.argv[0]).read()))\nprint(subprocess.run(['head', '-c', '17', __file__], capture_output=True).stdout)\n",
    "system": "import os\nprint(os.system('exit 3'), os.popen('echo hi').read())\n",
    "fork_both": "import os\nprint('a', end='')\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\nprint('b')\n",
    "fork_child_error": "import os\npid = os.fork()\nif pid == 0:\n    1/0\nprint(os.waitpid(pid, 0)[1])\n",
    "fork_child_exit": "import os, sys, atexit\natexit.register(print, 'bye')\npid = os.fork()\nif pid == 0:\n    sys.exit(3)\nprint(os.waitpid(pid, 0)[1])\n",
    "fork_child_del": "import os\nclass A:\n    def __del__(self): print('del')\na = A()\npid = os.fork()\nif pid:\n    os.waitpid(pid, 0)\n",
    "fork_hooks": "import os\nos.register_at_fork(before=lambda: print('before'), after_in_child=lambda: print('child'), after_in_parent=lambda: print('parent'))\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\n",
    "fork_many": "import os\nfor n in range(20):\n    if os.fork() == 0:\n        os._exit(n)\nprint(sorted(os.wait()[1] >> 8 for _ in range(20)))\n",
    "exec": "import os\nprint('lost', end='')\nos.execvp('echo', ['echo', 'from', 'exec'])\n",
    "exec_python": "import os, sys\nif len(sys.argv) < 2:\n    os.execv(sys.executable, [sys.executable, '-c', 'import sys; print(sys.argv)', 'again'])\n",
    "exec_self": "import os, sys\nif len(sys.argv) < 2:\n    os.execv(sys.executable, [sys.executable, sys.argv[0], 'again'])\nprint(sys.argv[1:])\n",
    "exec_status": "import os\nos.execvp('sh', ['sh', '-c', 'grep -E \"^(Sig|Shd)\" /proc/self/status; ls /proc/self/fd; umask; exit 4'])\n",
    "spawn": "import os\nprint(os.posix_spawn('/bin/sh', ['sh', '-c', 'exit 0'], {}) > 0, os.wait()[1])\n",
    "asyncio": "import asyncio\nasync def main():\n    await asyncio.gather(*(asyncio.sleep(0.01) for _ in range(3)))\n    return 5\nprint(asyncio.run(main()))\n",
    "asyncio_pending": "import asyncio\nasync def f():\n    try:\n        await asyncio.sleep(60)\n    finally:\n        print('cancelled')\nasync def main():\n    asyncio.create_task(f())\n    await asyncio.sleep(0)\nasyncio.run(main())\n",
    "asyncio_unclosed": "import asyncio\nl = asyncio.new_event_loop()\nasync def f():\n    await asyncio.sleep(60)\nt = l.create_task(f())\nl.run_until_complete(asyncio.sleep(0))\n",
    "asyncio_signal": "import asyncio, signal, os\nasync def main():\n    e = asyncio.Event()\n    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, e.set)\n    os.kill(os.getpid(), signal.SIGTERM)\n    await e.wait()\n    print('got')\nasyncio.run(main())\n",
    "asyncio_interrupted": "import asyncio, signal, os\nasync def main():\n    os.kill(os.getpid(), signal.SIGINT)\n    await asyncio.sleep(5)\nasyncio.run(main())\n",
    "asyncio_subprocess": "import asyncio\nasync def main():\n    p = await asyncio.create_subprocess_exec('sh', '-c', 'echo hi; exit 2', stdout=-1)\n    print(await p.communicate(), p.returncode)\nasyncio.run(main())\n",
    "asyncio_thread": "import asyncio, threading\nasync def main():\n    return await asyncio.to_thread(lambda: threading.current_thread() is threading.main_thread())\nt = threading.Thread(target=lambda: print(asyncio.run(main())))\nt.start()\nt.join()\n",
    "asyncio_exception_handler": "import asyncio\nasync def f():\n    1/0\nasync def main():\n    asyncio.create_task(f())\n    await asyncio.sleep(0.01)\nasyncio.run(main())\n",
    "signal_table": "import signal\nprint([(int(s), str(signal.getsignal(s))) for s in sorted(signal.valid_signals())])\nprint(signal.pthread_sigmask(signal.SIG_BLOCK, []), signal.sigpending(), signal.getitimer(0), signal.set_wakeup_fd(-1))\nprint(signal.getsignal(2) is signal.default_int_handler)\n",
    "signal_status": "print(''.join(l for l in open('/proc/self/status') if l.startswith(('Sig', 'Shd', 'Threads', 'NoNew', 'Seccomp:', 'Cap', 'Groups', 'Uid'))))\n",
    "signal_handler": "import signal, os\ndef h(n, f):\n    print(n, f.f_code.co_name, f.f_lineno > 0)\nsignal.signal(signal.SIGUSR1, h)\nos.kill(os.getpid(), signal.SIGUSR1)\n",
    "signal_handler_raises": "import signal, os\ndef h(n, f):\n    raise ValueError('h')\nsignal.signal(signal.SIGALRM, h)\nsignal.setitimer(signal.ITIMER_REAL, 0.05)\nimport time\ntime.sleep(5)\n",
    "signal_child": "import signal, os, time\nsignal.signal(signal.SIGCHLD, lambda *a: print('child'))\nif os.fork() == 0:\n    os._exit(0)\nos.wait()\n",
    "signal_in_thread": "import signal, threading\ndef f():\n    try:\n        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n    except ValueError as e:\n        print(e)\nt = threading.Thread(target=f)\nt.start()\nt.join()\n",
    "threads": "import threading\nprint(threading.main_thread() is threading.current_thread(), threading.active_count(), threading.current_thread().name, threading.enumerate())\n",
    "thread_native": "import threading, os\nprint(threading.get_native_id() == os.getpid(), threading.main_thread().native_id == os.getpid(), threading.main_thread().ident == threading.get_ident())\n",
    "thread_stack": "import threading, _thread\nprint(threading.stack_size(), _thread._count(), os if False else 1)\n",
    "thread_local_context": "import contextvars, threading\nv = contextvars.ContextVar('v', default=1)\nv.set(2)\nprint(v.get(), len(contextvars.copy_context()), contextvars.copy_context().run(v.get))\nt = threading.Thread(target=lambda: print(v.get()))\nt.start()\nt.join()\n",
    "wait_nothing": "import os\ntry:\n    os.wait()\nexcept ChildProcessError as e:\n    print(e)\n",
    "ctypes_callback": "import ctypes\nf = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))\nc = ctypes.CDLL(None)\na = (ctypes.c_int * 4)(3, 1, 2, 0)\nc.qsort(a, 4, 4, f(lambda x, y: x[0] - y[0]))\nprint(list(a))\n",
    "ctypes_callback_locked": "import ctypes\nf = ctypes.PYFUNCTYPE(ctypes.py_object)\nprint(f(lambda: 5)())\ng = ctypes.pythonapi.PyGILState_Ensure\nprint(g())\n",
}
