/* What the client can do, one JSON object a line: example [ENDPOINT [lost]]
 * A test runs it against a live daemon; with `lost`, against one that is restarted in between.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rtcache_client.h"

struct reading {
    char text[4096];
    int messages;
    int stop_after; /* messages; 0: never */
};

static int read_piece(void *context, const cJSON *message)
{
    struct reading *reading = context;
    const char *text =
        cJSON_GetStringValue(cJSON_GetObjectItemCaseSensitive(message, "text"));
    strncat(reading->text, text, sizeof reading->text - strlen(reading->text) - 1);
    reading->messages++;
    return reading->stop_after != 0 && reading->messages >= reading->stop_after;
}

static void insist(rtcache_status status)
{
    if (status == RTCACHE_OK)
        return;
    fprintf(stderr, "example: %s\n", rtcache_status_text(status));
    exit(1);
}

static void say(cJSON *line)
{
    char *text = cJSON_PrintUnformatted(line);
    puts(text);
    cJSON_free(text);
    cJSON_Delete(line);
}

static cJSON *begin(const char *what)
{
    cJSON *line = cJSON_CreateObject();
    cJSON_AddStringToObject(line, "did", what);
    return line;
}

/* Move a field of a reply into a line. */
static void move(cJSON *line, cJSON *reply, const char *name)
{
    cJSON_AddItemToObject(line, name, cJSON_DetachItemFromObjectCaseSensitive(reply, name));
}

static cJSON *request(const char *prompt, int max_tokens)
{
    cJSON *fields = cJSON_CreateObject();
    cJSON_AddStringToObject(fields, "prompt", prompt);
    cJSON_AddNumberToObject(fields, "temperature", 0);
    cJSON_AddTrueToObject(fields, "ignore_eos");
    if (max_tokens != 0)
        cJSON_AddNumberToObject(fields, "max_tokens", max_tokens);
    return fields;
}

static void stream(rtcache_client *client)
{
    struct reading reading = {0};
    cJSON *fields = request("Once upon a time", 40), *done;
    insist(rtcache_answer(client, "generate", fields, read_piece, &reading, &done));
    cJSON *line = begin("stream");
    cJSON_AddStringToObject(line, "text", reading.text);
    cJSON_AddNumberToObject(line, "messages", reading.messages);
    move(line, done, "finish_reason");
    move(line, done, "usage");
    say(line);
    cJSON_Delete(done);
    cJSON_Delete(fields);
}

static void hit(rtcache_client *client)
{
    char text[512] = "";
    for (int i = 0; i < 10; i++)
        strcat(text, "You are a helpful assistant. ");
    cJSON *fields = cJSON_CreateObject(), *registered, *done;
    cJSON_AddStringToObject(fields, "text", text);
    insist(rtcache_ask(client, "register", fields, &registered));
    cJSON_Delete(fields);

    fields = request("Hello", 4);
    const cJSON *prefix_id = cJSON_GetObjectItemCaseSensitive(registered, "prefix_id");
    cJSON_AddItemToObject(fields, "prefix_id", cJSON_Duplicate(prefix_id, 1));
    insist(rtcache_answer(client, "generate", fields, NULL, NULL, &done));
    cJSON_Delete(fields);

    cJSON *line = begin("hit");
    move(line, registered, "num_tokens");
    cJSON *usage = cJSON_GetObjectItemCaseSensitive(done, "usage");
    move(line, usage, "cached_tokens");
    say(line);
    fields = cJSON_CreateObject();
    move(fields, registered, "prefix_id");
    insist(rtcache_ask(client, "release", fields, NULL));
    cJSON_Delete(fields);
    cJSON_Delete(registered);
    cJSON_Delete(done);
}

static void cancel(rtcache_client *client)
{
    struct reading reading = {.stop_after = 1};
    cJSON *fields = request("Go on", 0), *done;
    insist(rtcache_answer(client, "generate", fields, read_piece, &reading, &done));
    cJSON *line = begin("cancel");
    move(line, done, "finish_reason");
    say(line);
    cJSON_Delete(done);
    cJSON_Delete(fields);
}

static void error(rtcache_client *client)
{
    cJSON *fields = cJSON_CreateObject(), *refusal;
    cJSON_AddStringToObject(fields, "txt", "a spelling mistake");
    rtcache_status status = rtcache_ask(client, "tokenize", fields, &refusal);
    cJSON_Delete(fields);
    if (status != RTCACHE_REFUSED) {
        insist(status);
        exit(1);
    }
    cJSON *line = begin("error");
    move(line, refusal, "code");
    move(line, refusal, "retryable");
    say(line);
    cJSON_Delete(refusal);
}

static int say_that_it_began(void *context, const cJSON *message)
{
    int *messages = context;
    (void)message;
    if (++*messages == 1)
        say(begin("begin"));
    return 0;
}

static void lost(rtcache_client *client)
{
    int messages = 0;
    cJSON *fields = request("Go on", 0);
    if (rtcache_answer(client, "generate", fields, say_that_it_began, &messages, NULL) !=
        RTCACHE_LOST)
        exit(1);
    cJSON_Delete(fields);
    cJSON *pong, *line = begin("lost");
    insist(rtcache_ask(client, "ping", NULL, &pong));
    cJSON_AddTrueToObject(line, "retryable");
    cJSON_AddStringToObject(line, "ping", "pong");
    say(line);
    cJSON_Delete(pong);
}

int main(int argc, char **argv)
{
    const char *endpoint = argc > 1 ? argv[1] : "ipc:///run/rtcached/rtcached.sock";
    /* Over TCP, with keys. */
    rtcache_keys keys = {getenv("SERVER_KEY"), getenv("PUBLIC_KEY"), getenv("SECRET_KEY")};
    rtcache_client *client = rtcache_open(endpoint, 60000, keys.server_key ? &keys : NULL);
    if (client == NULL) {
        perror(endpoint);
        return 1;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc > 2) {
        lost(client);
    } else {
        stream(client);
        hit(client);
        cancel(client);
        error(client);
    }
    rtcache_close(client);
    return 0;
}
