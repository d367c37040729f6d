"""A program that behaves like a process of the cluster, as far as its parent can see.

`standin.py ROLE [HABIT...] --flags...`, run as a script: writes a ready line, waits for SIGTERM or
the end of its lifeline, and exits. Habits change that:
  fail         say why on stderr and exit 3 before being ready
  silent       never write a ready line
  garbage      write something else as ready line
  deaf         ignore SIGTERM
  engine       start a child of its own that ignores everything but SIGKILL
  restless     exit 5 once ready
  convert      behave like `python -m tasuki.convert`: print $STANDIN_MODEL as the last line
Every process started is written to the file $STANDIN_PIDS, one id a line.
"""

import json
import os
import signal
import sys
import threading


def record(pid: int) -> None:
    if "STANDIN_PIDS" in os.environ:
        with open(os.environ["STANDIN_PIDS"], "a") as file:
            file.write(f"{pid}\n")


def value(name: str, default: str = "") -> str:
    prefix = f"--{name}="
    return next((arg[len(prefix) :] for arg in sys.argv if arg.startswith(prefix)), default)


def start_engine(lifeline: int) -> int:
    pid = os.fork()
    if pid == 0:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        os.read(lifeline, 1)  # like a real engine: it goes when the parent's parent goes
        os._exit(0)
    record(pid)
    return pid


def main() -> int:
    role, habits = sys.argv[1], [arg for arg in sys.argv[2:] if not arg.startswith("--")]
    ready, lifeline = int(value("ready-fd", "-1")), int(value("lifeline-fd", "-1"))
    record(os.getpid())
    print(f"{role} with {' '.join(sys.argv[2:])}", file=sys.stderr, flush=True)
    if "convert" in habits:
        print(os.environ["STANDIN_MODEL"])
        return 0
    if "fail" in habits:
        print("the model does not fit", file=sys.stderr, flush=True)
        return 3
    ended = threading.Event()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in habits else lambda *_: ended.set())
    engine = start_engine(lifeline) if "engine" in habits else 0
    port = int(value("port", "0")) or os.getpid() % 60_000 + 1  # its own, and kept by a successor
    line = {
        "role": role, "worker_id": value("worker-id"), "address": f"127.0.0.1:{port}",
        "metrics": "127.0.0.1:1", "pid": os.getpid(), "engine_pid": engine,
    }  # fmt: skip
    text = "not json" if "garbage" in habits else json.dumps(line)
    if "silent" not in habits:
        os.write(ready, text.encode() + b"\n")
    if "restless" in habits:
        return 5

    def watch() -> None:
        os.read(lifeline, 1)
        ended.set()

    threading.Thread(target=watch, daemon=True).start()
    ended.wait()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
