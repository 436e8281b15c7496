"""Random work while each step is planned before the results of the one before are known.

Half of the walks hold only requests for which nobody has to wait, so that all steps overlap. Block
sizes, pools and steps are tiny. After each step all bookkeeping is checked; the simulated cache
checks every slot that is read, after copies, swaps and offloads too; and each text must be the one
that its request gets alone.
"""

import random
from dataclasses import dataclass, field

import pytest
from engine_harness import Harness, Sizes
from simulated_model import solo_beams, solo_text

from octavo.engine.core.errors import RequestError
from octavo.engine.core.limits import HostMemory, PreemptionCosts

NUM_WALKS = 8
NUM_STEPS = 450
EOS = 3
PLAIN = {"n", "prompt_logprobs"}
"""Options that no plain request has."""


def prompt(length: int, start: int = 0) -> list[int]:
    return [(start + number) % 997 for number in range(length)]


def random_harness(rng: random.Random) -> Harness:
    rows = rng.choice([2, 5, 9])
    num_swap_blocks = rng.choice([0, 3, 20, 200])
    # Per block and token: either mode may be the cheaper one.
    costs = PreemptionCosts(1.0, rng.choice([0.4, 0.6, 1.5]))
    sizes = Sizes(
        num_blocks=rng.choice([7, 12, 30]),
        block_size=rng.choice([1, 3, 4]),
        max_num_seqs=rows,
        max_num_batched_tokens=rows + rng.choice([0, 6, 40]),
        eos_token_ids=(EOS,),
        window=rng.choice([None, None, 2, 7]),
        host_memory=HostMemory(num_swap_blocks, rng.choice([0, 0, 4, 40]), costs),
    )
    return Harness(
        sizes,
        overlap=True,
        prefix_caching=rng.random() < 0.8,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        preemption_mode=rng.choice(["auto", "recompute", "swap", "swap"]),
    )


def random_request(rng: random.Random, max_len: int) -> tuple[list[int], dict[str, object]]:
    # Few prefixes, so that hits, shared blocks and forks meet.
    length = rng.randint(1, max_len - 2)
    ids = prompt(length, 100 * rng.randrange(3))
    if rng.random() < 0.3:
        ids[rng.randrange(length)] = 998
    options: dict[str, object] = {"max_tokens": rng.randint(0, min(20, max_len - length))}
    kind = rng.random()
    if kind < 0.4:
        options |= {"temperature": 1.0, "seed": rng.randrange(100), "n": rng.randint(1, 4)}
    elif kind < 0.65 and options["max_tokens"]:
        options |= {
            "use_beam_search": True,
            "ignore_eos": False,
            "n": rng.randint(1, 2),
            "best_of": rng.randint(2, 4),
            "length_penalty": rng.choice([0.0, 1.0, 2.0]),
        }
    if rng.random() < 0.1:
        options["prompt_logprobs"] = 0
    if rng.random() < 0.2:
        options["cache_salt"] = rng.choice("xy")
    if rng.random() < 0.3:
        options["priority"] = rng.randint(-2, 2)
    return ids, options


@dataclass
class Walk:
    """One engine, what its requests would get alone, and what was aborted.

    `plain` leaves out requests whose steps have to be waited for, so that all others overlap.
    """

    rng: random.Random
    harness: Harness
    plain: bool = False
    expected: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    aborted: set[tuple[str, int]] = field(default_factory=set)

    def run(self, num_steps: int) -> None:
        for number in range(num_steps):
            if self.rng.random() < 0.3:
                self.add(f"r{number}")
            if self.rng.random() < 0.1 and self.expected:
                self.abort(self.rng.choice(list(self.expected)[-12:]))
            if self.rng.random() < 0.01:
                self.harness.engine.reset_prefix_cache()
            if self.harness.engine.has_work():
                self.harness.step()
        self.harness.run()

    def add(self, name: str) -> None:
        limits = self.harness.limits
        ids, options = random_request(self.rng, min(40, limits.max_model_len))
        if self.plain and (options["max_tokens"] == 0 or not PLAIN.isdisjoint(options)):
            return
        try:
            params = self.harness.add(name, ids, **options)
        except RequestError:
            assert options.get("use_beam_search"), "only too many beams are refused"
            return
        if params.use_beam_search:
            texts = [text for text, _ in solo_beams(ids, params, limits.eos_token_ids)]
        else:
            texts = [solo_text(ids, params, index) for index in range(params.n)]
        self.expected |= {(name, index): text for index, text in enumerate(texts)}

    def abort(self, key: tuple[str, int]) -> None:
        name, index = key
        whole = self.rng.random() < 0.5
        self.harness.engine.abort(name, None if whole else index)
        self.aborted |= {other for other in self.expected if other[0] == name} if whole else {key}

    def check(self) -> None:
        choices = self.harness.choices
        assert choices.keys() == self.expected.keys()
        for key, choice in choices.items():
            if choice.finish_reason == "abort":
                assert key in self.aborted
                assert choice.token_ids == self.expected[key][: len(choice.token_ids)]
            else:
                assert choice.token_ids == self.expected[key], key
                assert choice.finish_reason in ("length", "stop")


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_f07_random_walk_with_each_step_planned_while_the_one_before_runs(seed: int) -> None:
    rng = random.Random(1000 + seed)
    walk = Walk(rng, random_harness(rng), plain=seed % 2 == 0)
    walk.run(NUM_STEPS)
    walk.check()
