"""`hvd-compress --check-build` looks up the host's name, because Horovod's Gloo crashes where it does not resolve."""

from __future__ import annotations

import socket

import pytest

from horovod_compress.cli import check_build
from horovod_compress.cli.check_build import Item

GLOO, MPI = Item("Gloo controller", True), Item("MPI controller", True)


def does_not_resolve(*arguments: object, **options: object) -> object:
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_name_that_resolves_is_shown_with_its_address(monkeypatch):
    monkeypatch.setattr(check_build.socket, "gethostname", lambda: "127.0.0.1")
    assert check_build.host_item([GLOO]) == Item("name resolves", True, "127.0.0.1 is 127.0.0.1")


@pytest.mark.parametrize(("horovod", "needed"), [([GLOO], True), ([GLOO, MPI], False), ([MPI], False), ([], False)])
def test_a_name_that_does_not_resolve_matters_where_gloo_is_all_there_is(monkeypatch, horovod, needed):
    monkeypatch.setattr(check_build.socket, "gethostname", lambda: "nowhere")
    monkeypatch.setattr(check_build.socket, "getaddrinfo", does_not_resolve)
    item = check_build.host_item(horovod)
    assert item == Item("name resolves", False, "nowhere: Name or service not known", needed)


def test_the_report_says_so(monkeypatch):
    monkeypatch.setattr(check_build.socket, "getaddrinfo", does_not_resolve)
    monkeypatch.setattr(check_build.installed, "controllers", lambda: {"Gloo": True})
    report = check_build.collect({})
    assert check_build.HOST_PROBLEM in report.problems()
    assert "[ ] name resolves (" in report.as_text()
