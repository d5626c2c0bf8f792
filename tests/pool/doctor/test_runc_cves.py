"""Which runc has which known escape, and what then stands in its way."""

from __future__ import annotations

import pytest

from pool.doctor.runc_cves import ESCAPES, GUARDS, Judgement, Package, guards, judge, read_changelog, runc_version

_DEFAULT = guards(nested_mounts=False, kind="docker", rootless=False)


def _one(cve: str, version: str, package: Package | None = None) -> Judgement:
    return next(found for found in judge(version, package, _DEFAULT) if found.escape.cve == cve)


@pytest.mark.parametrize(
    ("version", "cve", "state"),
    [
        ("1.0.0-rc6", "CVE-2019-5736", "open"),
        ("1.0.0-rc7", "CVE-2019-5736", "fixed"),
        ("1.0.0", "CVE-2019-5736", "fixed"),
        ("1.0.0-rc94", "CVE-2021-30465", "open"),
        ("1.0.0-rc95", "CVE-2021-30465", "fixed"),
        ("1.0.0-rc94", "CVE-2023-27561", "fixed"),
        ("1.0.3", "CVE-2023-27561", "open"),
        ("1.1.5", "CVE-2023-28642", "fixed"),
        ("1.0.0-rc92", "CVE-2024-21626", "fixed"),
        ("1.1.11", "CVE-2024-21626", "open"),
        ("1.1.12", "CVE-2024-21626", "fixed"),
        ("v1.1.12-0-g51d5e946", "CVE-2024-21626", "fixed"),
        ("v1.1.11-0-g4bccb38c", "CVE-2024-21626", "open"),
        ("1.2.0-rc.2", "CVE-2024-45310", "open"),
        ("1.2.0", "CVE-2024-45310", "fixed"),
        ("1.1.15", "CVE-2025-31133", "open"),
        ("1.2.7", "CVE-2025-52565", "open"),
        ("1.2.8", "CVE-2025-52565", "fixed"),
        ("1.3.2", "CVE-2025-52881", "open"),
        ("1.4.0-rc.2", "CVE-2025-52881", "open"),
        ("1.4.0", "CVE-2025-52881", "fixed"),
        ("1.2.9", "CVE-2026-41579", "open"),
        ("1.3.6", "CVE-2026-41579", "fixed"),
        ("1.5.0-rc.3", "CVE-2026-41579", "fixed"),
        ("1.1.5+ds1-1+deb12u1", "CVE-2024-21626", "unknown"),
        ("1.1.5+ds1-1+deb12u1", "CVE-2023-27561", "fixed"),
        ("1.0.0~rc93+ds1-5+deb11u2", "CVE-2021-30465", "unknown"),
        ("", "CVE-2019-5736", "unknown"),
    ],
)
def test_a_version_is_judged_by_its_own_branch(version: str, cve: str, state: str) -> None:
    assert _one(cve, version).state == state


def test_a_package_that_names_a_cve_has_it_fixed_and_is_open_for_one_that_it_does_not() -> None:
    package = Package("1.1.5+ds1-1+deb12u1", frozenset({"CVE-2024-21626"}))
    assert _one("CVE-2024-21626", package.version, package).state == "fixed"
    assert _one("CVE-2025-31133", package.version, package).state == "open"


def test_a_package_of_another_version_says_nothing() -> None:
    package = Package("1.1.5+ds1-1+deb12u2", frozenset({"CVE-2024-21626"}))
    assert _one("CVE-2024-21626", "1.1.5+ds1-1+deb12u1", package).state == "unknown"


def test_a_changelog_with_its_old_entries_cut_off_is_silent_only_on_later_years() -> None:
    text = (
        "runc (1.1.12-0ubuntu3.1) noble-security; urgency=medium\n\n  * SECURITY UPDATE: CVE-2025-52881\n\n"
        " -- Ann <ann@example.org>  Wed, 05 Nov 2025 10:00:00 +0000\n\n"
        "runc (1.1.12-0ubuntu3) noble; urgency=medium\n\n  * Rebuild\n\n"
        " -- Bob <bob@example.org>  Mon, 01 Apr 2024 10:00:00 +0000\n\n"
    )
    cut = read_changelog(text + "# For older changelog entries, run 'apt-get changelog runc'\n")
    whole = read_changelog(text)
    assert cut == Package("1.1.12-0ubuntu3.1", frozenset({"CVE-2025-52881"}), oldest=2024)
    assert whole == Package("1.1.12-0ubuntu3.1", frozenset({"CVE-2025-52881"}))
    assert _one("CVE-2024-45310", cut.version, cut).state == "unknown"
    assert _one("CVE-2024-45310", cut.version, whole).state == "open"
    assert _one("CVE-2025-31133", cut.version, cut).state == "open"
    assert _one("CVE-2025-52881", cut.version, cut).state == "fixed"


def test_a_text_that_is_no_changelog_is_none() -> None:
    assert read_changelog("") is None
    assert read_changelog("CVE-2024-21626 is fixed\n") is None


def test_the_default_profile_blocks_every_known_escape_of_the_oldest_runc() -> None:
    for kind in ("docker", "podman"):
        for found in judge("0.1.1", None, guards(nested_mounts=False, kind=kind, rootless=False)):
            assert found.state == "fixed" or found.blocks


def test_a_mount_inside_a_writable_one_leaves_the_mount_races_without_a_block() -> None:
    found = judge("1.1.5", None, guards(nested_mounts=True, kind="docker", rootless=False))
    assert {one.escape.cve for one in found if one.status == "fail"} == {"CVE-2024-45310", "CVE-2025-52881"}
    found = judge("1.1.5", None, guards(nested_mounts=True, kind="docker", rootless=True))
    assert {one.escape.cve for one in found if one.status == "fail"} == {"CVE-2024-45310"}


def test_an_unknown_version_warns_of_every_escape() -> None:
    assert {one.status for one in judge("", None, _DEFAULT)} == {"warn"}


@pytest.mark.parametrize(
    ("said", "version"),
    [
        ("1.1.5+ds1-1+deb12u1", "1.1.5+ds1-1+deb12u1"),
        ("v1.2.5-0-g59923ef", "v1.2.5-0-g59923ef"),
        ("runc version 1.1.12\ncommit: v1.1.12-0-g51d5e946\nspec: 1.0.2", "1.1.12"),
        ("ff819c7e9184c13b7c2607fe6c30ae19403a7aff", ""),
        ("", ""),
    ],
)
def test_runcs_version_is_read_out_of_what_engines_say(said: str, version: str) -> None:
    assert runc_version(said) == version


def test_every_guard_that_an_escape_names_has_words() -> None:
    assert {guard for escape in ESCAPES for guard in escape.blocked_by} <= set(GUARDS)
