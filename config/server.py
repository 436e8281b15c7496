"""The HTTP side: where it listens, who may ask, how much is taken and what is logged."""

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from octavo.config.base import ConfigModel

MIB = 1024 * 1024


class ServerConfig(ConfigModel):
    """Listening, access, limits, chat and logs."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port; 0 takes any free one.")
    uds: str | None = Field(
        default=None, description="Path of a Unix socket to listen on instead of host and port."
    )
    root_path: str = Field(
        default="", description="Path prefix that a proxy in front takes away before it forwards."
    )
    timeout_keep_alive: int = Field(
        default=120, ge=1, description="Seconds an idle HTTP connection stays open."
    )
    sse_keep_alive: float = Field(
        default=15,
        ge=0,
        description="Seconds of silence in a stream before a comment line is sent; 0 is never.",
    )
    max_body_size: int = Field(
        default=32 * MIB, ge=1, description="Largest request body, in bytes."
    )
    ssl_keyfile: str | None = Field(default=None, description="Private key file for HTTPS.")
    ssl_certfile: str | None = Field(default=None, description="Certificate file for HTTPS.")
    ssl_ca_certs: str | None = Field(
        default=None, description="CA file; clients must then show a certificate signed by it."
    )
    disable_fastapi_docs: bool = Field(
        default=False, description="Serve neither /docs and /redoc nor /openapi.json."
    )

    allowed_origins: tuple[str, ...] = Field(
        default=("*",), description="Origins that browsers may call from (CORS)."
    )
    allowed_methods: tuple[str, ...] = Field(
        default=("*",), description="Methods that browsers may use (CORS)."
    )
    allowed_headers: tuple[str, ...] = Field(
        default=("*",), description="Headers that browsers may send (CORS)."
    )
    allow_credentials: bool = Field(
        default=False, description="Let browsers send cookies and the like (CORS)."
    )

    api_key: tuple[str, ...] = Field(
        default=(), description="Key that clients must send as a bearer token; any one of several."
    )
    api_key_file: str | None = Field(
        default=None,
        description="File with one key a line, as KEY or NAME:KEY, in addition to --api-key; "
        "lines that begin with # are left out. Read again on SIGHUP.",
    )
    admin_key: str | None = Field(
        default=None,
        description="Key of the operator; opens every route, those of --enable-admin too.",
    )
    enable_admin: bool = Field(
        default=False,
        description="Serve the routes that reset the cache, show the block pool and record a "
        "profile, for the admin key only.",
    )
    key_max_concurrency: int | None = Field(
        default=None,
        ge=1,
        description="Unfinished requests of one API key before it gets 429; default: no limit.",
    )
    key_rpm: int | None = Field(
        default=None,
        ge=1,
        description="Requests of one API key within a minute before it gets 429; "
        "default: no limit.",
    )
    max_num_queued_reqs: int = Field(
        default=1024,
        ge=0,
        description="Requests that may wait beyond --max-num-seqs before new ones get 429.",
    )
    max_num_queued_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Prompt tokens that may wait before new requests get 429; default: no limit.",
    )
    queue_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds a request may wait for its first step before it ends with 503; "
        "default: no limit.",
    )
    request_timeout: float | None = Field(
        default=None,
        gt=0,
        description="Seconds after which a request ends with 408; default: no limit.",
    )
    shutdown_timeout: float = Field(
        default=30, ge=0, description="Seconds that accepted requests get after SIGTERM."
    )
    watchdog_timeout: float = Field(
        default=300,
        gt=0,
        description="Seconds after which a step counts as hung, which ends the engine.",
    )

    served_model_name: tuple[str, ...] = Field(
        default=(), description="Name that clients may give as model; default: the model's own."
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template: a file, or the Jinja text itself; default: the model's own.",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        default="auto", description="Whether the template gets message content as text or as parts."
    )
    default_chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="JSON object of variables for every chat template."
    )
    trust_request_chat_template: bool = Field(
        default=False, description="Let requests bring a chat_template of their own."
    )
    reasoning_parser: Literal["deepseek_r1", "qwen3", "mistral"] | None = Field(
        default=None,
        description="How the model marks its reasoning, which then comes apart from the content; "
        "default: it stays in the content.",
    )
    max_logprobs: int = Field(
        default=20, ge=0, description="Most alternatives per token that a request may ask for."
    )
    logprobs_mode: Literal["raw_logprobs"] = Field(
        default="raw_logprobs",
        description="What logprobs are: the log-softmax of the model's own logits, before bias, "
        "penalties and temperature.",
    )
    return_tokens_as_token_ids: bool = Field(
        default=False, description="Write tokens in logprobs as token_id:N by default."
    )
    stream_interval: int = Field(
        default=1,
        ge=1,
        description="Tokens that wait before the next chunk of a stream is sent; the first and "
        "the last ones go at once.",
    )
    enable_force_include_usage: bool = Field(
        default=False, description="Send the usage chunk in every stream, asked for or not."
    )
    clamp_max_tokens: bool = Field(
        default=False, description="Cut a max_tokens that does not fit instead of refusing it."
    )

    metrics_alias: Literal["none", "vllm"] = Field(
        default="none",
        description="Show all metrics under this prefix too, for dashboards that exist.",
    )
    otlp_endpoint: str | None = Field(
        default=None,
        description="URL of an OpenTelemetry collector (OTLP over HTTP, such as "
        "http://localhost:4318) that gets traces; needs the extra otel.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least level that is logged."
    )
    log_format: Literal["text", "json"] = Field(default="text", description="Form of a log line.")
    enable_log_requests: bool = Field(
        default=False, description="Log the settings of each request, never its text."
    )
    disable_access_log_for_endpoints: tuple[str, ...] = Field(
        default=(), description="Path that the access log leaves out."
    )
    disable_log_stats: bool = Field(
        default=False, description="Leave out the regular line of statistics."
    )
    log_stats_interval: float = Field(
        default=10, gt=0, description="Seconds between two lines of statistics."
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("--ssl-keyfile and --ssl-certfile belong together; give both or none")
        if self.ssl_ca_certs is not None and self.ssl_certfile is None:
            raise ValueError("--ssl-ca-certs needs --ssl-keyfile and --ssl-certfile")
        if any(key.strip() == "" for key in self.api_key):
            raise ValueError("--api-key must not be empty")
        self._check_keys()
        return self

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_url(cls, url: str | None) -> str | None:
        if url is not None and not url.startswith(("http://", "https://")):
            raise ValueError("must be a URL such as http://localhost:4318")
        return url

    def _check_keys(self) -> None:
        if self.admin_key is not None and self.admin_key.strip() == "":
            raise ValueError("--admin-key must not be empty")
        if self.enable_admin and self.admin_key is None:
            raise ValueError("--enable-admin needs --admin-key")
        has_limit = self.key_max_concurrency is not None or self.key_rpm is not None
        if has_limit and not self.api_key and self.api_key_file is None:
            raise ValueError(
                "--key-max-concurrency and --key-rpm need --api-key or --api-key-file: "
                "without keys there is nothing to tell clients apart by"
            )
