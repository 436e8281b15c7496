"""`octavo blocks`: the map, its figures, and what it says when there is none."""

import io
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console
from scripted_server import Answer, Asked, error_answer, json_answer, serve

from octavo.server.blocks.commands import blocks
from octavo.server.blocks.view import Canvas, render
from octavo.server.protocol.blocks import BlocksAnswer

PATH = "/debug/blocks"


def block(owner: str, ref_count: int, num_filled: int, hashed: bool = False) -> dict[str, Any]:
    return {
        "owner": owner,
        "ref_count": ref_count,
        "hashed": hashed,
        "num_filled": num_filled,
    }


FREE = block("free", 0, 0)
POOL = [
    block("prompt", 3, 16, True),
    block("prompt", 1, 16, True),
    block("output", 1, 1),
    block("output", 1, 8),
    block("beam", 12, 16),
    block("cached", 0, 16, True),
    FREE,
    FREE,
]


def answer(pool: list[dict[str, Any]], num_wasted: int = 23) -> dict[str, Any]:
    used = sum(entry["ref_count"] > 0 for entry in pool)
    return {
        "num_blocks": len(pool),
        "num_used_blocks": used,
        "block_size": 16,
        "num_wasted_slots": num_wasted,
        "waste": num_wasted / (used * 16) if used else 0.0,
        "prefix_cache_queries": 40,
        "prefix_cache_hits": 30,
        "blocks": pool,
    }


def drawn(pool: list[dict[str, Any]], canvas: Canvas, color: bool = False) -> list[str]:
    screen = io.StringIO()
    system = "standard" if color else None
    console = Console(width=100, file=screen, color_system=system, force_terminal=color)
    console.print(render(BlocksAnswer.model_validate(answer(pool)), canvas))
    return screen.getvalue().splitlines()


def test_a_character_per_block_tells_fill_and_owners() -> None:
    lines = drawn(POOL, Canvas(80, None))

    assert lines[0] == "0 3█▁▅+░··"
    legend = "· free 2   ░ cached 1   █ prompt 2   █ output 2   █ beam 1   2 shared 2"
    assert lines[2].strip() == legend
    assert lines[3].startswith("waste 28.7%  23 of 80 token slots in use hold no token")
    assert lines[4] == (
        "5 of 8 blocks of 16 tokens in use, 13 more saved by sharing, 3 hashed, 75.0% prefix hits"
    )


def test_states_differ_in_colour_and_shared_blocks_are_reversed() -> None:
    [line] = drawn(POOL, Canvas(80, None), color=True)[:1]
    signs = ["3", "█", "▁", "+", "░", "·"]
    codes = [line.split(sign)[0].rpartition("\x1b[")[2] for sign in signs]

    assert len(set(codes)) == len(codes)
    reversed_signs = [sign for sign, code in zip(signs, codes, strict=True) if ";7;" in code]
    assert reversed_signs == ["3", "+"]


def test_lines_begin_with_the_id_of_their_first_block() -> None:
    lines = drawn([FREE] * 25, Canvas(13, None))

    assert lines[:3] == [" 0 ··········", "10 ··········", "20 ·····"]


def test_a_pool_larger_than_the_screen_is_drawn_in_groups() -> None:
    pool = [block("prompt", 1, 16)] * 20 + [FREE] * 20 + [block("output", 2, 16)] * 8
    lines = drawn(pool, Canvas(8, 2))

    # 48 blocks on 2 lines of 5 cells.
    assert lines[:3] == [" 0 ████·", "25 ···22", "A cell stands for 5 blocks."]


@pytest.mark.parametrize("pool", [[], [FREE]])
def test_an_idle_pool_wastes_nothing(pool: list[dict[str, Any]]) -> None:
    assert any("waste 0.0%" in line for line in drawn(pool, Canvas(80, 3)))


def test_once_prints_one_map_and_exits() -> None:
    with serve(**{PATH: json_answer(answer(POOL))}) as server:
        result = CliRunner().invoke(blocks, ["--url", server.url, "--admin-key", "root", "--once"])

    assert result.exit_code == 0
    assert "0 3█▁▅+░··" in result.output and "waste 28.7%" in result.output
    [asked] = server.asked
    assert asked.headers["authorization"] == "Bearer root"


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (error_answer(401, "no"), "HTTP 401: the admin key is missing or wrong"),
        (error_answer(404, "no"), "HTTP 404: the server was started without --enable-admin"),
        (error_answer(503, "no"), "HTTP 503: no map now"),
        (json_answer({"a": 1}), "no map of blocks"),
        (Answer([b"<html>"]), "no map of blocks"),
    ],
)
def test_once_fails_with_a_reason(reply: Answer, text: str) -> None:
    with serve(**{PATH: reply}) as server:
        result = CliRunner().invoke(blocks, ["--url", server.url, "--once"])

    assert result.exit_code == 1
    assert text in result.output


def test_the_map_is_drawn_anew_until_the_user_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [POOL, None, [*POOL[:-1], block("output", 1, 16)]]

    def reply(asked: Asked) -> Answer:
        pool = pools.pop(0)
        return error_answer(503, "no") if pool is None else json_answer(answer(pool))

    def wait(seconds: float) -> None:
        if not pools:
            raise KeyboardInterrupt

    monkeypatch.setattr("octavo.server.blocks.commands.time.sleep", wait)
    with serve(**{PATH: reply}) as server:
        result = CliRunner().invoke(blocks, ["--url", server.url])

    assert result.exit_code == 0
    assert len(server.asked) == 3
    # What is no terminal gets the last picture only.
    assert "octavo blocks" in result.output and "0 3█▁▅+░·█" in result.output
