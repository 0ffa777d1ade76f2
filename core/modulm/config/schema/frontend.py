"""The HTTP server in front of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from attrs import frozen

from modulm.config.schema.flags import equip, flag, later, no_effect

__all__ = ["ServerConfig"]

_DP = later("several replicas of a model")
_COHERE = later("Cohere's API")


@frozen(kw_only=True, field_transformer=equip)
class ServerConfig:
    """The HTTP server in front of the engine."""

    TITLE: ClassVar[str] = "Frontend"
    TABLE: ClassVar[str | None] = None

    host: str | None = flag(None, "Address to listen on; None: loopback only.")
    port: int = flag(8000, "Port to listen on; 0: any free one.", least=0, most=65535)
    uds: str | None = flag(None, "Unix socket to listen on instead.", unit="path")
    uvicorn_log_level: str = flag(
        "info", "Log level of the HTTP server.",
        choices=("critical", "error", "warning", "info", "debug", "trace"),
    )  # fmt: skip
    disable_uvicorn_access_log: bool = flag(False, "Log no line per HTTP request.")
    disable_access_log_for_endpoints: tuple[str, ...] | None = flag(
        None, "Paths that get no line in the access log."
    )
    allow_credentials: bool = flag(False, "CORS: allow credentials.")
    allowed_origins: tuple[str, ...] = flag((), "CORS: origins that may call; none by default.")
    allowed_methods: tuple[str, ...] = flag(("*",), "CORS: methods that may be used.")
    allowed_headers: tuple[str, ...] = flag(("*",), "CORS: headers that may be sent.")
    api_key: tuple[str, ...] | None = flag(
        None, "Keys of which clients must send one.", secret=True
    )
    api_key_file: str | None = flag(None, "File with one key per line.", unit="path")
    allow_unauthenticated: bool = flag(
        False, "Serve without a key on an address that others can reach."
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
    enable_offline_docs: bool = flag(
        False, "API pages without outside resources.", state=later("API pages without a network")
    )
    h11_max_incomplete_event_size: int | None = flag(
        None, "Most bytes of unfinished headers.", unit="bytes", least=1
    )
    h11_max_header_count: int | None = flag(None, "Most headers of a request.", least=1)
    max_request_bytes: int = flag(
        64 << 20, "Most bytes in the body of a request.", unit="bytes", least=1
    )
    request_timeout: float = flag(
        30.0, "Wait for a client that sends or reads nothing.", unit="s", least=0
    )
    shutdown_timeout: float = flag(
        30.0, "Time for running requests after SIGTERM.", unit="s", least=0
    )
    disable_frontend_multiprocessing: bool = flag(False, "Run engine and server in one process.")
    api_server_count: int | None = flag(
        None, "Server processes in front of the engine; None: one.", least=1, aliases=("-asc",)
    )
    headless: bool = flag(False, "Run the engine without a server.", state=_DP)
    grpc_port: int | None = flag(None, "Port of a gRPC server.", state=later("a gRPC server"))
    data_parallel_supervisor_port: int = flag(9256, "Port of the supervisor.", state=_DP)
    dp_supervisor_probe_interval_s: float = flag(5.0, "Time between probes.", unit="s", state=_DP)
    dp_supervisor_probe_timeout_s: float = flag(5.0, "Wait for a probe.", unit="s", state=_DP)
    dp_supervisor_probe_failure_threshold: int = flag(3, "Probes that may fail.", state=_DP)
    lora_modules: tuple[Any, ...] | None = flag(
        None, "Adapters: name=path or JSON.", state=later("LoRA adapters")
    )
    chat_template: str | None = flag(None, "Chat template: a file, or the template itself.")
    chat_template_content_format: str = flag(
        "auto", "Message content as text, or as a list of parts.",
        choices=("auto", "string", "openai"),
    )  # fmt: skip
    trust_request_chat_template: bool = flag(False, "Let requests bring a chat template.")
    trust_request_mm_kwargs: bool = flag(
        False, "Let requests set processor options.",
        state=later("multimodal models"),
    )  # fmt: skip
    default_chat_template_kwargs: Mapping[str, Any] | None = flag(
        None, "Values for the chat template that a request does not set."
    )
    reasoning_effort_map: Mapping[str, Any] | None = flag(
        None, "Template values for each reasoning effort.", state=later("a map of efforts")
    )
    response_role: str = flag("assistant", "Role of answers.")
    return_tokens_as_token_ids: bool = flag(False, "Write tokens in logprobs as token_id:N.")
    enable_auto_tool_choice: bool = flag(
        False, "Let the model decide to call tools; needs --tool-call-parser."
    )
    exclude_tools_when_tool_choice_none: bool = flag(
        False, "Leave tools out of the prompt when tool_choice is none."
    )
    tool_call_parser: str | None = flag(
        None, "Parser of the model's tool calls.", kind="tool_parsers"
    )
    tool_parser_plugin: str = flag("", "Python file that registers tool parsers.", unit="path")
    tool_strict_level: str | None = flag(
        None, "Which tools are held to their schema.", state=later("strict tools by level")
    )
    tool_server: str | None = flag(
        None, "Servers of built-in tools: host:port,...", state=later("built-in tools")
    )
    max_log_len: int | None = flag(
        None,
        "Most characters of a prompt or answer in a log line.",
        least=0,
    )
    enable_prompt_tokens_details: bool = flag(False, "Report cached prompt tokens in usage.")
    enable_per_request_metrics: bool = flag(
        False, "Report each request's times.", state=later("times in answers")
    )
    enable_server_load_tracking: bool = flag(
        False,
        "Count running requests for /load.",
        state=no_effect("/load counts always"),
    )
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
    tokens_only: bool = flag(
        False, "Serve token ids, without text.", state=later("serving token ids alone")
    )
    enable_scale_out: bool = flag(False, "Let replicas come and go.", state=_DP)
    enable_flash_late_interaction: bool = flag(
        True, "Score late interaction on the device.",
        state=no_effect("scores of pairs are made where their vectors arrive"),
    )  # fmt: skip
    cohere_is_reasoning_model: bool = flag(True, "Cohere's reasoning.", state=_COHERE)
    cohere_format: str = flag("cmd4", "Cohere's prompt format.", state=_COHERE)
    anthropic_disabled_thinking_effort: str = flag(
        "auto", "Effort when thinking is disabled.", state=later("a map of efforts")
    )
    fingerprint_mode: str = flag(
        "full", "What system_fingerprint tells.", choices=("full", "hash", "custom", "none")
    )
    fingerprint_value: str | None = flag(None, "Text for --fingerprint-mode custom.")
    fail_on_environ_validation: bool = flag(False, "Make an unknown MODULM_ variable an error.")
    tokenizer_pool_size: int = flag(
        0, "Tokenizer processes.", deprecated="tokenizers run in threads",
        state=no_effect("tokenizers run in threads"),
    )  # fmt: skip
    tokenizer_pool_type: str = flag(
        "ray", "Kind of tokenizer processes.", deprecated="tokenizers run in threads",
        state=no_effect("tokenizers run in threads"),
    )  # fmt: skip
    tokenizer_pool_extra_config: Mapping[str, Any] = flag(
        {}, "Options of them.", deprecated="tokenizers run in threads",
        state=no_effect("tokenizers run in threads"),
    )  # fmt: skip
