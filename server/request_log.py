"""The figures of one HTTP request for its line in the access log."""

from collections.abc import Sequence

from octavo.server.metrics import RequestSummary

Figures = dict[str, str | int | float]


def request_figures(summaries: Sequence[RequestSummary]) -> Figures:
    """Return tokens and times of the prompts of one HTTP request; empty without any.

    Tokens are sums. The queue time is the longest, time to first token runs from the first arrival
    to the first token of all, and time per output token is the mean over the prompts. Times are in
    milliseconds; one that never came is left out.
    """
    if not summaries:
        return {}
    figures: Figures = {
        "prompt_tokens": sum(summary.num_prompt_tokens for summary in summaries),
        "output_tokens": sum(summary.num_output_tokens for summary in summaries),
        "finish_reason": ",".join(sorted({summary.reason.value for summary in summaries})),
    }
    times = [summary.times for summary in summaries]
    queue = [each.scheduled - each.arrival for each in times if each.scheduled is not None]
    first = [each.first_token for each in times if each.first_token is not None]
    if queue:
        figures["queue_ms"] = _milliseconds(max(queue))
    if first:
        figures["ttft_ms"] = _milliseconds(min(first) - min(each.arrival for each in times))
    per_token = [
        seconds for summary in summaries if (seconds := summary.time_per_output_token) is not None
    ]
    if per_token:
        figures["tpot_ms"] = _milliseconds(sum(per_token) / len(per_token))
    return figures


def describe_figures(figures: Figures) -> str:
    """Return them as text, with a space in front of each."""
    return "".join(f" {name}={value}" for name, value in figures.items())


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 3)
