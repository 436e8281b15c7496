"""The error tree. Everything Octavo raises on purpose is one of these.

OctavoError
|-- ConfigurationError      the start stops; the message names the flag and a value that works
|   `-- CheckpointError     a model file is missing, damaged or of a kind that is not supported
|-- RequestError            the client's fault; carries `param` and `code` for the error body
|   |-- InvalidRequestError     malformed, out of range, contradictory
|   |-- UnsupportedParameterError   known, would change the output, not built
|   |-- ContextLengthError      prompt plus wanted tokens do not fit
|   |-- ModelNotFoundError      the named model is not served
|   |-- BodyTooLargeError       the body is above the limit
|   `-- UnsupportedMediaTypeError   the body is not JSON by its content type
|-- AdminKeyError           a route for the operator was asked for without the admin key
|-- QueueFullError          overload: the waiting queue is full
|   `-- KeyLimitError           one API key has used up what one key may
|-- NotReadyError           the server is starting or draining
|-- RequestTimeoutError     the time limit of one request was reached
|-- ClientDisconnectedError the client went away before its answer
|-- RequestFailedError      one request failed inside the engine; all others go on
`-- EngineDeadError         the engine stopped for good

`server/errors.py` is the only place that maps them to HTTP.
"""

import errno


class OctavoError(Exception):
    """Base of all errors that Octavo raises on purpose."""


class ConfigurationError(OctavoError):
    """The server cannot start as configured."""


class CheckpointError(ConfigurationError):
    """A checkpoint cannot be loaded."""


class RequestError(OctavoError):
    """A request that cannot be served as sent.

    `param` is the field at fault or None; `code` is the machine-readable code or None.
    """

    code: str | None = None

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(RequestError):
    """A field is malformed, out of range or contradicts another."""


class UnsupportedParameterError(RequestError):
    """A known field whose effect is not built; ignoring it would change the output silently."""

    code = "unsupported_parameter"


class ContextLengthError(RequestError):
    """The prompt and the tokens asked for do not fit into the context."""

    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    """The request names a model that is not served."""

    code = "model_not_found"


class BodyTooLargeError(RequestError):
    """The body is larger than the server accepts."""

    code = "request_too_large"


class UnsupportedMediaTypeError(RequestError):
    """The content type of the body is missing or not JSON in UTF-8."""

    code = "unsupported_media_type"


class QueueFullError(OctavoError):
    """The waiting queue is full; try again after `retry_after` seconds."""

    code = "queue_full"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class KeyLimitError(QueueFullError):
    """One API key has used up what one key may."""

    code = "rate_limit_exceeded"


class AdminKeyError(OctavoError):
    """A route for the operator was asked for without the admin key."""


class NotReadyError(OctavoError):
    """No work is taken now; `code` is server_starting or server_draining."""

    def __init__(self, message: str, code: str, retry_after: int) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after = retry_after


class RequestTimeoutError(OctavoError):
    """A request did not end within the time limit of the server."""


class ClientDisconnectedError(OctavoError):
    """The client went away; nobody reads the answer."""


class RequestFailedError(OctavoError):
    """One request failed inside the engine."""


class EngineDeadError(OctavoError):
    """The engine stopped and cannot serve any more requests."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error`, of Python or of a library, says that the host has no memory left."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno == errno.ENOMEM
    # Libraries have no type for it, but they quote the system.
    return not isinstance(error, OctavoError) and "annot allocate memory" in str(error)
