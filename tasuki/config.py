"""One loader for the settings of every process: flags over environment over file over defaults.

A setting is a field of a frozen dataclass; its flag is `--name-with-dashes`, its environment
variable `TASUKI_NAME_WITH_UNDERSCORES`, its help text stands beside it. Knows nothing about what
settings mean.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tasuki.config_file import ConfigFile, FileValue
from tasuki.errors import ConfigError

T = TypeVar("T")
CONFIG_VARIABLE = "TASUKI_CONFIG"
MAX_NUMBER = 1e18  # more than any setting means


def setting(
    default: Any, help: str, *, choices: Sequence[str] = (), metavar: str | None = None
) -> Any:
    """A dataclass field with its help text. Every setting has a default."""
    metadata = {"help": help, "choices": tuple(choices), "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    return "TASUKI_" + name.upper()


def add_flags(parser: argparse.ArgumentParser, cls: type[Any]) -> None:
    """Add one flag per setting of `cls`; a flag that is not given stays None."""
    for field in dataclasses.fields(cls):
        default = "" if field.default in (None, "") else f" Default: {field.default}."
        text = f"{field.metadata['help']}{default} [{variable_name(field.name)}]"
        kind = _plain_type(cls, field.name)
        options: dict[str, Any] = {"dest": field.name, "default": None}
        options["help"] = text.replace("%", "%%")
        if kind is bool:
            parser.add_argument(
                flag_name(field.name), action=argparse.BooleanOptionalAction, **options
            )
        else:
            metavar = field.metadata["metavar"] or field.name.upper()
            parser.add_argument(flag_name(field.name), metavar=metavar, **options)


def build(
    cls: type[T],
    given: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    file: Mapping[str, FileValue] | None = None,
) -> T:
    """Make a `cls` from what was given as flags (None: not given), then environment, then file,
    then defaults.

    Raises ConfigError naming the flag, variable or key, what it held and what was expected.
    """
    env = os.environ if env is None else env
    file = file or {}
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]  # every caller's is one
        flag, variable = flag_name(field.name), variable_name(field.name)
        if given.get(field.name) is not None:
            source, raw = flag, given[field.name]
        elif variable in env:
            source, raw = variable, env[variable]
        elif field.name in file:
            source, raw = file[field.name].source, file[field.name].value
            _require_kind(source, raw, _plain_type(cls, field.name))
        else:
            continue
        value = _convert(source, raw, _plain_type(cls, field.name))
        choices = field.metadata.get("choices", ())
        if choices and value not in choices:
            raise ConfigError(f"{source} is {value!r}; expected one of {', '.join(choices)}")
        values[field.name] = value
    made = cls(**values)
    object.__setattr__(made, "_given", frozenset(values))
    return made


def given_names(config: Any) -> frozenset[str]:
    """The settings that `build` found somewhere, at their default or not."""
    names: frozenset[str] = getattr(config, "_given", frozenset())
    return names


def add_config_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file with settings of all processes; flags and environment win. "
        f"[{CONFIG_VARIABLE}]",
    )


def open_config_file(given: str | None, env: Mapping[str, str] | None = None) -> ConfigFile | None:
    """The file that `--config` or the environment names, read and checked; None: none is named."""
    env = os.environ if env is None else env
    path = given or env.get(CONFIG_VARIABLE)
    return ConfigFile(Path(path)) if path else None


def without_settings(env: Mapping[str, str], *classes: type[Any]) -> dict[str, str]:
    """An environment for a child that gets its own settings as flags."""
    names = {variable_name(field.name) for cls in classes for field in dataclasses.fields(cls)}
    return {key: value for key, value in env.items() if key not in names | {CONFIG_VARIABLE}}


def load(
    cls: type[T],
    prog: str,
    description: str,
    argv: Sequence[str] | None = None,
    sections: Sequence[str] = (),
) -> T:
    """Parse a whole command line for one process, whose settings stand in `sections` of a file."""
    parser = argparse.ArgumentParser(
        prog=prog, description=description, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_config_flag(parser)
    add_flags(parser, cls)
    try:
        given = vars(parser.parse_args(argv))
        file = open_config_file(given.pop("config"))
        return build(cls, given, file=file.values(cls, *sections) if file else None)
    except ConfigError as error:
        parser.error(error.message)


def to_args(config: Any) -> list[str]:
    """The flags that make `build` return an equal config: how a parent starts a child."""
    args: list[str] = []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if value == field.default:
            continue
        if isinstance(value, bool):
            flag = flag_name(field.name)
            args.append(flag if value else "--no-" + flag[2:])
        elif value is not None:
            args += [f"{flag_name(field.name)}={value}"]
    return args


def effective(config: Any) -> dict[str, str]:
    """The effective settings as text, for the log and GetServerInfo. Secrets are left out."""
    return {
        field.name: str(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if "secret" not in field.name
    }


_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_UNITS |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_size(name: str, text: str) -> int:
    """Bytes of a size such as 512MiB, 1.5GiB, 2GB or 4096; 0 for an empty one.

    Raises ConfigError naming the setting.
    """
    match = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*([a-zA-Z]*)\s*", text)
    if not text.strip():
        return 0
    if match is None or match[2].lower() not in _UNITS:
        raise ConfigError(f"{name} is {text[:60]!r}; expected a size such as 512MiB or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def require_range(config: Any, least: float, *names: str, most: float = math.inf) -> None:
    """Raise ConfigError naming the first of these settings that is no number from least to most."""
    for name in names:
        value = getattr(config, name)
        # a comparison takes a whole number of any size, and a NaN is in no range
        if isinstance(value, bool) or not least <= value <= min(most, MAX_NUMBER):
            upper = "" if most == math.inf else f" and at most {most:g}"
            raise ConfigError(
                f"{flag_name(name)} is {str(value)[:60]}; "
                f"expected a number of at least {least:g}{upper}"
            )


def _plain_type(cls: type[Any], name: str) -> type[Any]:
    hint = typing.get_type_hints(cls)[name]
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return typing.cast("type[Any]", hint)


_WORDS = {"1": True, "true": True, "yes": True, "on": True}
_WORDS |= {"0": False, "false": False, "no": False, "off": False, "": False}


# What YAML may hold for a setting: it knows kinds itself, so nothing is read out of text there.
_KINDS: dict[type[Any], tuple[type[Any], ...]] = {float: (float, int), str: (str, int)}
_EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _require_kind(source: str, raw: Any, kind: type[Any]) -> None:
    if type(raw) not in _KINDS.get(kind, (kind,)):
        raise ConfigError(f"{source} is {raw!r}; expected {_EXPECTED.get(kind, kind.__name__)}")


def _convert(source: str, raw: Any, kind: type[Any]) -> Any:
    if isinstance(raw, kind) and not (kind is int and isinstance(raw, bool)):
        return raw
    text = str(raw).strip()
    if kind is bool:
        if text.lower() not in _WORDS:
            raise ConfigError(f"{source} is {text!r}; expected true or false")
        return _WORDS[text.lower()]
    try:
        return kind(text)
    except ValueError:
        expected = _EXPECTED.get(kind, kind.__name__)
        raise ConfigError(f"{source} is {text!r}; expected {expected}") from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Settings of a prefill or decode worker: its server process and its engine process."""

    model: str = setting(
        "", "Model directory, .gguf file, or owner/name on a hub.", metavar="MODEL"
    )
    dtype: str = setting(
        "float32", "Element type of weights and KV.", choices=("float32", "bfloat16")
    )
    device: str = setting(
        "cpu", "What computes and holds the KV: cpu, cuda or cuda:N.", metavar="DEVICE"
    )
    native: bool = setting(
        True, "On a CPU, compute with compiled kernels, where there is a C++ compiler."
    )
    host: str = setting("127.0.0.1", "Address to listen on.")
    port: int = setting(0, "gRPC port; 0 takes a free one.")
    metrics_port: int = setting(0, "Port of /metrics, /healthz and /readyz; 0 takes a free one.")
    worker_id: str = setting("", "Stable name of the worker, no other's. Empty: host:port.")
    threads: int = setting(1, "Compute threads of the engine.")
    cpus: str = setting("", "Cores the worker is pinned to, such as 0 or 0,2-3.", metavar="LIST")
    block_size: int = setting(16, "Positions per KV block.")
    kv_cache_memory: str = setting(
        "",
        "Memory of the KV cache, such as 512MiB or 2GiB. Empty: see --kv-blocks.",
        metavar="SIZE",
    )
    kv_blocks: int = setting(
        0,
        "KV blocks, instead of --kv-cache-memory; 0 takes room for eight of the longest requests, "
        "at most 384 MiB but for one such request at least.",
    )
    max_model_len: int = setting(0, "Most tokens of prompt and output; 0 takes the model's.")
    max_num_seqs: int = setting(64, "Most requests in one step.")
    max_num_batched_tokens: int = setting(
        0, "Most tokens in one step; 0: as many as keep every step under 200 ms, by measuring."
    )
    long_prefill_token_threshold: int = setting(
        0, "Most tokens of one prompt in one step; 0: as many as the step takes."
    )
    step_order: str = setting(
        "decode_first",
        "What the tokens of a step go to first: running requests, or prompts.",
        choices=("decode_first", "prefill_first"),
    )
    admission: str = setting(
        "optimistic",
        "optimistic: a request gets blocks as it grows, and may be preempted. reserve_max: blocks "
        "for prompt and max_tokens are held from the start, and nothing is preempted.",
        choices=("optimistic", "reserve_max"),
    )
    batching: str = setting(
        "continuous",
        "When a request may join the batch: in any step, when the whole batch has ended (static), "
        "or then, after waiting --batch-window for company (dynamic).",
        choices=("continuous", "static", "dynamic"),
    )
    batch_window: float = setting(0.05, "Seconds a dynamic batch waits for company.")
    queue_order: str = setting("fcfs", "Who is admitted first.", choices=("fcfs", "priority"))
    priority_ageing: float = setting(
        10.0, "Seconds of waiting that weigh as much as one level of priority."
    )
    max_bypasses: int = setting(
        0, "Requests that may be admitted past one that does not fit; 0: the head of line blocks."
    )
    prefix_caching: bool = setting(True, "Keep the KV of prompts for others that begin alike.")
    short_rest_tokens: int = setting(
        64, "A decode worker computes a prompt itself when at most this much of it is not cached."
    )
    max_waiting: int = setting(256, "Most requests that wait in this worker.")
    connector: str = setting(
        "auto",
        "How KV moves between workers. auto: nccl between GPUs, else gloo.",
        choices=("auto", "gloo", "nccl"),
    )
    link_host: str = setting(
        "",
        "Address of this host on which gloo listens for the KV of links; other workers must reach "
        "it. Empty: that of --host.",
    )
    nccl_links: int = setting(
        4, "Most NCCL links of a worker; what they take of the GPU is kept free for them."
    )
    digests: bool = setting(True, "Check an xxh3 digest of every KV segment, but not over NCCL.")
    segment_bytes: int = setting(4 << 20, "Largest KV message.", metavar="BYTES")
    window_bytes: int = setting(16 << 20, "KV announced and not received, per link.")
    link_timeout: float = setting(10.0, "Seconds to open a link.")
    peer_timeout: float = setting(
        3.0, "Seconds without a heartbeat before the peer of a link counts as gone."
    )
    step_timeout: float = setting(
        60.0, "Seconds one step may take before the engine counts as stuck, and is started anew."
    )
    engine_restarts: int = setting(
        5, "Deaths of the engine within a minute that are mended by a new one; 0: none."
    )
    handoff_timeout: float = setting(5.0, "Seconds without progress before a handoff is given up.")
    reserve_timeout: float = setting(2.0, "Seconds a request may wait for KV blocks.")
    fault_injection: bool = setting(
        False, "Let InjectFault slow, damage and cut links. For chaos tests only."
    )
    drain_timeout: float = setting(30.0, "Seconds that running requests get after SIGTERM.")
    lifeline_fd: int = setting(-1, "Exit when this inherited pipe closes; -1: none.")
    ready_fd: int = setting(-1, "Write one line of JSON to this descriptor when ready; -1: stdout.")
    engine_fd: int = setting(-1, "Engine process only: the socket to its server process.")

    def __post_init__(self) -> None:
        require_range(self, 1, "threads", "block_size", "max_num_seqs")
        require_range(self, 0, "max_num_batched_tokens")
        require_range(self, 1, "max_waiting", "segment_bytes", "window_bytes")
        require_range(self, 0, "kv_blocks", "max_model_len", "long_prefill_token_threshold")
        require_range(self, 0, "batch_window", "max_bypasses", "short_rest_tokens")
        require_range(self, 0.001, "priority_ageing")
        require_range(self, 0, "port", "metrics_port", most=65535)
        if parse_size("--kv-cache-memory", self.kv_cache_memory) and self.kv_blocks:
            raise ConfigError("--kv-blocks and --kv-cache-memory say the same; give one of them")
        require_range(self, 0.001, "link_timeout", "handoff_timeout", "reserve_timeout")
        require_range(self, 0.1, "peer_timeout", "step_timeout")
        require_range(self, 0, "drain_timeout", "engine_restarts")
        require_range(self, 1, "nccl_links")
        if self.connector == "nccl" and self.device == "cpu":
            raise ConfigError(
                "--connector nccl moves KV between GPUs, and --device is cpu; start with --device "
                "cuda or with --connector gloo"
            )
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", self.device):
            raise ConfigError(
                f"--device is {self.device[:60]!r}; expected cpu, cuda or cuda:N, such as cuda:1"
            )
