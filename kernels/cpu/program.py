"""Forward passes that the thread pool runs without Python between the instructions.

A program is an int64 matrix, one instruction a row, laid out as `pool.INSTRUCTION_WORDS` says.
Most words never change. The others are places for symbols: sizes and addresses of a step,
written into all places of a symbol by one assignment before a run.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.cpu import pool
from octavo.kernels.cpu.activation import GELU, GELU_TANH, SILU
from octavo.kernels.cpu.attention import ATTENTION, fits_cache, items_per_chunk, tokens_per_tile
from octavo.kernels.cpu.compiled import Kernel
from octavo.kernels.cpu.embedding import embedding_kernel
from octavo.kernels.cpu.gated_linear import GATED_PRODUCTS
from octavo.kernels.cpu.heads import heads_kernel
from octavo.kernels.cpu.linear import PRODUCTS, PackedWeight, chunk_shape, padded_row_bytes
from octavo.kernels.cpu.norm import CHUNK_ELEMENTS as NORM_ELEMENTS
from octavo.kernels.cpu.norm import norm_kernel
from octavo.kernels.cpu.numbers import CODES, F32, float_bits
from octavo.kernels.cpu.processor import PANEL
from octavo.kernels.cpu.quantize import quantize_rows, quantized_row_bytes
from octavo.kernels.cpu.rotary import CHUNK_ELEMENTS as HEAD_ELEMENTS
from octavo.kernels.cpu.tile import rows_code
from octavo.kernels.step_program import (
    HeadShape,
    KeyValueCache,
    LayerAttention,
    NoLoweringError,
    StepTensors,
)

_ACTIVATIONS = {"silu": SILU, "gelu": GELU, "gelu_tanh": GELU_TANH}
_COPIED_TOKENS = 64
_QUANTIZED_ELEMENTS = 8192
_ALIGNMENT = 64


class _Fact(Enum):
    """Words that are the same in all instructions of a run."""

    TOKENS = auto()
    SEQUENCES = auto()
    IDS = auto()
    ROTARY_ROWS = auto()
    COS_SIN = auto()
    COS_SIN_ROWS = auto()
    ROTARY_SIZE = auto()
    SLOTS = auto()
    TABLES = auto()
    TABLE_STRIDE = auto()
    TABLE_COLUMNS = auto()
    LENGTHS = auto()
    STARTS = auto()
    BLOCKS = auto()
    BLOCK_SIZE = auto()
    NUM_SLOTS = auto()
    OUTPUT = auto()


@dataclass(frozen=True, slots=True)
class _Chunks:
    """`factor` chunks of work for every `tokens` begun."""

    factor: int
    tokens: int


@dataclass(frozen=True, slots=True)
class _Tile:
    """Query tokens in a tile of attention: `most`, or fewer where no sequence has so many."""

    most: int


@dataclass(frozen=True, slots=True)
class _ItemsPerChunk:
    """Items of work in a chunk of attention."""

    tile: _Tile
    kv_heads: int


@dataclass(frozen=True, slots=True)
class _ItemChunks:
    """Chunks of attention."""

    tile: _Tile
    kv_heads: int


@dataclass(frozen=True, slots=True)
class _CacheAddress:
    """Keys (part 0) or values (part 1) of a layer."""

    layer: int
    part: int


class Form(Enum):
    """How numbers lie in a row.

    Padded rows have an even length and the element type in which linear layers read them; their
    numbers fit that of the program. Layers with int8 weights read quantized rows.
    """

    PLAIN = auto()
    PADDED = auto()
    QUANTIZED = auto()


@dataclass(frozen=True, slots=True)
class Rows:
    """What an instruction writes: one row for each token of the step."""

    number: int
    columns: int
    form: Form


@dataclass(frozen=True, slots=True)
class _Memory:
    """Memory that Rows of one shape use in turn; the padding is always zero."""

    number: int
    columns: int
    form: Form

    def row_bytes(self, dtype: torch.dtype) -> int:
        """Bytes for each token of a program of `dtype`."""
        match self.form:
            case Form.PLAIN:
                return self.columns * dtype.itemsize
            case Form.PADDED:
                return padded_row_bytes(dtype, self.columns)
            case Form.QUANTIZED:
                return quantized_row_bytes(self.columns)


_StepWord = _Fact | _Chunks | _Tile | _ItemsPerChunk | _ItemChunks
_Word = int | _StepWord | _CacheAddress | Rows


@dataclass(frozen=True, slots=True)
class _Instruction:
    kernel: Kernel
    chunks: _Chunks | _ItemChunks
    arguments: tuple[_Word, ...]
    problem: str


class Program:
    """See `octavo.kernels.step_program.StepProgram`. One thread runs it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._code = CODES[dtype]
        self._padded_code = rows_code(self._code)
        self._instructions: list[_Instruction] = []
        self._num_rows = 0
        self._kept: list[Tensor | PackedWeight] = []
        self._hidden = 0
        self._linked: _Linked | None = None
        self._following: Tensor | None = None  # the output of the next run, if it has the size

    def embedding(self, table: Tensor) -> Rows:
        """See `StepProgram.embedding`."""
        self._check(table)
        residual = self._new_rows(table.shape[1], Form.PLAIN)
        arguments = (
            _Fact.IDS,
            table.data_ptr(),
            table.shape[0],
            table.shape[1] * table.itemsize,
            _Fact.TOKENS,
            _COPIED_TOKENS,
            residual,
        )
        problem = "embedding: an id is outside the table"
        self._add(embedding_kernel, _Chunks(1, _COPIED_TOKENS), arguments, problem)
        return residual

    def rms_norm(self, residual: Rows, weight: Tensor, eps: float) -> Rows:
        """See `StepProgram.rms_norm`."""
        out = self._new_rows(weight.shape[0], Form.PADDED)
        self._norm((residual, 0, 0), (weight, eps), out)
        return out

    def add_rms_norm(self, x: Rows, residual: Rows, weight: Tensor, eps: float) -> Rows:
        """See `StepProgram.add_rms_norm`."""
        out = self._new_rows(weight.shape[0], Form.PADDED)
        self._norm((x, residual, residual), (weight, eps), out)
        return out

    def output_norm(self, x: Rows, residual: Rows, weight: Tensor, eps: float) -> None:
        """See `StepProgram.output_norm`."""
        self._hidden = weight.shape[0]
        self._norm((x, residual, residual), (weight, eps), _Fact.OUTPUT)

    def linear(self, x: Rows, packed: PackedWeight) -> Rows:
        """See `StepProgram.linear`."""
        self._check_packed(packed)
        x = self._as_read_by(packed, x)
        out = self._new_rows(packed.num_outputs, Form.PLAIN)
        group, block = chunk_shape(packed)
        arguments = (
            *(0, self._code, x, _Fact.TOKENS, packed.num_inputs, packed.row_bytes),
            *(packed.address, packed.panel_bytes, packed.steps, packed.num_panels, group, block),
            *(out, packed.num_outputs, packed.bias_address, 0),
        )
        groups = -(-packed.num_panels // group)
        self._add(PRODUCTS[packed.panels.dtype], _Chunks(groups, block), arguments)
        return out

    def gated_linear(self, x: Rows, packed: PackedWeight, activation: str) -> Rows:
        """See `StepProgram.gated_linear`."""
        self._check_packed(packed)
        inner = packed.num_outputs // 2
        if activation not in _ACTIVATIONS:
            raise NoLoweringError(f"the activation {activation!r}")
        if inner % PANEL:
            raise NoLoweringError(f"an MLP of {inner} features, which is no multiple of {PANEL}")
        x = self._as_read_by(packed, x)
        out = self._new_rows(inner, Form.PADDED)
        group, block = chunk_shape(packed)
        group = -(-group // 2)
        arguments = (
            *(self._code, x, _Fact.TOKENS, packed.row_bytes, packed.address, packed.panel_bytes),
            *(packed.steps, inner, group, block, out, packed.bias_address),
            int(self._padded_code == F32),
        )
        kernel = GATED_PRODUCTS[packed.panels.dtype, _ACTIVATIONS[activation]]
        groups = -(-inner // PANEL // group)
        self._add(kernel, _Chunks(groups, block), arguments)
        return out

    def attention(self, qkv: Rows, heads: HeadShape, layer: LayerAttention) -> Rows:
        """See `StepProgram.attention`."""
        q = self._new_rows(heads.q_heads * heads.size, Form.PLAIN)
        out = self._new_rows(heads.q_heads * heads.size, Form.PADDED)
        keys, values = _CacheAddress(layer.index, 0), _CacheAddress(layer.index, 1)
        tile = _Tile(tokens_per_tile(heads.q_heads // heads.kv_heads))
        self._prepare_heads((qkv, q, keys, values), heads, layer)
        arguments = (
            *(q, q.columns * self._dtype.itemsize, keys, values),
            *(_Fact.TABLES, _Fact.TABLE_STRIDE, _Fact.LENGTHS, _Fact.STARTS),
            *(_Fact.SEQUENCES, heads.q_heads, heads.kv_heads, _Fact.BLOCK_SIZE, heads.size),
            *(_Fact.BLOCKS, out, float_bits(layer.scale), layer.window or 0, float_bits(0.0)),
            *(tile, _Fact.TABLE_COLUMNS, int(self._padded_code == F32)),
            _ItemsPerChunk(tile, heads.kv_heads),
        )
        problem = "paged_attention: a block table names a block outside the cache"
        self._add(ATTENTION[self._dtype], _ItemChunks(tile, heads.kv_heads), arguments, problem)
        return out

    def takes(self, cache: Tensor) -> bool:
        """See `StepProgram.takes`."""
        return fits_cache(self._dtype, cache)

    def run(self, step: StepTensors) -> Tensor:
        """See `StepProgram.run`."""
        if self._linked is None:
            self._linked = _Linked(self._instructions, self._dtype)
        out, tokens = self._following, step.input_ids.shape[0]
        if out is None or out.shape[0] != tokens:
            out = torch.empty((tokens, self._hidden), dtype=self._dtype)
        self._linked.run(step, out)
        # Operations of torch give the GIL away. Before a run that costs a turn, which the event
        # loop takes for the results of the step before; now it has done with them.
        self._following = torch.empty_like(out)
        return out

    def _prepare_heads(
        self,
        places: tuple[Rows, Rows, _CacheAddress, _CacheAddress],
        heads: HeadShape,
        layer: LayerAttention,
    ) -> None:
        q_norm, k_norm, eps = 0, 0, 0.0
        if layer.norms is not None:
            self._check(*layer.norms[:2])
            q_norm, k_norm = (weight.data_ptr() for weight in layer.norms[:2])
            eps = layer.norms[2]
        per_chunk = max(1, HEAD_ELEMENTS // ((heads.q_heads + heads.kv_heads) * heads.size))
        arguments = (
            *places,
            *(_Fact.ROTARY_ROWS, _Fact.COS_SIN, _Fact.COS_SIN_ROWS, _Fact.ROTARY_SIZE),
            *(heads.q_heads, heads.kv_heads, heads.size, self._code, _Fact.TOKENS, per_chunk),
            *(_Fact.SLOTS, _Fact.BLOCK_SIZE, _Fact.NUM_SLOTS, q_norm, k_norm),
            float_bits(eps),
        )
        problem = "a position is outside the rotary table, or a slot outside the cache"
        self._add(heads_kernel, _Chunks(1, per_chunk), arguments, problem)

    def _norm(
        self,
        inputs: tuple[Rows, Rows | int, Rows | int],
        scale: tuple[Tensor, float],
        out: Rows | _Fact,
    ) -> None:
        """`inputs` are x, the residual and the place of the sum; 0 where there is none."""
        weight, eps = scale
        self._check(weight)
        columns = weight.shape[0]
        per_chunk = max(1, NORM_ELEMENTS // columns)
        wide, row_bytes = False, columns * self._dtype.itemsize
        if isinstance(out, Rows):
            wide, row_bytes = self._padded_code == F32, padded_row_bytes(self._dtype, columns)
        arguments = (
            *inputs,
            *(weight.data_ptr(), out, self._code, _Fact.TOKENS, columns, per_chunk),
            *(float_bits(eps), int(wide), row_bytes),
        )
        self._add(norm_kernel, _Chunks(1, per_chunk), arguments)

    def _check(self, *weights: Tensor) -> None:
        for weight in weights:
            if weight.dtype != self._dtype or not weight.is_contiguous():
                raise NoLoweringError(f"weights of {weight.dtype} in a model of {self._dtype}")
            self._kept.append(weight)

    def _check_packed(self, packed: PackedWeight) -> None:
        if not isinstance(packed, PackedWeight):
            raise NoLoweringError("weights packed for other kernels")
        self._kept.append(packed)

    def _as_read_by(self, packed: PackedWeight, x: Rows) -> Rows:
        """`x`, which is padded, in the form that the product with `packed` reads."""
        if packed.panels.dtype != torch.int8:
            return x
        out = self._new_rows(packed.num_inputs, Form.QUANTIZED)
        per_chunk = max(1, _QUANTIZED_ELEMENTS // packed.num_inputs)
        # Padding is zero, which changes no group.
        columns = x.columns + x.columns % 2
        arguments = (x, self._padded_code, out, _Fact.TOKENS, columns, per_chunk)
        self._add(quantize_rows, _Chunks(1, per_chunk), arguments)
        return out

    def _new_rows(self, columns: int, form: Form) -> Rows:
        self._num_rows += 1
        return Rows(self._num_rows, columns, form)

    def _add(
        self,
        kernel: Kernel,
        chunks: _Chunks | _ItemChunks,
        arguments: tuple[_Word, ...],
        problem: str = "",
    ) -> None:
        self._instructions.append(_Instruction(kernel, chunks, arguments, problem))


class _Linked:
    """The matrix of a finished program, and the values of its words."""

    def __init__(self, instructions: Sequence[_Instruction], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._problems = [instruction.problem for instruction in instructions]
        self._code = np.zeros((len(instructions), pool.INSTRUCTION_WORDS), np.int64)
        self._capacity = 0
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._caches: Sequence[KeyValueCache] = ()
        memory_of = _share_memory(instructions)
        numbers: dict[_StepWord | _CacheAddress | _Memory, int] = {}
        places: list[int] = []
        sources: list[int] = []
        for row, instruction in enumerate(instructions):
            words: tuple[_Word, ...] = (instruction.kernel.address, instruction.chunks)
            words += instruction.arguments
            for column, word in enumerate(words, pool.KERNEL):
                if isinstance(word, int):
                    self._code[row, column] = word
                    continue
                known = memory_of[word] if isinstance(word, Rows) else word
                places.append(row * pool.INSTRUCTION_WORDS + column)
                sources.append(numbers.setdefault(known, len(numbers)))
        self._numbers = numbers
        self._step_words = [
            (word, number)
            for word, number in numbers.items()
            if not isinstance(word, _CacheAddress | _Memory)
        ]
        self._places, self._sources = np.array(places), np.array(sources)
        self._values = np.zeros(len(numbers), np.int64)

    def run(self, step: StepTensors, out: Tensor) -> None:
        tokens = out.shape[0]
        if tokens > self._capacity:
            self._grow(tokens)
        if step.caches is not self._caches:
            self._bind(step.caches)
        # These may be copies, to be kept until the run is over.
        tensors = {
            _Fact.IDS: _contiguous(step.input_ids),
            _Fact.ROTARY_ROWS: _contiguous(step.rotary_rows),
            _Fact.COS_SIN: _contiguous(step.cos_sin),
            _Fact.SLOTS: _contiguous(step.slot_mapping),
            _Fact.TABLES: _contiguous(step.batch.block_tables),
            _Fact.LENGTHS: _contiguous(step.batch.seq_lens),
            _Fact.STARTS: _contiguous(step.batch.query_start_loc),
            _Fact.OUTPUT: out,
        }
        blocks, _, block_size, _ = self._caches[0].key.shape
        sequences, columns = step.batch.block_tables.shape
        facts = {fact: tensor.data_ptr() for fact, tensor in tensors.items()} | {
            _Fact.TOKENS: tokens,
            _Fact.SEQUENCES: sequences,
            _Fact.COS_SIN_ROWS: step.cos_sin.shape[0],
            _Fact.ROTARY_SIZE: step.cos_sin.shape[1],
            _Fact.TABLE_STRIDE: columns,
            _Fact.TABLE_COLUMNS: columns,
            _Fact.BLOCKS: blocks,
            _Fact.BLOCK_SIZE: block_size,
            _Fact.NUM_SLOTS: blocks * block_size,
        }
        longest = max(1, step.batch.max_query_len)
        for word, number in self._step_words:
            self._values[number] = _value(word, facts, longest)
        self._code.reshape(-1)[self._places] = self._values[self._sources]
        wrong = pool.shared_pool().run_program(self._code, tokens)
        if wrong >= 0:
            raise IndexError(self._problems[wrong])

    def _grow(self, tokens: int) -> None:
        """Memory for steps of up to `tokens` tokens."""
        offset = 0
        offsets: dict[int, int] = {}
        for word, number in self._numbers.items():
            if isinstance(word, _Memory):
                offsets[number] = offset
                offset += -(-tokens * word.row_bytes(self._dtype) // _ALIGNMENT) * _ALIGNMENT
        self._memory = torch.zeros(offset + _ALIGNMENT, dtype=torch.uint8)
        start = self._memory.data_ptr()
        start += -start % _ALIGNMENT
        for number, offset in offsets.items():
            self._values[number] = start + offset
        self._capacity = tokens

    def _bind(self, caches: Sequence[KeyValueCache]) -> None:
        for word, number in self._numbers.items():
            if isinstance(word, _CacheAddress):
                cache = caches[word.layer]
                self._values[number] = (cache.value if word.part else cache.key).data_ptr()
        self._caches = caches


def _contiguous(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


def _value(word: _StepWord, facts: dict[_Fact, int], longest: int) -> int:
    match word:
        case _Chunks():
            return -(-facts[_Fact.TOKENS] // word.tokens) * word.factor
        case _Tile():
            return min(word.most, longest)
        case _ItemsPerChunk():
            return items_per_chunk(_items(word, facts, longest))
        case _ItemChunks():
            items = _items(word, facts, longest)
            return -(-items // items_per_chunk(items))
        case _:
            return facts[word]


def _items(word: _ItemsPerChunk | _ItemChunks, facts: dict[_Fact, int], longest: int) -> int:
    """As many as there are at most; numbers past the last are skipped."""
    tiles = facts[_Fact.TOKENS] // min(word.tile.most, longest)
    return (tiles + facts[_Fact.SEQUENCES]) * word.kv_heads


def _share_memory(instructions: Sequence[_Instruction]) -> dict[Rows, _Memory]:
    """Memory for all rows: taken where they are first named, given back where they are last."""
    last = {
        word: index
        for index, instruction in enumerate(instructions)
        for word in instruction.arguments
        if isinstance(word, Rows)
    }
    memory_of: dict[Rows, _Memory] = {}
    free: dict[Hashable, list[_Memory]] = {}
    for index, instruction in enumerate(instructions):
        named = {word: None for word in instruction.arguments if isinstance(word, Rows)}
        for rows in named:
            if rows not in memory_of:
                unused = free.setdefault((rows.columns, rows.form), [])
                fresh = _Memory(len(memory_of), rows.columns, rows.form)
                memory_of[rows] = unused.pop() if unused else fresh
        for rows in named:
            if last[rows] == index:
                free[rows.columns, rows.form].append(memory_of[rows])
    return memory_of
