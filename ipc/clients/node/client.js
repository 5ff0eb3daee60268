// A client of rtcached for Node.js, written from ipc/PROTOCOL.md.
//
// Every call ends: with its answer, with a Refused (the daemon said no), or with a Lost (nothing
// came for `timeoutMs`, or the daemon was restarted). One client carries any number of calls.

import { Dealer } from "zeromq";

const DEFAULT_ENDPOINT = "ipc:///run/rtcached/rtcached.sock";
const REFILLS_PER_WINDOW = 2;
const SOCKET_OPTIONS = {
  linger: 0,
  sendHighWaterMark: 0,
  heartbeatInterval: 5_000,
  heartbeatTimeout: 20_000,
  heartbeatTimeToLive: 20_000,
};

function curveOptions(curve) {
  if (curve === null) return {};
  const { serverKey, publicKey, secretKey } = curve;
  return { curveServerKey: serverKey, curvePublicKey: publicKey, curveSecretKey: secretKey };
}

// The daemon answered with `error`; `code`, `retryable` and `retryAfterMs` are its own.
export class Refused extends Error {
  constructor({ code, message, retryable, retry_after_ms }) {
    super(`${message} (${code})`);
    Object.assign(this, { code, retryable, retryAfterMs: retry_after_ms ?? null });
  }
}

// No answer will come. Nobody knows how far the request got; it can be made again.
export class Lost extends Error {
  retryable = true;
}

// One request and the replies that nobody has taken yet.
class Call {
  isFinished = false;
  #inbox = [];
  #wake = () => {};

  // pingId: of the `ping` that was sent before the request.
  constructor(id, pingId) {
    this.id = id;
    this.pingId = pingId;
    this.incarnation = "";
  }

  // Whether an answer to a `ping` shows that a daemon that was restarted does not know the request.
  isLostBy(pong) {
    const age = Number(pong.id) - this.pingId;
    if (age === 0) this.incarnation = pong.incarnation;
    return age > 0 && this.incarnation !== pong.incarnation;
  }

  put(reply) {
    this.isFinished = reply instanceof Error || reply.type !== "tokens";
    this.#inbox.push(reply);
    this.#wake();
  }

  // The next reply; undefined if none comes in time.
  async take(timeoutMs) {
    if (this.#inbox.length === 0) {
      let timer;
      await new Promise((resolve) => {
        this.#wake = resolve;
        timer = setTimeout(resolve, timeoutMs);
      });
      clearTimeout(timer);
    }
    const reply = this.#inbox.shift();
    if (reply instanceof Error) throw reply;
    if (reply?.type === "error") throw new Refused(reply);
    return reply;
  }
}

export class Client {
  #calls = new Map();
  #lastId = 0;
  #sending = Promise.resolve();
  #socket;

  // timeoutMs: how long a call waits for the next message.
  // window: `tokens` messages of an answer that may be ahead of their reader.
  // probeMs: when a call has waited so long, the daemon is asked whether it is still the same.
  // curve: for TCP, `serverKey`, `publicKey` and `secretKey`, 40 characters each.
  constructor(endpoint = DEFAULT_ENDPOINT, options = {}) {
    const { timeoutMs = 60_000, window = 64, probeMs = 2_000, curve = null } = options;
    Object.assign(this, { endpoint, timeoutMs, window, probeMs });
    this.#socket = new Dealer({ ...SOCKET_OPTIONS, ...curveOptions(curve) });
    this.#socket.connect(endpoint);
    this.#receive();
  }

  close() {
    this.#socket.close();
    this.#failAll(new Lost("the client was closed"));
  }

  // The messages of an answer as they come; `text` of all of them together is the answer, and the
  // last one has `finish_reason`, `usage` and `cache` too. Leaving the loop cancels the request.
  // fields: those of `generate` in PROTOCOL.md. signal: an AbortSignal; when it fires, the request
  // is cancelled, and the last message says so.
  async *generate(fields, { signal } = {}) {
    const call = this.#start("generate", { credit: this.window, ...fields });
    const abort = () => this.#send("cancel", { target: call.id });
    signal?.addEventListener("abort", abort, { once: true });
    if (signal?.aborted) abort();
    try {
      let [index, untold, reply] = [0, 0, null];
      while (reply?.type !== "done") {
        reply = await this.#next(call);
        if (reply.index !== index) {
          throw new Lost(`expected token ${index} next, got ${reply.index}`);
        }
        index += reply.token_ids.length;
        yield reply;
        if (++untold * REFILLS_PER_WINDOW >= this.window && !call.isFinished) {
          this.#send("credit", { target: call.id, credit: untold });
          untold = 0;
        }
      }
    } finally {
      signal?.removeEventListener("abort", abort);
      this.#giveUp(call);
    }
  }

  // Any request that has one reply, such as ask("register", { text: "…" }).
  async ask(type, fields = {}) {
    const call = this.#start(type, fields);
    try {
      return await this.#next(call);
    } finally {
      this.#giveUp(call);
    }
  }

  #start(type, fields) {
    if (this.#socket.closed) throw new Lost("the client is closed");
    this.#send("ping", {});
    const call = new Call(String(this.#lastId + 1), this.#lastId);
    this.#lastId += 1;
    this.#calls.set(call.id, call);
    this.#write({ type, id: call.id, ...fields });
    return call;
  }

  async #next(call) {
    for (let left = this.timeoutMs; left > 0; left -= this.probeMs) {
      const reply = await call.take(Math.min(left, this.probeMs));
      if (reply !== undefined) return reply;
      this.#send("ping", {});
    }
    throw new Lost(`no answer from ${this.endpoint} within ${this.timeoutMs} ms`);
  }

  #giveUp(call) {
    if (this.#calls.delete(call.id) && !call.isFinished) this.#send("cancel", { target: call.id });
  }

  // What nobody waits for the answer of.
  #send(type, fields) {
    if (!this.#socket.closed) this.#write({ type, id: String(++this.#lastId), ...fields });
  }

  // The library allows one unfinished `send` at a time.
  #write(message) {
    this.#sending = this.#sending.then(() => this.#socket.send(JSON.stringify(message))).catch(() => {});
  }

  async #receive() {
    try {
      for await (const [frame] of this.#socket) this.#file(JSON.parse(frame.toString()));
    } catch (error) {
      this.#failAll(new Lost(`what came from the daemon cannot be read: ${error.message}`));
      this.#socket.close();
    }
  }

  #file(reply) {
    if (reply.type === "pong") this.#forgetWhatIsLost(reply);
    const call = this.#calls.get(reply.id);
    call?.put(reply);
    if (call?.isFinished) this.#calls.delete(call.id);
  }

  #forgetWhatIsLost(pong) {
    for (const call of this.#calls.values()) {
      if (!call.isLostBy(pong)) continue;
      this.#giveUp(call);
      call.put(new Lost("rtcached was restarted before the answer was complete"));
    }
  }

  #failAll(error) {
    for (const call of this.#calls.values()) call.put(error);
    this.#calls.clear();
  }
}
