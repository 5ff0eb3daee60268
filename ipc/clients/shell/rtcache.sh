# Functions for bash scripts over `rtcache … --json` and jq; to be sourced.
# The daemon's endpoint is $RTCACHE_ENDPOINT, as for rtcache itself.
# shellcheck shell=bash

# rtcache_say PROMPT [OPTION…]: print an answer while it grows. Returns what rtcache returns.
rtcache_say() {
    rtcache generate "$@" --json --stream | jq -j --unbuffered 'select(.type != "error") | .text'
    local code=${PIPESTATUS[0]}
    echo
    return "$code"
}

# rtcache_keep FILE: keep a file's text as a prefix in the cache; print its id.
rtcache_keep() {
    rtcache register --file "$1" --json | jq -r '.prefix_id'
    return "${PIPESTATUS[0]}"
}

# rtcache_patiently TRIES COMMAND…: again and again while it is refused for now or its answer cut
# short (75), or the daemon is away (3), with a second in between. What was printed stays printed.
rtcache_patiently() {
    local tries=$1 code
    shift
    while true; do
        code=0
        "$@" || code=$?
        ((code == 75 || code == 3)) && ((--tries > 0)) || return "$code"
        sleep 1
    done
}
