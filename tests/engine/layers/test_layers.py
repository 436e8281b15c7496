"""What the layers add to the kernels."""

import pytest
import torch
from host_copies import NoHostCopies

from octavo.config.model import RopeConfig
from octavo.engine.attention.metadata import AttentionMetadata
from octavo.engine.core.errors import OctavoError
from octavo.engine.layers.linear import Linear
from octavo.engine.layers.rotary import RotaryEmbedding


def test_linear_stacks_its_parts_in_order() -> None:
    layer = Linear(3, {"a": 2, "b": 1}, torch.float32, bias=True)
    for value, (_, slot) in enumerate(layer.weight_slots("x.")):
        slot.target.fill_(value)
    assert [name for name, _ in layer.weight_slots("x.")] == [
        "x.a.weight",
        "x.a.bias",
        "x.b.weight",
        "x.b.bias",
    ]
    layer.pack()
    assert layer(torch.ones(1, 3)).tolist() == [[1.0, 1.0, 9.0]]


def test_linear_is_loaded_before_use_and_packed_once() -> None:
    layer = Linear(3, {"a": 2}, torch.float32)
    with pytest.raises(OctavoError, match="before its weights"):
        layer(torch.ones(1, 3))
    layer.pack()
    with pytest.raises(OctavoError, match="packed twice"):
        layer.pack()


def test_dynamic_rotation_knows_the_sequence_of_each_token() -> None:
    rope = RopeConfig(
        rope_type="dynamic", rotary_dim=8, factor=2.0, original_max_position_embeddings=4
    )
    rotary = RotaryEmbedding(rope, max_positions=64)
    metadata = AttentionMetadata(
        slot_mapping=torch.zeros(5, dtype=torch.int64),
        block_tables=torch.zeros(3, 1, dtype=torch.int32),
        seq_lens=torch.tensor([3, 9, 6], dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 4, 5], dtype=torch.int32),
        max_query_len=3,
        max_seq_len=9,
    )
    positions = torch.tensor([2, 6, 7, 8, 5])
    cos_sin, rows = rotary.rows(positions, metadata)
    for token, (position, length) in enumerate(zip([2, 6, 7, 8, 5], [4, 9, 9, 9, 6], strict=True)):
        base = 10000.0 * (2.0 * length / 4 - 1) ** (8 / 6)
        angles = [position / base ** (pair / 4) for pair in range(4)]
        wanted = torch.tensor(angles, dtype=torch.float64)
        torch.testing.assert_close(
            cos_sin[rows[token]].double(),
            torch.cat((wanted.cos(), wanted.sin())),
            atol=1e-5,
            rtol=0,
        )


def test_dynamic_rotation_can_be_recorded() -> None:
    rope = RopeConfig(
        rope_type="dynamic", rotary_dim=8, factor=2.0, original_max_position_embeddings=4
    )
    with torch.device("meta"):
        rotary = RotaryEmbedding(rope, max_positions=64)
        integer = torch.zeros(3, dtype=torch.int64)
        index = integer.int()
        metadata = AttentionMetadata(integer, index[:, None], index, index, 1, max_seq_len=9)
    with NoHostCopies():
        rotary.rows(integer, metadata)
