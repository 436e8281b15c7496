"""What is taken for granted when a step is planned while the one before it runs."""

from octavo.engine.core.request import Request
from octavo.engine.core.scheduler_output import SchedulerOutput
from octavo.engine.scheduler.open_sequences import OpenSequences


class Lookahead:
    """Lets sequences go on before it is known that they do.

    An assumed sequence has computed the tokens of the running step and ends with one unknown id,
    unless that id is certain to be its last. Requests whose next step depends on more than that
    are waited for, and so is everybody while one of them is open: beams, choices before their
    fork, scored prompts and embeddings.
    """

    def __init__(self, open_sequences: OpenSequences, max_model_len: int) -> None:
        self._open = open_sequences
        self._max_model_len = max_model_len
        self._waited_for: dict[str, Request] = {}
        self._assumed_step: int | None = None
        self.held_back = False

    def note(self, request: Request) -> None:
        """Look at a new request."""
        if _depends_on_results(request):
            self._waited_for[request.request_id] = request

    @property
    def is_possible(self) -> bool:
        """Whether the next step may be planned now.

        Not after one that lacked blocks for somebody: the results may bring them, and if they do
        not, somebody has to give way.
        """
        for request in list(self._waited_for.values()):
            if not _depends_on_results(request):
                del self._waited_for[request.request_id]
        return not (self._waited_for or self.held_back)

    def begin(self) -> None:
        """A step is planned with all results known."""
        self.held_back = False
        self._assumed_step = None

    def assume(self, running: SchedulerOutput) -> None:
        """Let the sequences of a running step advance."""
        by_id, longest = self._open.by_id, self._max_model_len
        for item in running.scheduled:
            sequence = by_id.get(item.seq_id)
            if sequence is None:
                continue
            sequence.advance(item.num_tokens)
            num_output_tokens = sequence.num_output_tokens + 1
            if (
                item.sample
                and num_output_tokens < sequence.request.params.max_tokens
                and sequence.num_tokens + 1 < longest
            ):
                sequence.append_unknown()
        self._assumed_step = running.step

    def has_assumed(self, plan: SchedulerOutput) -> bool:
        """Whether the sequences of `plan` have advanced already."""
        return plan.step == self._assumed_step


def _depends_on_results(request: Request) -> bool:
    params = request.params
    if request.finished:
        return False
    if params.use_beam_search or params.max_tokens == 0:
        return True
    if params.prompt_logprobs is not None:
        return not any(sequence.num_output_tokens for sequence in request.sequences)
    return bool(request.unborn_choices) and params.num_sequences > 1
