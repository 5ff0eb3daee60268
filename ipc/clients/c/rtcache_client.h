/* A client of rtcached in C, written from ipc/PROTOCOL.md. Needs libzmq and cJSON.
 *
 * A client belongs to one thread and makes one call at a time. Every call ends: when nothing has
 * come for its timeout, or when the daemon was restarted, it returns and says so.
 */
#ifndef RTCACHE_CLIENT_H
#define RTCACHE_CLIENT_H

#include <cjson/cJSON.h>

typedef struct rtcache_client rtcache_client;

typedef enum {
    RTCACHE_OK = 0,
    RTCACHE_REFUSED,  /* the daemon answered `error`: *last has code, message, retryable */
    RTCACHE_TIMEOUT,  /* nothing came in time; the request is cancelled */
    RTCACHE_LOST,     /* the daemon was restarted; the request can be made again */
    RTCACHE_BROKEN,   /* what came cannot be read, or a message of the answer is missing */
    RTCACHE_FAILED,   /* out of memory, or libzmq failed: see errno and zmq_strerror */
} rtcache_status;

/* Called with every message of an answer, the last one (`done`) too. `text` of all of them together
 * is the answer. Not 0: the request is cancelled; its `done` still comes.
 */
typedef int (*rtcache_reader)(void *context, const cJSON *message);

/* Keys for TCP, 40 characters each. */
typedef struct {
    const char *server_key; /* the daemon's public key */
    const char *public_key;
    const char *secret_key;
} rtcache_keys;

/* Connecting does not wait for the daemon. keys: or NULL. NULL: see errno and zmq_strerror. */
rtcache_client *rtcache_open(const char *endpoint, int timeout_ms, const rtcache_keys *keys);
void rtcache_close(rtcache_client *client);

/* Any request that has one reply, such as "register".
 * fields: the request's fields besides `id` and `type`, or NULL; stays the caller's.
 * last: gets the reply (of RTCACHE_OK and RTCACHE_REFUSED), to be freed with cJSON_Delete; or NULL.
 */
rtcache_status rtcache_ask(rtcache_client *client, const char *type, const cJSON *fields,
                           cJSON **last);

/* "generate" or "chat": as rtcache_ask, and `read` is called with each message; *last is `done`. */
rtcache_status rtcache_answer(rtcache_client *client, const char *type, const cJSON *fields,
                              rtcache_reader read, void *context, cJSON **last);

/* What a status means, for people. */
const char *rtcache_status_text(rtcache_status status);

#endif
