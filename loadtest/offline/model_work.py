"""How much a forward pass has to read and to compute, from a model's sizes alone.

Counted is what no implementation can avoid: each weight matrix once per step, each cached key and
value that a token sees once. Norms, activations and the embedding's rows are left out.
"""

from dataclasses import dataclass

from octavo.config.model import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelWork:
    """Bytes and operations of a decoder whose weights and cache have `itemsize` bytes a number.

    Quantized weights have `weight_itemsize` bytes each instead.
    """

    facts: ModelConfig
    itemsize: int
    weight_itemsize: float | None = None

    @property
    def layer_parameters(self) -> int:
        """Entries of the weight matrices of all layers."""
        facts = self.facts
        heads = facts.num_heads + 2 * facts.num_kv_heads
        attention = facts.hidden_size * facts.head_dim * (heads + facts.num_heads)
        mlp = 3 * facts.hidden_size * facts.intermediate_size
        return facts.num_layers * (attention + mlp)

    @property
    def head_parameters(self) -> int:
        """Entries of the output head, which runs for the sampled tokens only."""
        return self.facts.vocab_size * self.facts.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step which samples has to read."""
        itemsize = self.weight_itemsize or self.itemsize
        return int((self.layer_parameters + self.head_parameters) * itemsize)

    def kv_bytes(self, context: int) -> int:
        """Bytes of keys and values that the token at the end of `context` tokens sees."""
        facts = self.facts
        seen = sum(_seen(context, window) for window in facts.windows)
        return 2 * facts.num_kv_heads * facts.head_dim * self.itemsize * seen

    def prefill_operations(self, num_tokens: int) -> int:
        """Operations of one prompt of `num_tokens` tokens, with one draw at its end."""
        facts = self.facts
        linear = 2 * (num_tokens * self.layer_parameters + self.head_parameters)
        pairs = sum(_pairs(num_tokens, window) for window in facts.windows)
        return linear + 4 * facts.num_heads * facts.head_dim * pairs


def _seen(context: int, window: int | None) -> int:
    return context if window is None else min(context, window)


def _pairs(num_tokens: int, window: int | None) -> int:
    """Pairs of a token and one that it sees, itself included."""
    span = _seen(num_tokens, window)
    return span * (span + 1) // 2 + (num_tokens - span) * span
