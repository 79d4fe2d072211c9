"""Ports for servers are those that no connection is given and nobody has."""

import socket
from pathlib import Path

import pytest

from megatron_hdp.processes import ports


def test_a_port_is_below_those_of_connections() -> None:
    """Whatever the kernel gives out."""
    for _ in range(20):
        with socket.socket() as one:
            one.bind(("", 0))
            assert ports.free_port() < one.getsockname()[1]


def test_a_port_that_somebody_has_is_not_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not even one that is bound at one address, by who does not listen yet."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.free_port()))
        port = taken.getsockname()[1]
        _give_out_from(port + 2, monkeypatch, tmp_path)
        monkeypatch.setattr(ports, "_LOWEST", port)
        assert all(ports.free_port() != port for _ in range(20))


def test_where_all_ports_are_given_to_connections(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One of these, then."""
    _give_out_from(1024, monkeypatch, tmp_path)
    assert ports.free_port() > 1024


def _give_out_from(port: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    (folder / "range").write_text(f"{port}\t65535\n")
    monkeypatch.setattr(ports, "_GIVEN_OUT", folder / "range")
