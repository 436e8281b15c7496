"""The text of /metrics and what the middleware counts."""

import asyncio
import json
import time

import pytest
from octavo_fixtures import byte_ids, token_id
from prometheus_client.parser import text_string_to_metric_families
from served_app import ServeApp, ServedApp

from octavo.engine.core.request_output import EngineStats
from octavo.server.lifecycle import Phase
from octavo.server.metrics import REJECTIONS, ServerMetrics

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]

HELLO = [*byte_ids("hello"), token_id("<|eos|>")]

EXPECTED = {
    "octavo:num_requests_running",
    "octavo:num_requests_waiting",
    "octavo:kv_cache_usage_perc",
    "octavo:cache_config_info",
    "octavo:prompt_tokens",
    "octavo:prompt_tokens_cached",
    "octavo:generation_tokens",
    "octavo:prefix_cache_queries",
    "octavo:prefix_cache_hits",
    "octavo:num_preemptions",
    "octavo:num_preemptions_by_mode",
    "octavo:swap_space_usage_perc",
    "octavo:swapped_blocks",
    "octavo:kv_cache_waste_perc",
    "octavo:kv_offload_usage_perc",
    "octavo:kv_offload_hits",
    "octavo:kv_cache_integrity_errors",
    "octavo:request_success",
    "octavo:requests_rejected",
    "octavo:requests_timed_out",
    "octavo:client_disconnects",
    "octavo:corrupted_requests",
    "octavo:time_to_first_token_seconds",
    "octavo:inter_token_latency_seconds",
    "octavo:request_time_per_output_token_seconds",
    "octavo:e2e_request_latency_seconds",
    "octavo:request_queue_time_seconds",
    "octavo:request_inference_time_seconds",
    "octavo:request_prefill_time_seconds",
    "octavo:request_decode_time_seconds",
    "octavo:request_prompt_tokens",
    "octavo:request_generation_tokens",
    "octavo:request_params_max_tokens",
    "octavo:request_params_n",
    "octavo:iteration_tokens_total",
    "octavo:event_loop_lag_seconds",
    "octavo:event_loop_tasks",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_open_fds",
    "process_max_fds",
    "process_cpu_seconds",
    "process_start_time_seconds",
    "http_requests",
    "http_request_duration_seconds",
}


def read(text: str) -> Samples:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def scrape(served: ServedApp) -> Samples:
    return read((await served.client.get("/metrics")).text)


def value(samples: Samples, name: str, **labels: str) -> float:
    [found] = [
        number
        for (sample, given), number in samples.items()
        if sample == name and set(labels.items()) <= given
    ]
    return found


async def test_every_promised_metric_is_there(serve_app: ServeApp) -> None:
    async with serve_app(HELLO) as served:
        await served.wait_for(Phase.READY)
        text = (await served.client.get("/metrics")).text

    assert {family.name for family in text_string_to_metric_families(text)} == EXPECTED


async def test_an_event_loop_that_is_held_up_shows(serve_app: ServeApp) -> None:
    async with serve_app(HELLO) as served:
        await served.wait_for(Phase.READY)
        await asyncio.sleep(0.01)  # the measuring has begun
        time.sleep(0.5)  # what nobody may do on an event loop
        await asyncio.sleep(0.01)
        samples = await scrape(served)

    assert value(samples, "octavo:event_loop_lag_seconds_sum") > 0.3


async def test_g07_gauges_return_to_zero_and_tokens_equal_usage(serve_app: ServeApp) -> None:
    async with serve_app(HELLO) as served:
        await served.wait_for(Phase.READY)
        body = {"prompt": "abc", "max_tokens": 10, "temperature": 0}
        answers = await asyncio.gather(
            *(served.client.post("/v1/completions", json={**body, "n": n}) for n in (1, 2))
        )
        too_long = await served.client.post("/v1/completions", json={**body, "max_tokens": 9999})
        await served.idle()
        samples = await scrape(served)

    usage = [answer.json()["usage"] for answer in answers]
    assert too_long.status_code == 400
    assert value(samples, "octavo:num_requests_running") == 0
    assert value(samples, "octavo:num_requests_waiting") == 0
    assert value(samples, "octavo:kv_cache_usage_perc") == 0
    assert value(samples, "octavo:request_success_total", finished_reason="stop") == 2
    assert value(samples, "octavo:requests_rejected_total", reason="invalid") == 1
    assert value(samples, "octavo:prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage)
    assert value(samples, "octavo:generation_tokens_total") == sum(
        u["completion_tokens"] for u in usage
    )


async def test_g07_counts_of_a_known_load(serve_app: ServeApp) -> None:
    endless = byte_ids("ab" * 300)
    async with serve_app(endless) as served:
        await served.wait_for(Phase.READY)

        async def ask(tokens: int, **more: object) -> dict[str, int]:
            body = {"prompt": [99] * 40, "max_tokens": tokens, "temperature": 0} | more
            answer = await served.client.post("/v1/completions", json=body)
            assert answer.status_code == 200
            if not more.get("stream"):
                return answer.json()["usage"]
            [*_, last, done] = answer.text.strip().split("\n\n")
            assert done == "data: [DONE]"
            return json.loads(last.removeprefix("data: "))["usage"]

        served.executor.step_seconds = 0.002
        leaving = [asyncio.create_task(ask(400)) for _ in range(2)]
        async with asyncio.timeout(10):
            while value(await scrape(served), "octavo:prompt_tokens_total") < 2 * 40:
                await asyncio.sleep(0.005)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await served.idle()
        left = await scrape(served)
        served.executor.step_seconds = 0
        options = {"stream": True, "stream_options": {"include_usage": True}}
        # Together more than the 64 blocks hold.
        usages = await asyncio.gather(ask(400), ask(300, n=2), ask(400, **options))
        too_long = await served.client.post(
            "/v1/completions", json={"prompt": "c", "max_tokens": 9999}
        )
        await served.idle()
        end = await scrape(served)

    def counted(name: str, **labels: str) -> float:
        return value(end, f"octavo:{name}", **labels) - value(left, f"octavo:{name}", **labels)

    assert too_long.status_code == 400
    success = "octavo:request_success_total"
    assert counted("request_success_total", finished_reason="length") == 3
    assert value(end, success, finished_reason="abort") == 2
    assert value(end, success, finished_reason="stop") == 0
    assert value(end, success, finished_reason="error") == 0
    assert value(end, "octavo:requests_rejected_total", reason="invalid") == 1
    assert counted("num_preemptions_total") > 0
    assert value(left, "octavo:prompt_tokens_total") == 2 * 40
    assert counted("prompt_tokens_total") == sum(each["prompt_tokens"] for each in usages) == 120
    made = [each["completion_tokens"] for each in usages]
    assert counted("generation_tokens_total") == sum(made) == 400 + 2 * 300 + 400
    hits = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usages)
    assert counted("prefix_cache_hits_total") == counted("prompt_tokens_cached_total") == hits > 0
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens", "request_params_n"):
        assert counted(f"{name}_count") == 3 and value(end, f"octavo:{name}_count") == 5
    assert counted("time_to_first_token_seconds_count") == 3
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert value(end, f"octavo:{name}") == 0


async def test_alerts_see_every_label_from_the_start(serve_app: ServeApp) -> None:
    async with serve_app(HELLO) as served:
        await served.wait_for(Phase.READY)
        samples = await scrape(served)

    for name, label, values in (
        ("request_success", "finished_reason", ("stop", "length", "abort", "error")),
        ("requests_rejected", "reason", REJECTIONS),
        ("requests_timed_out", "stage", ("queue", "run")),
        ("client_disconnects", "stage", ("queue", "run")),
        ("num_preemptions_by_mode", "mode", ("recompute", "swap")),
    ):
        for each in values:
            assert value(samples, f"octavo:{name}_total", **{label: each}) == 0
    assert value(samples, "octavo:corrupted_requests_total") == 0


def scraped(stats: EngineStats) -> Samples:
    metrics = ServerMetrics()
    metrics.attach_engine("m", {}, lambda: stats)
    return read(metrics.render().decode())


def test_preemptions_are_split_by_mode() -> None:
    stats = EngineStats(
        num_preemptions=7,
        num_preemptions_by_swap=3,
        num_swap_blocks=8,
        num_used_swap_blocks=2,
        num_swapped_out_blocks=5,
        num_swapped_in_blocks=4,
    )
    samples = scraped(stats)

    assert value(samples, "octavo:num_preemptions_total") == 7
    assert value(samples, "octavo:num_preemptions_by_mode_total", mode="recompute") == 4
    assert value(samples, "octavo:num_preemptions_by_mode_total", mode="swap") == 3
    assert value(samples, "octavo:swap_space_usage_perc") == 0.25
    assert value(samples, "octavo:swapped_blocks_total", direction="out") == 5
    assert value(samples, "octavo:swapped_blocks_total", direction="in") == 4


def test_waste_and_offloaded_blocks_are_shown() -> None:
    stats = EngineStats(
        num_used_blocks=5,
        block_size=16,
        num_wasted_slots=20,
        num_offload_blocks=8,
        num_used_offload_blocks=6,
        num_offload_hits=9,
    )
    samples = scraped(stats)

    assert value(samples, "octavo:kv_cache_waste_perc") == 0.25
    assert value(samples, "octavo:kv_offload_usage_perc") == 0.75
    assert value(samples, "octavo:kv_offload_hits_total") == 9
    assert value(scraped(EngineStats()), "octavo:kv_cache_waste_perc") == 0


async def test_an_alias_shows_the_same_under_another_prefix(serve_app: ServeApp) -> None:
    async with serve_app(HELLO, metrics_alias="vllm") as served:
        await served.wait_for(Phase.READY)
        await served.client.post("/v1/completions", json={"prompt": "octavo:", "max_tokens": 2})
        text = (await served.client.get("/metrics")).text

    families = {family.name: family for family in text_string_to_metric_families(text)}
    aliased = {name for name in families if name.startswith("vllm:")}
    assert aliased == {name.replace("octavo:", "vllm:") for name in EXPECTED if ":" in name}
    assert families["vllm:generation_tokens"].samples[0].value == 2


async def test_http_metrics_carry_the_routes_pattern(serve_app: ServeApp) -> None:
    async with serve_app(HELLO) as served:
        await served.wait_for(Phase.READY)
        await served.client.get("/v1/models/fake")
        await served.client.get("/no/such/path")
        await served.client.request("BREW", "/version")
        samples = await scrape(served)

    handlers = {
        dict(labels)["handler"]: dict(labels)["status"]
        for name, labels in samples
        if name == "http_requests_total"
    }
    assert handlers["none"] == "404"
    assert handlers["/v1/models/{model_id:path}"] == "200"
    assert value(samples, "http_requests_total", method="other") == 1


@pytest.mark.parametrize("labels", [{"model_name": "alias", "engine": "0"}])
async def test_the_served_name_is_the_label(serve_app: ServeApp, labels: dict[str, str]) -> None:
    async with serve_app(HELLO, served_model_name=("alias", "other")) as served:
        await served.wait_for(Phase.READY)
        samples = await scrape(served)

    assert value(samples, "octavo:num_requests_running", **labels) == 0


async def test_each_application_has_metrics_of_its_own(serve_app: ServeApp) -> None:
    async with serve_app(HELLO) as first, serve_app(HELLO) as second:
        await first.client.get("/version")
        samples = await scrape(second)

    assert not any(name == "http_requests_total" for name, _ in samples)
