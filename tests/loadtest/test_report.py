import json
import math
from typing import Any

import pytest

from octavo.loadtest.client import RequestResult
from octavo.loadtest.report import (
    Report,
    ReportOptions,
    RunSettings,
    peak_concurrency,
    peak_output_throughput,
)
from octavo.loadtest.speculation import SpeculationCounts

# Two answers with times that can be worked out by hand, and a failed request.
FAST = RequestResult(10, 5, start=0.0, ttft=0.1, itls=[0.1, 0.1, 0.1, 0.1], text="abcde")
SLOW = RequestResult(20, 3, start=0.2, ttft=0.3, itls=[0.2, 0.6], text="xyz")
FAILED = RequestResult(30, error="HTTP 429: queue full", start=0.3)


def settings(**changed: Any) -> RunSettings:
    values = {
        "date": "20250102-030405",
        "backend": "openai",
        "label": None,
        "model_id": "m",
        "tokenizer_id": "m",
        "num_prompts": 3,
        "request_rate": 1.5,
        "burstiness": 1.0,
        "max_concurrency": 8,
    }
    return RunSettings(**(values | changed))


def report(*results: RequestResult, **options: Any) -> Report:
    return Report(settings(), ReportOptions(**options), results, duration=2.0)


def test_totals() -> None:
    value = report(FAST, SLOW, FAILED).to_json()
    expected = {
        "date": "20250102-030405",
        "backend": "openai",
        "label": None,
        "model_id": "m",
        "tokenizer_id": "m",
        "num_prompts": 3,
        "request_rate": 1.5,
        "burstiness": 1.0,
        "max_concurrency": 8,
        "duration": 2.0,
        "completed": 2,
        "failed": 1,
        "total_input_tokens": 30,
        "total_output_tokens": 8,
        "request_throughput": 1.0,
        "request_goodput": None,
        "output_throughput": 4.0,
        "total_token_throughput": 19.0,
        "max_output_tokens_per_s": 7.0,
        "max_concurrent_requests": 2,
    }
    assert {name: value[name] for name in expected} == pytest.approx(expected)


def test_statistics() -> None:
    value = report(FAST, SLOW, FAILED).to_json()
    # Time per output token: 0.4 s / 4 and 0.8 s / 2. Latency: 0.5 s and 1.1 s.
    expected = {
        "mean_ttft_ms": 200.0,
        "median_ttft_ms": 200.0,
        "std_ttft_ms": 100.0,
        "p99_ttft_ms": 298.0,
        "mean_tpot_ms": 250.0,
        "median_tpot_ms": 250.0,
        "std_tpot_ms": 150.0,
        "p99_tpot_ms": 397.0,
        "mean_itl_ms": 200.0,
        "median_itl_ms": 100.0,
        "std_itl_ms": math.sqrt(4 * 100**2 + 0**2 + 400**2) / math.sqrt(6),
        "p99_itl_ms": 580.0,
        "mean_e2el_ms": 800.0,
        "median_e2el_ms": 800.0,
        "std_e2el_ms": 300.0,
        "p99_e2el_ms": 1094.0,
    }
    assert {name: value[name] for name in expected} == pytest.approx(expected)


def test_printed_block() -> None:
    options = {"metrics": ["ttft", "tpot"], "percentiles": [50.0, 99.0, 99.9]}
    assert report(FAST, SLOW, FAILED, goodput={"ttft": 150.0}, **options).render() == (
        "============ Serving Benchmark Result ============\n"
        "Successful requests:                     2\n"
        "Failed requests:                         1\n"
        "Maximum request concurrency:             8\n"
        "Request rate configured (RPS):           1.50\n"
        "Benchmark duration (s):                  2.00\n"
        "Total input tokens:                      30\n"
        "Total generated tokens:                  8\n"
        "Request throughput (req/s):              1.00\n"
        "Request goodput (req/s):                 0.50\n"
        "Output token throughput (tok/s):         4.00\n"
        "Peak output token throughput (tok/s):    7.00\n"
        "Peak concurrent requests:                2\n"
        "Total token throughput (tok/s):          19.00\n"
        "---------------Time to First Token----------------\n"
        "Mean TTFT (ms):                          200.00\n"
        "Median TTFT (ms):                        200.00\n"
        "P50 TTFT (ms):                           200.00\n"
        "P99 TTFT (ms):                           298.00\n"
        "P99.9 TTFT (ms):                         299.80\n"
        "-----Time per Output Token (excl. 1st token)------\n"
        "Mean TPOT (ms):                          250.00\n"
        "Median TPOT (ms):                        250.00\n"
        "P50 TPOT (ms):                           250.00\n"
        "P99 TPOT (ms):                           397.00\n"
        "P99.9 TPOT (ms):                         399.70\n"
        "=================================================="
    )


def test_other_percentiles_do_not_displace_p99_in_the_file() -> None:
    value = report(FAST, SLOW, percentiles=[90.0]).to_json()
    assert value["p90_ttft_ms"] == pytest.approx(280.0)
    assert value["p99_ttft_ms"] == pytest.approx(298.0)


@pytest.mark.parametrize(
    ("limits", "within"),
    [
        ({"ttft": 100.1, "tpot": 100.1, "e2el": 500.1}, 1),
        ({"ttft": 300.1}, 2),
        ({"ttft": 300.1, "tpot": 399.0}, 1),
        ({"e2el": 499.0}, 0),
    ],
)
def test_goodput_counts_requests_within_all_limits(limits: dict[str, float], within: int) -> None:
    value = report(FAST, SLOW, FAILED, goodput=limits).to_json()
    assert value["request_goodput"] == within / 2.0


def test_one_token_has_no_time_per_output_token() -> None:
    value = report(RequestResult(4, 1, ttft=0.2), FAST).to_json()
    assert value["mean_tpot_ms"] == pytest.approx(100.0)


def test_nothing_completed_gives_zeros_that_json_can_hold() -> None:
    value = report(FAILED).to_json()
    assert value["mean_ttft_ms"] == value["p99_itl_ms"] == value["max_concurrent_requests"] == 0
    json.dumps(value, allow_nan=False)
    assert report(FAILED).render()


def test_infinite_rate_and_no_limit_are_written_as_words() -> None:
    run = Report(
        settings(request_rate=math.inf, max_concurrency=None), ReportOptions(), [FAST], 1.0
    )
    assert json.loads(json.dumps(run.to_json(), allow_nan=False))["request_rate"] == "inf"
    assert "Maximum request concurrency:             none\n" in run.render()
    assert "Request rate configured (RPS):           inf\n" in run.render()


def test_details_have_an_entry_per_request_in_order() -> None:
    value = report(FAST, FAILED, SLOW).to_json(detailed=True)
    assert value["input_lens"] == [10, 30, 20]
    assert value["output_lens"] == [5, 0, 3]
    assert value["ttfts"] == [0.1, 0.0, 0.3]
    assert value["itls"] == [FAST.itls, [], SLOW.itls]
    assert value["start_times"] == [0.0, 0.3, 0.2]
    assert value["generated_texts"] == ["abcde", "", "xyz"]
    assert value["errors"] == ["", "HTTP 429: queue full", ""]
    assert "errors" not in report(FAST).to_json()


def test_peak_throughput_spreads_tokens_over_chunks() -> None:
    # Ten tokens in two chunks, one of them in the next second.
    result = RequestResult(1, 10, start=0.5, ttft=0.25, itls=[0.5])
    assert peak_output_throughput([result, result]) == 10.0


def test_requests_that_follow_each_other_are_not_concurrent() -> None:
    first = RequestResult(1, 1, start=0.0, ttft=0.5)
    second = RequestResult(1, 1, start=0.5, ttft=0.5)
    assert peak_concurrency([second, first]) == 1


METRICS_PAGE = """
# TYPE octavo:spec_decode_num_drafts counter
octavo:spec_decode_num_drafts_total{engine="0",model_name="m"} 30.0
octavo:spec_decode_num_drafts_total{engine="1",model_name="m"} 10.0
octavo:spec_decode_num_drafts_created{engine="0",model_name="m"} 1.7e9
octavo:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 200.0
octavo:spec_decode_num_accepted_tokens_total 5e1
"""


def test_speculation_is_what_was_added_during_the_run() -> None:
    after = SpeculationCounts.from_metrics(METRICS_PAGE)
    assert after == SpeculationCounts(40, 200, 50)
    during = after.since(SpeculationCounts(20, 100, 10))
    assert during == SpeculationCounts(20, 100, 40)
    run = Report(settings(), ReportOptions(metrics=[]), [FAST], 1.0, during)
    assert run.render().endswith(
        "---------------Speculative Decoding---------------\n"
        "Acceptance rate (%):                     40.00\n"
        "Acceptance length:                       3.00\n"
        "Drafts:                                  20\n"
        "Draft tokens:                            100\n"
        "Accepted tokens:                         40\n"
        "=================================================="
    )
    assert run.to_json()["spec_decode_acceptance_rate"] == 40.0


def test_no_speculation_without_drafts() -> None:
    none = SpeculationCounts.from_metrics("octavo:generation_tokens_total 5\n")
    assert none.since(none) is None
