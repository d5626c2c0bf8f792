"""The runner: the program at the container's end of a ``docker exec``. It waits for a call, forks for it, and reports its end.

It runs in the image's own Python (3.8 or newer) with nothing but the standard library, one thread, and no user code. The
loader of ``executor.sandbox.request`` runs the text that ``executor.inside.join`` makes of these parts;
``executor.sandbox.wire`` describes the frames. A call's process is forked ahead of the call and waits for it. It returns from
``main.run`` to ``enter.py``, and leaves that to become the caller's code. The runner itself never returns.
"""
