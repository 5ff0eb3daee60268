#include "rtcache_client.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <zmq.h>

/* `tokens` messages of an answer that may be ahead of their reader; half of them are granted anew. */
#define WINDOW 64
/* When a call has waited for so long, the daemon is asked whether it is still the same. */
#define PROBE_MS 2000

struct rtcache_client {
    void *context;
    void *socket;
    int timeout_ms;
    unsigned long last_id;
    unsigned long ping_id; /* of the `ping` that was sent before the request */
    char incarnation[40];  /* in the answer to it; empty: it has not come */
};

static const struct {
    int option;
    int value;
} OPTIONS[] = {
    {ZMQ_LINGER, 0},
    {ZMQ_SNDHWM, 0},
    {ZMQ_HEARTBEAT_IVL, 5000},
    {ZMQ_HEARTBEAT_TIMEOUT, 20000},
    {ZMQ_HEARTBEAT_TTL, 20000},
};

static int set_keys(void *socket, const rtcache_keys *keys)
{
    const struct {
        int option;
        const char *key;
    } all[] = {
        {ZMQ_CURVE_SERVERKEY, keys->server_key},
        {ZMQ_CURVE_PUBLICKEY, keys->public_key},
        {ZMQ_CURVE_SECRETKEY, keys->secret_key},
    };
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (zmq_setsockopt(socket, all[i].option, all[i].key, strlen(all[i].key) + 1) != 0)
            return -1;
    return 0;
}

rtcache_client *rtcache_open(const char *endpoint, int timeout_ms, const rtcache_keys *keys)
{
    rtcache_client *client = calloc(1, sizeof *client);
    if (client == NULL)
        return NULL;
    client->timeout_ms = timeout_ms;
    client->context = zmq_ctx_new();
    client->socket = client->context ? zmq_socket(client->context, ZMQ_DEALER) : NULL;
    if (client->socket != NULL) {
        for (size_t i = 0; i < sizeof OPTIONS / sizeof *OPTIONS; i++)
            zmq_setsockopt(client->socket, OPTIONS[i].option, &OPTIONS[i].value, sizeof(int));
        if ((keys == NULL || set_keys(client->socket, keys) == 0) &&
            zmq_connect(client->socket, endpoint) == 0)
            return client;
    }
    int error = errno;
    rtcache_close(client);
    errno = error;
    return NULL;
}

void rtcache_close(rtcache_client *client)
{
    if (client == NULL)
        return;
    if (client->socket != NULL)
        zmq_close(client->socket);
    if (client->context != NULL)
        zmq_ctx_term(client->context);
    free(client);
}

static long now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000L + now.tv_nsec / 1000000L;
}

/* Send a message; takes `message`. id: room for its id, or NULL. */
static rtcache_status send_message(rtcache_client *client, cJSON *message, const char *type,
                                   char id[24])
{
    char number[24];
    snprintf(number, sizeof number, "%lu", ++client->last_id);
    if (id != NULL)
        strcpy(id, number);
    /* The page asks for `type` and `id` in front: cJSON keeps the order of insertion. */
    cJSON *whole = cJSON_CreateObject();
    char *text = NULL;
    if (whole != NULL && cJSON_AddStringToObject(whole, "type", type) != NULL &&
        cJSON_AddStringToObject(whole, "id", number) != NULL) {
        while (message != NULL && message->child != NULL) {
            cJSON *field = cJSON_DetachItemViaPointer(message, message->child);
            cJSON_AddItemToObject(whole, field->string, field);
        }
        text = cJSON_PrintUnformatted(whole);
    }
    int sent = text != NULL ? zmq_send(client->socket, text, strlen(text), ZMQ_DONTWAIT) : -1;
    cJSON_free(text);
    cJSON_Delete(whole);
    cJSON_Delete(message);
    return sent < 0 ? RTCACHE_FAILED : RTCACHE_OK;
}

/* Send a message with one text field and, if `number` is not 0, one number. */
static rtcache_status send_small(rtcache_client *client, const char *type, const char *target,
                                 int number)
{
    cJSON *fields = cJSON_CreateObject();
    if (target != NULL)
        cJSON_AddStringToObject(fields, "target", target);
    if (number != 0)
        cJSON_AddNumberToObject(fields, "credit", number);
    return send_message(client, fields, type, NULL);
}

static const char *text_of(const cJSON *message, const char *name)
{
    const char *text = cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(message, name));
    return text != NULL ? text : "";
}

/* The next message from the daemon, whatever it belongs to; NULL with RTCACHE_OK: none in time. */
static rtcache_status receive(rtcache_client *client, long wait_ms, cJSON **message)
{
    *message = NULL;
    zmq_pollitem_t item = {client->socket, 0, ZMQ_POLLIN, 0};
    int ready = zmq_poll(&item, 1, wait_ms);
    if (ready <= 0)
        return ready == 0 || errno == EINTR ? RTCACHE_OK : RTCACHE_FAILED;
    zmq_msg_t frame;
    zmq_msg_init(&frame);
    rtcache_status status = RTCACHE_FAILED;
    if (zmq_msg_recv(&frame, client->socket, ZMQ_DONTWAIT) >= 0) {
        *message = cJSON_ParseWithLength(zmq_msg_data(&frame), zmq_msg_size(&frame));
        status = *message != NULL ? RTCACHE_OK : RTCACHE_BROKEN;
    }
    zmq_msg_close(&frame);
    return status;
}

/* RTCACHE_LOST if an answer to a `ping` shows that a restarted daemon does not know the request. */
static rtcache_status hear_from(rtcache_client *client, const cJSON *message)
{
    unsigned long id = strtoul(text_of(message, "id"), NULL, 10);
    const char *incarnation = text_of(message, "incarnation");
    if (strcmp(text_of(message, "type"), "pong") != 0 || id < client->ping_id)
        return RTCACHE_OK;
    if (id == client->ping_id)
        snprintf(client->incarnation, sizeof client->incarnation, "%s", incarnation);
    return strcmp(incarnation, client->incarnation) == 0 ? RTCACHE_OK : RTCACHE_LOST;
}

/* The next reply to request `id`. */
static rtcache_status next_reply(rtcache_client *client, const char *id, cJSON **reply)
{
    long end_ms = now_ms() + client->timeout_ms;
    long probe_ms = now_ms() + PROBE_MS;
    for (;;) {
        long left_ms = end_ms - now_ms();
        if (left_ms <= 0)
            return RTCACHE_TIMEOUT;
        if (now_ms() >= probe_ms) {
            probe_ms = now_ms() + PROBE_MS;
            send_small(client, "ping", NULL, 0);
        }
        cJSON *message;
        rtcache_status status = receive(client, left_ms < PROBE_MS ? left_ms : PROBE_MS, &message);
        int is_ours = message != NULL && strcmp(text_of(message, "id"), id) == 0;
        if (status == RTCACHE_OK && message != NULL && !is_ours)
            status = hear_from(client, message);
        if (status == RTCACHE_OK && is_ours) {
            *reply = message;
            return RTCACHE_OK;
        }
        cJSON_Delete(message); /* a late reply to an earlier call, or a pong */
        if (status != RTCACHE_OK)
            return status;
    }
}

static rtcache_status start(rtcache_client *client, const char *type, const cJSON *fields,
                            int credit, char id[24])
{
    cJSON *message = fields != NULL ? cJSON_Duplicate(fields, 1) : cJSON_CreateObject();
    if (message == NULL)
        return RTCACHE_FAILED;
    if (credit != 0)
        cJSON_AddNumberToObject(message, "credit", credit);
    send_small(client, "ping", NULL, 0);
    client->ping_id = client->last_id;
    client->incarnation[0] = '\0';
    return send_message(client, message, type, id);
}

/* Hand the last reply over, or delete it. */
static rtcache_status finish(cJSON *reply, cJSON **last)
{
    int is_refusal = strcmp(text_of(reply, "type"), "error") == 0;
    if (last != NULL)
        *last = reply;
    else
        cJSON_Delete(reply);
    return is_refusal ? RTCACHE_REFUSED : RTCACHE_OK;
}

rtcache_status rtcache_ask(rtcache_client *client, const char *type, const cJSON *fields,
                           cJSON **last)
{
    char id[24];
    cJSON *reply = NULL;
    if (last != NULL)
        *last = NULL;
    rtcache_status status = start(client, type, fields, 0, id);
    if (status == RTCACHE_OK)
        status = next_reply(client, id, &reply);
    if (status == RTCACHE_OK)
        return finish(reply, last);
    if (status == RTCACHE_TIMEOUT)
        send_small(client, "cancel", id, 0);
    return status;
}

/* Whether the message goes on where the one before it ended; counts its tokens. */
static int is_next(const cJSON *message, int *num_tokens)
{
    const cJSON *index = cJSON_GetObjectItemCaseSensitive(message, "index");
    int fits = cJSON_IsNumber(index) && index->valueint == *num_tokens;
    *num_tokens += cJSON_GetArraySize(cJSON_GetObjectItemCaseSensitive(message, "token_ids"));
    return fits;
}

rtcache_status rtcache_answer(rtcache_client *client, const char *type, const cJSON *fields,
                              rtcache_reader read, void *context, cJSON **last)
{
    char id[24];
    int num_tokens = 0, num_read = 0, is_cancelled = 0;
    if (last != NULL)
        *last = NULL;
    rtcache_status status = start(client, type, fields, WINDOW, id);
    while (status == RTCACHE_OK) {
        cJSON *reply = NULL;
        status = next_reply(client, id, &reply);
        if (status != RTCACHE_OK)
            break;
        int is_last = strcmp(text_of(reply, "type"), "tokens") != 0;
        int is_part = !is_last || strcmp(text_of(reply, "type"), "done") == 0;
        if (is_part && !is_next(reply, &num_tokens)) {
            cJSON_Delete(reply);
            status = RTCACHE_BROKEN;
            break;
        }
        int stop = is_part && read != NULL ? read(context, reply) : 0;
        if (is_last)
            return finish(reply, last);
        cJSON_Delete(reply);
        if (stop != 0 && !is_cancelled) {
            is_cancelled = 1;
            status = send_small(client, "cancel", id, 0);
        } else if (++num_read >= WINDOW / 2) {
            status = send_small(client, "credit", id, num_read);
            num_read = 0;
        }
    }
    send_small(client, "cancel", id, 0);
    return status;
}

const char *rtcache_status_text(rtcache_status status)
{
    switch (status) {
    case RTCACHE_OK:
        return "it worked";
    case RTCACHE_REFUSED:
        return "rtcached refused it";
    case RTCACHE_TIMEOUT:
        return "no answer in time: is rtcached running, and with this endpoint?";
    case RTCACHE_LOST:
        return "rtcached was restarted before the answer was complete; ask again";
    case RTCACHE_BROKEN:
        return "what rtcached sent makes no sense";
    case RTCACHE_FAILED:
        return "out of memory, or libzmq failed";
    }
    return "unknown";
}
