"""What the blocks of the pool are used for. Block size 4."""

from engine_harness import Harness, Sizes

from octavo.engine.core.block_map import BlockInfo, BlockOwner


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + number) % 997 for number in range(length)]


def test_each_block_says_what_it_is_for() -> None:
    harness = Harness(Sizes(num_blocks=6))
    harness.add("gone", prompt(4, 50), max_tokens=1)
    harness.run()
    harness.add("a", prompt(7), max_tokens=9, n=2, temperature=1.0, seed=1)
    harness.step()
    found = harness.engine.block_map()
    counts = {(block.owner, block.ref_count): block.num_filled for block in found.blocks}
    assert counts == {
        (BlockOwner.CACHED, 0): 4,
        (BlockOwner.PROMPT, 2): 3,  # of the two shared blocks this one comes last
        (BlockOwner.FREE, 0): 0,
    }
    assert (found.num_wasted_slots, found.waste) == (1, 1 / 8)
    harness.step()
    harness.step()
    found = harness.engine.block_map()
    private = [block for block in found.blocks if block.ref_count == 1]
    assert private == [
        BlockInfo(BlockOwner.PROMPT, 1, True, 4),
        BlockInfo(BlockOwner.PROMPT, 1, True, 4),
        BlockInfo(BlockOwner.OUTPUT, 1, False, 1),
        BlockInfo(BlockOwner.OUTPUT, 1, False, 1),
    ]
    assert harness.engine.stats().num_wasted_slots == found.num_wasted_slots == 6
    harness.run()


def test_beams_are_told_apart() -> None:
    harness = Harness()
    harness.add("a", prompt(8), max_tokens=9, n=3, use_beam_search=True)
    harness.step()
    harness.step()
    owners = [block.owner for block in harness.engine.block_map().blocks]
    assert owners.count(BlockOwner.PROMPT) == 2
    assert 1 <= owners.count(BlockOwner.BEAM) <= 3
    harness.run()


def test_waste_is_what_is_held_but_not_filled() -> None:
    harness = Harness(Sizes(num_blocks=40))
    for number in range(3):
        harness.add(f"r{number}", prompt(5 + number, 50 * number), max_tokens=6)
    harness.step()
    assert harness.engine.stats().num_wasted_slots == 3 + 2 + 1
    harness.run()
    assert harness.engine.stats().num_wasted_slots == 0
