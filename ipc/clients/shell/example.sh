#!/usr/bin/env bash
# What a script can do with rtcache and jq, one JSON object a line: example.sh [ENDPOINT]
# A test runs it against a live daemon.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=rtcache.sh
source "$(dirname "$0")/rtcache.sh"
[[ $# -gt 0 ]] && export RTCACHE_ENDPOINT=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
greedy=(--temperature 0 --ignore-eos)

# A line for each piece, then one with the end: `text` of all of them together is the answer.
rtcache generate "Once upon a time" --max-tokens 40 "${greedy[@]}" --json --stream > "$work/lines"
jq -cs '{did: "stream", text: (map(.text) | add), messages: length,
         finish_reason: .[-1].finish_reason, usage: .[-1].usage}' "$work/lines"

printf 'You are a helpful assistant. %.0s' {1..10} > "$work/prefix"
prefix_id=$(rtcache_keep "$work/prefix")
rtcache generate "Hello" --prefix-id "$prefix_id" --max-tokens 4 "${greedy[@]}" --json |
    jq -c '{did: "hit", cached_tokens: .usage.cached_tokens}'
rtcache release "$prefix_id"

# SIGTERM cancels, like Ctrl-C (which bash keeps from what runs in the background).
exec 3< <(exec rtcache generate "Go on" "${greedy[@]}" --json --stream)
answer=$!
read -r _ <&3
kill "$answer"
code=0
wait "$answer" || code=$?
exec 3<&-
jq -cn --argjson code "$code" '{did: "cancel", exit_code: $code}'

# A refusal is a line too; the exit code says whether to try again (75) or not (1).
code=0
rtcache generate "x" --temperature -1 --json > "$work/refusal" 2> "$work/complaint" || code=$?
jq -c --argjson exit_code "$code" '{did: "error", code, retryable, $exit_code}' "$work/refusal"
