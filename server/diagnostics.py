"""What the log gets when the engine has stopped: where it stood, and what it was asked last."""

import sys
import threading
import traceback
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from octavo.engine.core.sampling_params import SamplingParams

_NUM_REMEMBERED = 20


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """The settings of one prompt, without any text or token. `arrival` is monotonic seconds."""

    request_id: str
    key_name: str | None
    num_prompt_tokens: int
    params: SamplingParams
    arrival: float

    def describe(self, now: float) -> str:
        """Return one line."""
        return (
            f"{self.request_id} key={self.key_name or '-'} {now - self.arrival:.1f} s ago: "
            f"{self.num_prompt_tokens} prompt tokens, {describe_params(self.params)}"
        )


class LastRequests:
    """The requests that came last, for the log of a failure."""

    def __init__(self) -> None:
        self._traces: deque[RequestTrace] = deque(maxlen=_NUM_REMEMBERED)

    def add(self, trace: RequestTrace) -> None:
        """Remember one, and forget the oldest."""
        self._traces.append(trace)

    def describe(self, now: float) -> list[str]:
        """Return a line for each, the newest last."""
        return [trace.describe(now) for trace in self._traces]


def describe_params(params: SamplingParams) -> str:
    """List what differs from the defaults; of what may hold a client's text, only the length."""
    parts = []
    values = asdict(params)
    for setting in fields(params):
        value = values[setting.name]
        if value != setting.default and value not in ((), {}):
            is_sized = isinstance(value, tuple | Mapping)
            parts.append(f"{setting.name}={f'{len(value)} given' if is_sized else value}")
    return " ".join(parts)


def thread_stack(name: str) -> str:
    """Return where threads called `name` stand; empty when there is none."""
    frames = sys._current_frames()
    return "\n".join(
        "".join(traceback.format_stack(frames[thread.ident]))
        for thread in threading.enumerate()
        if thread.name == name and thread.ident in frames
    )
