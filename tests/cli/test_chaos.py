"""How `tasuki chaos` spreads its load."""

from __future__ import annotations

from cli.chaos import rotations


def test_every_router_is_the_first_of_some_clients_and_known_to_all() -> None:
    assert rotations("a:1,b:2,c:3") == ["a:1,b:2,c:3", "b:2,c:3,a:1", "c:3,a:1,b:2"]
    assert rotations("a:1") == ["a:1"]
