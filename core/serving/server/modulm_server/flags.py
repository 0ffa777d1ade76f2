"""The flags of the HTTP server: `config.group(ServerConfig)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from modulm.contracts.flags import FlagGroup, flag, flag_group
from modulm.errors import ConfigError

__all__ = ["ServerConfig", "WatchdogConfig"]


@flag_group
class ServerConfig(FlagGroup):
    """The HTTP server in front of the engine."""

    title = "Frontend"
    server = True

    host: str | None = flag(None, "Address to listen on; None: loopback only.", common=True)
    port: int = flag(8000, "Port to listen on; 0: any free one.", least=0, most=65535, common=True)
    uds: str | None = flag(None, "Unix socket to listen on instead.", unit="path")
    uvicorn_log_level: str = flag(
        "info", "Log level of the HTTP server.",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )  # fmt: skip
    disable_uvicorn_access_log: bool = flag(False, "Log no line per HTTP request.")
    disable_access_log_for_endpoints: tuple[str, ...] | None = flag(
        ("/health", "/metrics", "/page/*", "/ping", "/ready"),
        "Paths that get no line in the access log; PATH/*: all below it.",
    )
    allow_credentials: bool = flag(False, "CORS: allow credentials.")
    allowed_origins: tuple[str, ...] = flag((), "CORS: origins that may call; none by default.")
    allowed_methods: tuple[str, ...] = flag(("*",), "CORS: methods that may be used.")
    allowed_headers: tuple[str, ...] = flag(("*",), "CORS: headers that may be sent.")
    api_key: tuple[str, ...] | None = flag(
        None, "Keys of which clients must send one.", secret=True, common=True
    )
    api_key_file: str | None = flag(None, "File with one key per line.", unit="path")
    open_paths: tuple[str, ...] = flag(
        ("/metrics", "/version", "/load", "/ping", "/openapi.json"),
        "Paths that answer without a key, beside /, /health and /ready; none: no others.",
    )
    allow_unauthenticated: bool = flag(
        False, "Serve without a key on an address that others can reach."
    )
    share_prefix_cache_between_keys: bool = flag(
        False, "Let requests of one key find the prefixes of another's, where there are several."
    )
    allowed_hosts: tuple[str, ...] | None = flag(
        None,
        "Names in a request's Host that are served, '*.name' for all below, '*' for any; None: on "
        "the loopback interface without a key localhost and addresses, else any.",
    )
    ssl_keyfile: str | None = flag(None, "TLS key.", unit="path")
    ssl_certfile: str | None = flag(None, "TLS certificate.", unit="path")
    ssl_ca_certs: str | None = flag(None, "Certificates of those who sign clients.", unit="path")
    ssl_ciphers: str | None = flag(None, "TLS ciphers, as OpenSSL writes them.")
    ssl_cert_reqs: int = flag(
        0, "Client certificates: 0 none, 1 optional, 2 required.", least=0, most=2
    )
    enable_ssl_refresh: bool = flag(False, "Read TLS files again when they change.")
    root_path: str | None = flag(None, "Path that a proxy puts in front.")
    middleware: tuple[str, ...] = flag((), "ASGI middleware: pkg.mod.name, one flag each.")
    enable_request_id_headers: bool = flag(False, "Answer with X-Request-Id.")
    disable_fastapi_docs: bool = flag(False, "No /docs, /redoc and /openapi.json.")
    h11_max_incomplete_event_size: int | None = flag(
        None, "Most bytes of unfinished headers.", unit="bytes", least=1
    )
    h11_max_header_count: int | None = flag(None, "Most headers of a request.", least=1)
    max_request_bytes: int = flag(
        64 << 20, "Most bytes in the body of a request.", unit="bytes", least=1
    )
    max_inflight_bytes: int = flag(
        256 << 20, "Most bytes in the bodies of all requests that are being answered.",
        unit="bytes", least=1,
    )  # fmt: skip
    max_request_sequences: int = flag(
        2048, "Most sequences of a request: prompts times choices or beams.", least=1
    )
    max_request_logprobs: int = flag(
        4 << 20, "Most log probabilities that a request may have kept.", least=1
    )
    text_threads: int = flag(
        0, "Threads that render and tokenize; 0: half the processors, four at most.", least=0
    )
    request_timeout: float = flag(
        30.0,
        "Wait for a client that reads nothing, or sends less than 1 KiB/s.",
        unit="s",
        least=0,
    )
    max_connections: int | None = flag(
        None,
        "Most open connections of a server process; None: as many as files may be open, 16384.",
        least=1,
    )
    shutdown_timeout: float = flag(
        30.0, "Time for running requests after SIGTERM.", unit="s", least=0
    )
    engine_heartbeat_timeout: float = flag(
        10.0, "Time in which the engine must show that it works; 0: any.", unit="s", least=0
    )
    api_server_count: int | None = flag(
        None, "Server processes in front of the engine; None: one.", least=1, aliases=("-asc",)
    )
    chat_template: str | None = flag(
        None,
        "Chat template: a file, the name of an installed one, or the template itself.",
        common=True,
    )
    chat_template_content_format: str = flag(
        "auto", "Message content as text, or as a list of parts.",
        choices=("auto", "string", "openai"),
    )  # fmt: skip
    trust_request_chat_template: bool = flag(False, "Let requests bring a chat template.")
    default_chat_template_kwargs: Mapping[str, Any] | None = flag(
        None, "Values for the chat template that a request does not set."
    )
    response_role: str = flag("assistant", "Role of answers.")
    return_tokens_as_token_ids: bool = flag(False, "Write tokens in logprobs as token_id:N.")
    exclude_tools_when_tool_choice_none: bool = flag(
        False, "Leave tools out of the prompt when tool_choice is none."
    )
    max_log_len: int | None = flag(
        None, "Most characters of a prompt or answer in a log line.", least=0
    )
    enable_prompt_tokens_details: bool = flag(False, "Report cached prompt tokens in usage.")
    per_request_spec_decode_metrics: str = flag(
        "none", "Tell in each answer what became of its drafts, as a sum or also by step.",
        choices=("none", "summary", "detailed"),
    )  # fmt: skip
    enable_force_include_usage: bool = flag(False, "Stream usage whether asked or not.")
    sse_keep_alive_interval: float = flag(
        0, "Silence after which a stream sends a comment; 0: never.", unit="s", least=0
    )
    server_dev_mode: bool = flag(
        False, "Serve routes for developers: /reset_prefix_cache, /sleep, /start_profile ..."
    )
    enable_tokenizer_info_endpoint: bool = flag(False, "Serve /tokenizer_info.")
    enable_log_outputs: bool = flag(False, "Log answers.")
    enable_log_deltas: bool = flag(
        True, "Log the pieces of streamed answers; needs --enable-log-outputs."
    )
    log_error_stack: bool = flag(False, "Log a traceback for an error answer.")
    fingerprint_mode: str = flag(
        "full", "What system_fingerprint tells.", choices=("full", "hash", "custom", "none")
    )
    fingerprint_value: str | None = flag(None, "Text for --fingerprint-mode custom.")

    def __attrs_post_init__(self) -> None:
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ConfigError("ssl_certfile", "goes together with ssl_keyfile: give both or none")


@flag_group
class WatchdogConfig(FlagGroup):
    """What happens when the engine does not show that it works."""

    title = "WatchdogConfig"
    table = "watchdog_config"
    server = True

    action: str = flag(
        "exit",
        "report: /health says so; abort: requests that wait get an error as well; exit: and the "
        "server ends if that lasts, for whoever starts it again.",
        choices=("report", "abort", "exit"), key="action", own=False,
    )  # fmt: skip
    timeout: float = flag(
        300.0, "Time from then until the server ends.", unit="s", least=0, key="timeout", own=False
    )
    check_interval: float | None = flag(
        None, "Time between two looks; None: a fifth of --engine-heartbeat-timeout, 1 s at most.",
        unit="s", least=0.01, key="check_interval", own=False,
    )  # fmt: skip
    dump_stacks: bool = flag(
        True, "Write what every thread of the engine does to the log.", key="dump_stacks", own=False
    )
    dump_dir: str | None = flag(
        None, "Folder for that instead of the log.", unit="path", key="dump_dir", own=False
    )
