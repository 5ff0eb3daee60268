// What the client can do, one JSON object a line: node example.js [ENDPOINT [lost]]
// A test runs it against a live daemon; with `lost`, against one that is restarted in between.
// Exit code 3: no daemon answers.

import { Client, Lost, Refused } from "./client.js";

// Over TCP, with keys.
const { SERVER_KEY, PUBLIC_KEY, SECRET_KEY } = process.env;
const curve = SERVER_KEY ? { serverKey: SERVER_KEY, publicKey: PUBLIC_KEY, secretKey: SECRET_KEY } : null;
const client = new Client(process.argv[2], { window: 4, curve });
const say = (fields) => console.log(JSON.stringify(fields));
const GREEDY = { temperature: 0, ignore_eos: true };

async function stream() {
  let [text, messages, last] = ["", 0, null];
  for await (last of client.generate({ prompt: "Once upon a time", max_tokens: 40, ...GREEDY })) {
    text += last.text;
    messages += 1;
  }
  say({ did: "stream", text, messages, finish_reason: last.finish_reason, usage: last.usage });
}

async function hit() {
  const text = "You are a helpful assistant. ".repeat(10);
  const { prefix_id, num_tokens } = await client.ask("register", { text });
  let last;
  for await (last of client.generate({ prompt: "Hello", prefix_id, max_tokens: 4, ...GREEDY }));
  await client.ask("release", { prefix_id });
  say({ did: "hit", num_tokens, cached_tokens: last.usage.cached_tokens });
}

async function cancel() {
  const stop = new AbortController();
  let last;
  for await (last of client.generate({ prompt: "Go on", ...GREEDY }, stop)) stop.abort();
  // A signal that has fired already is heard too.
  for await (last of client.generate({ prompt: "Go on", ...GREEDY }, stop));
  say({ did: "cancel", finish_reason: last.finish_reason });
}

async function error() {
  try {
    await client.ask("tokenize", { txt: "a spelling mistake" });
  } catch (refused) {
    if (!(refused instanceof Refused)) throw refused;
    say({ did: "error", code: refused.code, retryable: refused.retryable });
  }
}

async function lost() {
  try {
    let pieces = 0;
    for await (const _ of client.generate({ prompt: "Go on", ...GREEDY })) {
      if (++pieces === 1) say({ did: "begin" });
    }
  } catch (error) {
    if (!(error instanceof Lost)) throw error;
    say({ did: "lost", retryable: error.retryable, ping: (await client.ask("ping")).type });
  }
}

const parts = process.argv[3] === "lost" ? [lost] : [stream, hit, cancel, error];
try {
  for (const part of parts) await part();
} catch (error) {
  if (!(error instanceof Lost)) throw error;
  console.error(`no daemon: ${error.message}`);
  process.exitCode = 3;
} finally {
  client.close();
}
