"""A mount is read and checked in one place, and written to the command line as it was written in the configuration."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from executor.sandbox.mount import OPTIONS, Mount, lies_inside, normalized


@pytest.mark.parametrize(
    ("spec", "mount", "read_only"),
    [
        ("/a:/b", Mount("/a", "/b"), False),
        ("/a:/b:ro", Mount("/a", "/b", ("ro",)), True),
        ("/a:/b:rw", Mount("/a", "/b", ("rw",)), False),
        ("/a:/b:z,ro", Mount("/a", "/b", ("z", "ro")), True),
        ("/a:/b:z,rprivate", Mount("/a", "/b", ("z", "rprivate")), False),
        ("/c d//:/é/", Mount("/c d//", "/é/"), False),
        ("/:/host:ro", Mount("/", "/host", ("ro",)), True),
    ],
)
def test_text_becomes_a_mount_and_is_written_back_as_it_was(spec: str, mount: Mount, read_only: bool) -> None:
    assert Mount.parse(spec) == mount
    assert (str(mount), mount.read_only) == (spec, read_only)


@pytest.mark.parametrize(
    "spec",
    ["", "/a", "a:/b", "/a:b", "/a:/b:ro:x", "/a:/b:exec", "/a:/tool", "/a:/tmp/", "/a://tool/x", "/a:/b/../tool",
     "/a:/proc/self", "/a:/", "/a:/dev/shm", "/a:/b:", "/a:/b\n", "volume:/b", "/./a:/b", ":/b", "/a:/b:ro,"],
)  # fmt: skip
def test_mounts_outside_the_rule_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="mount"):
        Mount.parse(spec)


@pytest.mark.parametrize(
    ("source", "target", "options"),
    [
        ("/a:/etc", "/b", ()),
        ("/a", "/b:/c", ()),
        ("/a", "/b:ro", ()),
        ("/a\0", "/b", ()),
        ("/a", "/b", ("ro,rw",)),
        ("/a", "/b", ("ro:x",)),
        ("/a", "/b", ("",)),
        ("/a", "/tool", ()),
    ],
)
def test_mount_made_of_parts_keeps_the_same_rules(source: str, target: str, options: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="mount"):
        Mount(source, target, options)


@given(
    st.text(max_size=8).map("/{}".format),
    st.text(max_size=8).map("/{}".format),
    st.lists(st.sampled_from(sorted(OPTIONS)) | st.text(max_size=3), max_size=2).map(tuple),
)
def test_what_is_made_of_parts_reads_back_as_the_same_parts(source: str, target: str, options: tuple[str, ...]) -> None:
    try:
        mount = Mount(source, target, options)
    except ValueError:
        return
    assert Mount.parse(str(mount)) == mount


def test_paths_are_compared_as_engines_record_them() -> None:
    assert [normalized(path) for path in ("/", "//", "//a//b/", "/a b")] == ["/", "/", "/a/b", "/a b"]
    inside = [lies_inside(*pair) for pair in (("/a/b", "/a"), ("/a", "/"), ("/a", "/a"), ("/", "/"), ("/ab", "/a"))]
    assert inside == [True, True, False, False, False]
