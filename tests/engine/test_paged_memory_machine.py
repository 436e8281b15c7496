"""Arrivals, forks, beams, aborts, failures, resets and preemptions of both modes, in any order.

Block sizes, pools and steps are tiny, so that all of it happens all the time. After each step all
bookkeeping is checked; the simulated cache checks every slot that is read, after copies, swaps and
offloads too. Beside the engine stands a model of the truth: the text that each request gets alone,
the prefixes that have been computed since the last reset, and how much memory that can take.
"""

from collections import Counter
from typing import Any, ClassVar

import pytest
from engine_harness import Harness, Sizes
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from simulated_model import solo_beams, solo_text

from octavo.engine.core.errors import RequestError
from octavo.engine.core.limits import HostMemory, PreemptionCosts
from octavo.engine.core.sampling_params import SamplingParams

NUM_EXAMPLES = 55
NUM_RULES = 60
NUM_STEPS = 5_000  # in each of two tests
EOS = 3

MEMORIES = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([7, 12, 30]),
        "block_size": st.sampled_from([1, 3, 4]),
        "max_num_seqs": st.sampled_from([2, 5, 9]),
        "window": st.sampled_from([None, None, 2, 7]),
    }
)
# Per block and token: either mode may be the cheaper one.
HOSTS = st.builds(
    HostMemory,
    st.sampled_from([200, 20, 3, 0]),
    st.sampled_from([0, 40, 4]),
    st.builds(PreemptionCosts, st.just(1.0), st.sampled_from([0.4, 0.6, 1.5])),
)
POLICIES = st.fixed_dictionaries(
    {
        "preemption_mode": st.sampled_from(["swap", "recompute", "auto"]),
        "scheduling_policy": st.sampled_from(["fcfs", "priority"]),
        "long_prefill_token_threshold": st.sampled_from([0, 5]),
    }
)
DRAWN = st.fixed_dictionaries(
    {
        "temperature": st.just(1.0),
        "seed": st.integers(0, 99),
        "n": st.integers(1, 4),
    }
)
SEARCHED = st.fixed_dictionaries(
    {
        "use_beam_search": st.just(True),
        "ignore_eos": st.just(False),
        "n": st.integers(1, 2),
        "best_of": st.integers(2, 4),
        "length_penalty": st.sampled_from([0.0, 1.0, 2.0]),
        "early_stopping": st.sampled_from([False, False, True, "never"]),
    }
)
AROUND = st.fixed_dictionaries(
    {},
    optional={
        "prompt_logprobs": st.just(0),
        "cache_salt": st.sampled_from("xy"),
        "priority": st.integers(-2, 2),
    },
)
REQUESTS = st.fixed_dictionaries(
    {
        # Few prefixes, so that hits, shared blocks and forks meet.
        "family": st.integers(0, 2),
        "length": st.integers(1, 38),
        "changed": st.none() | st.integers(0, 37),
        "output": st.integers(0, 20).map(lambda draw: 20 - draw),
        "kind": st.one_of(st.just({}), DRAWN, SEARCHED),
        "around": AROUND,
    }
)


def num_common(left: list[int], right: list[int]) -> int:
    """How many tokens the two begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(left), len(right)))


class PagedMemory(RuleBasedStateMachine):
    """One engine and the truth about it; `seen` counts over all machines."""

    overlap = False
    seen: ClassVar[Counter[str]] = Counter()

    @initialize(
        memory=MEMORIES,
        host=HOSTS,
        policy=POLICIES,
        budget=st.sampled_from([0, 6, 40]),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(
        self,
        memory: dict[str, Any],
        host: HostMemory,
        policy: dict[str, Any],
        budget: int,
        caching: bool,
    ) -> None:
        sizes = Sizes(
            **memory,
            max_num_batched_tokens=memory["max_num_seqs"] + budget,
            eos_token_ids=(EOS,),
            host_memory=host,
        )
        self.harness = Harness(sizes, prefix_caching=caching, overlap=self.overlap, **policy)
        self.caching = caching
        self.prompts: dict[str, tuple[list[int], str | None]] = {}
        self.expected: dict[tuple[str, int], list[int]] = {}
        self.beams: set[str] = set()
        self.aborted: set[tuple[str, int]] = set()
        self.failing: set[int] = set()
        # Requests that may have computed something since the last reset, and for each request
        # those that were among them at any time since it came.
        self.known: set[str] = set()
        self.met: dict[str, set[str]] = {}

    @property
    def open_choices(self) -> list[tuple[str, int]]:
        choices = self.harness.choices
        return [
            key
            for key in self.expected
            if key not in self.aborted
            and (key not in choices or choices[key].finish_reason is None)
        ]

    # What happens.

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def arrive(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.add(**request)

    def add(
        self,
        family: int,
        length: int,
        changed: int | None,
        output: int,
        kind: dict[str, Any],
        around: dict[str, Any],
    ) -> None:
        limit = min(40, self.harness.limits.max_model_len)
        length = min(length, limit - 2)
        ids = [(100 * family + number) % 997 for number in range(length)]
        if changed is not None and changed < length:
            ids[changed] = 998
        beams = "use_beam_search" in kind
        options = {**kind, **around, "max_tokens": max(beams, min(output, limit - length))}
        name = f"r{len(self.prompts)}"
        try:
            params = self.harness.add(name, ids, **options)
        except RequestError:
            assert beams, "only too many beams are refused"
            return
        self.prompts[name] = ids, around.get("cache_salt")
        for others in self.met.values():
            others.add(name)
        self.met[name] = set(self.known)
        self.known.add(name)
        self.expect(name, ids, params)
        self.seen["beam searches" if beams else "requests"] += 1
        self.seen["choices"] += params.n > 1

    def expect(self, name: str, ids: list[int], params: SamplingParams) -> None:
        if params.use_beam_search:
            self.beams.add(name)
            texts = [text for text, _ in solo_beams(ids, params, (EOS,))]
        else:
            texts = [solo_text(ids, params, index) for index in range(params.n)]
        self.expected |= {(name, index): text for index, text in enumerate(texts)}

    @precondition(lambda self: self.harness.engine.has_work())
    @rule(count=st.integers(1, 30))
    def go_on(self, count: int) -> None:
        for _ in range(count):
            if self.harness.engine.has_work():
                self.step()

    @precondition(lambda self: self.open_choices)
    @rule(place=st.integers(0, 11), whole=st.booleans())
    def abort(self, place: int, whole: bool) -> None:
        candidates = self.open_choices
        name, index = candidates[-1 - place % len(candidates)]
        self.harness.engine.abort(name, None if whole else index)
        same = {key for key in self.expected if key[0] == name}
        self.aborted |= same if whole else {(name, index)}
        self.seen["aborts"] += 1

    @precondition(lambda self: self.known)
    @rule()
    def reset(self) -> None:
        idle = self.harness.engine.stats().num_used_blocks == 0
        assert self.harness.engine.reset_prefix_cache() == idle
        if idle:
            self.known = {name for name, _ in self.open_choices}
            self.seen["resets"] += 1

    @precondition(lambda self: self.open_choices)
    @rule(place=st.integers(0, 11), ahead=st.integers(0, 3))
    def spoil(self, place: int, ahead: int) -> None:
        """The row that draws a certain id fails."""
        candidates = self.open_choices
        key = candidates[-1 - place % len(candidates)]
        position = len(self.harness.choices[key].token_ids) + ahead
        if key[0] not in self.beams and position < len(self.expected[key]):
            token = self.expected[key][position]
            self.harness.executor.failing_token = token
            self.failing.add(token)

    def step(self) -> None:
        before = self.harness.engine.stats()
        num_plans = len(self.harness.executor.plans)
        deltas = self.harness.step()
        after = self.harness.engine.stats()
        seen = self.seen
        seen["steps"] += 1
        swapped = after.num_preemptions_by_swap - before.num_preemptions_by_swap
        seen["preemptions by swap"] += swapped
        seen["preemptions by recomputation"] += (
            after.num_preemptions - before.num_preemptions - swapped
        )
        seen["offload hits"] += after.num_offload_hits - before.num_offload_hits
        for plan in self.harness.executor.plans[num_plans:]:
            seen["block copies"] += len(plan.block_copies)
        for delta in deltas:
            seen["failures"] += delta.error is not None
            seen["hits"] += delta.num_cached_tokens > 0
            key = delta.request_id, delta.index
            if len(self.harness.choices[key].deltas) == 1:
                assert delta.num_cached_tokens <= self.longest_hit(delta.request_id)
            self.check_text(key)

    def longest_hit(self, name: str) -> int:
        """How many tokens of a prompt may have been known: whole blocks, never the last token."""
        ids, salt = self.prompts[name]
        longest = 0
        for (other, _), text in self.expected.items():
            head, other_salt = self.prompts[other]
            if other in self.met[name] and other_salt == salt and self.caching:
                longest = max(longest, num_common(ids, [*head, *text]))
        block_size = self.harness.limits.block_size
        return min(longest, len(ids) - 1) // block_size * block_size

    # What always holds.

    def check_text(self, key: tuple[str, int]) -> None:
        """It is that of a solo run, as far as it goes, and ends early for a reason only."""
        choice, expected = self.harness.choices[key], self.expected[key]
        ids, reason = choice.token_ids, choice.finish_reason
        assert ids == expected[: len(ids)], key
        assert reason in (None, "abort", "error") or ids == expected, key
        assert reason != "abort" or key in self.aborted, key
        assert reason != "error" or self.failing, key

    @invariant()
    def only_last_blocks_are_partly_empty(self) -> None:
        limits, stats = self.harness.limits, self.harness.engine.stats()
        most = limits.max_num_seqs * (limits.block_size - 1)
        assert 0 <= stats.num_wasted_slots <= most
        if not self.open_choices:
            assert (stats.num_used_blocks, stats.num_used_swap_blocks) == (0, 0)

    def teardown(self) -> None:
        while self.harness.engine.has_work():
            self.step()
        self.harness.run()
        assert self.harness.choices.keys() == self.expected.keys()


class OverlappedSteps(PagedMemory):
    """The same where the next step is planned while one runs."""

    overlap = True


@pytest.mark.timeout(600)
@pytest.mark.parametrize("machine", [PagedMemory, OverlappedSteps])
def test_f07_paged_memory_against_the_truth(machine: type[PagedMemory]) -> None:
    machine.seen = Counter()
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=NUM_RULES,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            # Making a failure small takes minutes; add Phase.shrink to look into one.
            phases=[Phase.generate],
        ),
    )
    seen = machine.seen
    assert seen["steps"] >= NUM_STEPS
    rare = ("beam searches", "choices", "aborts", "resets", "failures", "hits", "offload hits")
    modes = ("preemptions by swap", "preemptions by recomputation")
    assert not [name for name in (*rare, *modes, "block copies") if seen[name] < 10], seen
