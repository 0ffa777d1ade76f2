"""The flags of the HTTP server: `config.group(ServerConfig)`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError
from modulm_server.engine.histograms import bucket_bounds

__all__ = ["OtherProtocol", "ServerConfig", "WatchdogConfig"]

_PREFIX = re.compile("[A-Za-z_][A-Za-z0-9_]*")


class OtherProtocol(FlagGroup):
    """Base of the flags of a protocol that is served beside HTTP, or in its place."""

    @property
    def takes_port(self) -> bool:
        """Whether it listens on --port, so that HTTP has a Unix socket only."""
        return False


@flag_group
class ServerConfig(FlagGroup):
    """The HTTP server in front of the engine."""

    title = "Frontend"
    server = True

    host: str | None = flag(None, "Address to listen on. Default: loopback only.", common=True)
    port: int = flag(8000, "Port to listen on; 0: any free port.", least=0, most=65535, common=True)
    uds: str | None = flag(None, "Unix socket to listen on instead.", unit="path")
    uvicorn_log_level: str = flag(
        "info", "Log level of the HTTP server.",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )  # fmt: skip
    disable_uvicorn_access_log: bool = flag(False, "Disable the access log.")
    disable_access_log_for_endpoints: tuple[str, ...] | None = flag(
        ("/health", "/metrics", "/page/*", "/ping", "/ready"),
        "Paths to leave out of the access log; PATH/*: all below it.",
    )
    allow_credentials: bool = flag(False, "CORS: allow credentials.")
    allowed_origins: tuple[str, ...] = flag((), "CORS: allowed origins; none by default.")
    allowed_methods: tuple[str, ...] = flag(("*",), "CORS: allowed methods.")
    allowed_headers: tuple[str, ...] = flag(("*",), "CORS: allowed headers.")
    api_key: tuple[str, ...] | None = flag(
        None, "API keys; clients must send one of them.", secret=True, common=True
    )
    api_key_file: str | None = flag(None, "File with one key per line.", unit="path")
    api_keys_file: str | None = flag(
        None, "YAML file of keys with names, models, weights and limits; read again when it "
        "changes.", unit="path",
    )  # fmt: skip
    open_paths: tuple[str, ...] = flag(
        ("/metrics", "/version", "/load", "/ping", "/openapi.json"),
        "Paths that need no key, in addition to /, /health and /ready; none: no others.",
    )
    allow_unauthenticated: bool = flag(
        False, "Allow serving without a key on an address that is reachable from other machines."
    )
    share_prefix_cache_between_keys: bool = flag(False, "Share the prefix cache between API keys.")
    allowed_hosts: tuple[str, ...] | None = flag(
        None,
        "Allowed Host headers, '*.name' for subdomains, '*' for any. Default: any with an API "
        "key; localhost and IP addresses without.",
    )
    ssl_keyfile: str | None = flag(None, "TLS key.", unit="path")
    ssl_certfile: str | None = flag(None, "TLS certificate.", unit="path")
    ssl_ca_certs: str | None = flag(None, "CA certificates for client certificates.", unit="path")
    ssl_ciphers: str | None = flag(None, "TLS ciphers, in OpenSSL's format.")
    ssl_cert_reqs: int = flag(
        0, "Client certificates: 0 none, 1 optional, 2 required.", least=0, most=2
    )
    enable_ssl_refresh: bool = flag(False, "Reload TLS files when they change.")
    root_path: str | None = flag(None, "Path prefix that a proxy strips.")
    middleware: tuple[str, ...] = flag((), "ASGI middleware as pkg.mod.name; repeatable.")
    enable_request_id_headers: bool = flag(False, "Return the X-Request-Id header.")
    disable_fastapi_docs: bool = flag(False, "Disable /docs, /redoc and /openapi.json.")
    h11_max_incomplete_event_size: int | None = flag(
        None, "Maximum size of incomplete headers.", unit="bytes", least=1
    )
    h11_max_header_count: int | None = flag(None, "Maximum number of headers.", least=1)
    max_request_bytes: int = flag(
        64 << 20, "Maximum size of a request body.", unit="bytes", least=1
    )
    max_inflight_bytes: int = flag(
        256 << 20, "Maximum total size of the bodies of all requests in progress.",
        unit="bytes", least=1,
    )  # fmt: skip
    max_request_sequences: int = flag(
        2048, "Maximum sequences of a request: prompts times choices or beams.", least=1
    )
    max_request_logprobs: int = flag(
        4 << 20, "Maximum log probabilities that a request may return.", least=1
    )
    text_threads: int = flag(
        0, "Threads for rendering and tokenizing; 0: half the processors, at most four.", least=0
    )
    request_timeout: float = flag(
        30.0,
        "Timeout for clients that read nothing or send less than 1 KiB/s.",
        unit="s",
        least=0,
    )
    max_connections: int | None = flag(
        None,
        "Maximum connections of a server process. Default: 16384, or as many as the limit of "
        "open files allows.",
        least=1,
    )
    shutdown_timeout: float = flag(
        30.0, "Time for running requests to finish after SIGTERM or SIGHUP.", unit="s", least=0
    )
    engine_heartbeat_timeout: float = flag(
        10.0,
        "Time without a heartbeat after which the engine counts as stalled; 0: no limit.",
        unit="s",
        least=0,
    )
    restart: bool = flag(
        False,
        "Restart an engine that dies, with growing delays. The server ends after six deaths in a "
        "row, each within a minute of the start.",
    )
    api_server_count: int | None = flag(
        None,
        "Number of server processes in front of the engine. Default: 1.",
        least=1,
        aliases=("-asc",),
    )
    chat_template: str | None = flag(
        None,
        "Chat template: a file, an installed template's name, or the template itself.",
        common=True,
    )
    chat_template_content_format: str = flag(
        "auto", "Form of message contents for the template: text or a list of parts.",
        choices=("auto", "string", "openai"),
    )  # fmt: skip
    trust_request_chat_template: bool = flag(False, "Allow chat templates in requests.")
    default_chat_template_kwargs: Mapping[str, Any] | None = flag(
        None, "Default chat template variables."
    )
    system_prompt: str | None = flag(None, "System message of conversations that begin with none.")
    default_stop: tuple[str, ...] = flag((), "Stop strings of requests that have none.")
    response_role: str = flag("assistant", "Role of response messages.")
    return_tokens_as_token_ids: bool = flag(False, "Show tokens in logprobs as token_id:N.")
    exclude_tools_when_tool_choice_none: bool = flag(
        False, "Leave tools out of the prompt when tool_choice is none."
    )
    tool_strict_level: str = flag(
        "auto",
        "What calls of tools that are not strict follow: function: the format of calls and the "
        "names of tools; parameter: the schemas of arguments, too.",
        choices=("auto", "function", "parameter"),
    )
    max_log_len: int | None = flag(
        None, "Maximum characters of a prompt or output in a log line.", least=0
    )
    enable_prompt_tokens_details: bool = flag(False, "Report cached prompt tokens in usage.")
    per_request_spec_decode_metrics: str = flag(
        "none", "Report speculative decoding metrics in each response, in total or per step.",
        choices=("none", "summary", "detailed"),
    )  # fmt: skip
    custom_histogram_buckets: Mapping[str, Any] | None = flag(
        None, "Buckets of the metrics' histograms by group, such as request_latency, in seconds or "
        "tokens.",
    )  # fmt: skip
    metrics_prefix: tuple[str, ...] = flag(
        ("modulm",), "Prefixes of the engine's metrics; each metric is shown under all of them."
    )
    enable_per_request_metrics: bool = flag(
        False, "Add timings to the metrics of responses to requests with include_metrics."
    )
    reasoning_effort_map: Mapping[str, Any] | None = flag(
        None, "Reasoning effort of requests -> the one to use instead, such as minimal: low."
    )
    enable_force_include_usage: bool = flag(False, "Always include usage in streams.")
    sse_keep_alive_interval: float = flag(
        0, "Idle time after which a stream sends a keep-alive comment; 0: never.", unit="s", least=0
    )
    io_processor_plugin: str | None = flag(
        None, "IO processor: reads the data of requests to /pooling and makes their answers.",
        kind="io_processors",
    )  # fmt: skip
    sleeping_requests: str = flag(
        "refuse",
        "Requests that arrive while the engine sleeps at level 1 or 2: refuse with 503, or wait "
        "until it wakes.",
        choices=("refuse", "wait"),
    )
    server_dev_mode: bool = flag(
        False, "Serve development routes: /reset_prefix_cache, /sleep, /collective_rpc ..."
    )
    tokens_only: bool = flag(
        False,
        "Serve only /inference/v1/generate, /v1/models and routes for operators; "
        "--skip-tokenizer-init leaves the tokenizer out, too.",
    )
    enable_tokenizer_info_endpoint: bool = flag(False, "Serve /tokenizer_info.")
    enable_log_outputs: bool = flag(False, "Log outputs.")
    enable_log_deltas: bool = flag(True, "Log streamed deltas too; needs --enable-log-outputs.")
    log_error_stack: bool = flag(False, "Log tracebacks of error responses.")
    fingerprint_mode: str = flag(
        "full", "Content of system_fingerprint.", choices=("full", "hash", "custom", "none")
    )
    fingerprint_value: str | None = flag(None, "Fingerprint for --fingerprint-mode custom.")
    tool_server: str | None = flag(
        None, "YAML file of tool servers (MCP) that requests may use.", unit="path"
    )
    tool_timeout: float = flag(60.0, "Time for a call of a tool server.", unit="s", least=0.1)
    tool_result_bytes: int = flag(
        65536, "Maximum size of a tool server's result; more is cut off.", unit="bytes", least=1
    )
    tool_calls: int = flag(
        20, "Maximum calls of tool servers in an answer. Responses may set a lower max_tool_calls.",
        least=1,
    )  # fmt: skip

    def __attrs_post_init__(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_certfile", "must be set together with ssl_keyfile")
        for name, effort in (self.reasoning_effort_map or {}).items():
            if not isinstance(effort, str):
                raise ConfigError("reasoning_effort_map", f"{name}: must be a string")
        bucket_bounds(self.custom_histogram_buckets)
        wrong = [p for p in self.metrics_prefix if not _PREFIX.fullmatch(p)]
        if wrong or not self.metrics_prefix:
            raise ConfigError("metrics_prefix", "letters, digits and _ only, such as vllm")

    def effort(self, requested: str | None) -> str | None:
        """The reasoning effort to use for a requested one (`--reasoning-effort-map`)."""
        if requested is None or self.reasoning_effort_map is None:
            return requested
        return str(self.reasoning_effort_map.get(requested, requested))


@flag_group
class WatchdogConfig(FlagGroup):
    """What the server does when the engine stalls."""

    title = "WatchdogConfig"
    table = "watchdog_config"
    server = True

    action: str = flag(
        "exit",
        "report: /health reports the stall; abort: also fail waiting requests; exit: also end the "
        "server after --watchdog-config.timeout, for a supervisor to restart it.",
        choices=("report", "abort", "exit"), key="action", nested=True,
    )  # fmt: skip
    timeout: float = flag(
        300.0,
        "Duration of a stall after which the server ends.",
        unit="s",
        least=0,
        key="timeout",
        nested=True,
    )
    check_interval: float | None = flag(
        None, "Time between checks. Default: a fifth of --engine-heartbeat-timeout, at most 1 s.",
        unit="s", least=0.01, key="check_interval", nested=True,
    )  # fmt: skip
    dump_stacks: bool = flag(
        True, "Log the stacks of the engine's threads.", key="dump_stacks", nested=True
    )
    dump_dir: str | None = flag(
        None,
        "Folder to write the stacks to, instead of the log.",
        unit="path",
        key="dump_dir",
        nested=True,
    )
