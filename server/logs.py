"""Log lines as text or JSON, all to standard error."""

import datetime
import logging
import sys
from typing import Literal

import orjson

LogFormat = Literal["text", "json"]
FIELDS = "octavo_fields"
"""Attribute of a record whose mapping becomes fields of its JSON object."""


class _JsonFormatter(logging.Formatter):
    """One JSON object a line, in UTF-8."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        entry: dict[str, object] = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        entry.update(record.__dict__.get(FIELDS, {}))
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(entry).decode()


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Send all logs of the process to standard error; replaces what was configured before."""
    handler = logging.StreamHandler(sys.stderr)
    if log_format == "json":
        handler.setFormatter(_JsonFormatter())
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")
        )
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Libraries that speak at info about things that only their developers want to know.
    for name in ("uvicorn", "uvicorn.error", "httpx", "httpcore", "numba", "asyncio", "filelock"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(True)
