/*
A file server on 127.0.0.1 for tests of scripts/download.sh, with the faults of real servers:

    gcc -o http_server dev/test/stand-ins/http_server.c && ./http_server DIRECTORY >log

It prints its port on the first line, then a line `METHOD PATH RANGE_START` per request, and serves until it is killed.
Ranges (`bytes=N-`) are honoured. If the path contains one of these words, the file
    flaky      is cut off in the middle if the request is for its start
    cut        is cut off in the middle, whatever the request
    norange    is sent as a whole, whatever the requested range
    busy       is answered by 503 the first time
    page       an error is told by a page of 3000 bytes
    unsized    is sent without its size
    stall      is sent up to its middle if the request is for its start; then nothing more comes, and the connection stays open
    meet       is sent when another request with this word has come: the two must be in flight at the same time
*/
#define _GNU_SOURCE 1
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int server; // the socket that listens

static void serve_one(void);

static void fail(const char* what) {
    perror(what);
    exit(EXIT_FAILURE);
}

// Reads the whole file, or returns NULL. The caller frees.
static char* read_file(const char* path, size_t* size) {
    FILE* f = fopen(path, "rb");
    char* data = NULL;
    long end = -1;
    if (f && fseek(f, 0, SEEK_END) == 0) { end = ftell(f); }
    if (end >= 0) {
        *size = (size_t)end;
        data = (char*)malloc(*size + 1);
        rewind(f);
        if (!data || fread(data, 1, *size, f) != *size) { fail(path); }
    }
    if (f) { fclose(f); }
    return data;
}

static void send_all(int fd, const char* data, size_t size) {
    while (size > 0) {
        ssize_t n = write(fd, data, size);
        if (n <= 0) { return; } // the client has closed the connection
        data += n;
        size -= (size_t)n;
    }
}

static void send_head(int fd, const char* status, size_t size, const char* more) {
    char head[512];
    snprintf(head, sizeof(head), "HTTP/1.1 %s\r\nContent-Length: %zu\r\nConnection: close\r\n%s\r\n", status, size,
             more);
    send_all(fd, head, strlen(head));
}

static void send_unsized(int fd, const char* data, size_t size) {
    const char head[] = "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n";
    send_all(fd, head, strlen(head));
    send_all(fd, data, size);
}

// An error, told by a page whose size depends on the path.
static void send_page(int fd, const char* status, const char* path) {
    char page[3000];
    size_t n = strstr(path, "page") ? sizeof(page) : 9;
    memset(page, '.', sizeof(page));
    send_head(fd, status, n, "");
    send_all(fd, page, n);
}

// Answers one request: GET or HEAD, headers without a body. Returns whether the connection is to be closed.
static bool answer(int fd) {
    char request[8192], method[8], path[4096];
    size_t used = 0;
    request[0] = '\0';
    while (!strstr(request, "\r\n\r\n")) {
        ssize_t n = read(fd, request + used, sizeof(request) - 1 - used);
        if (n <= 0) { return true; }
        used += (size_t)n;
        request[used] = '\0';
    }
    if (sscanf(request, "%7s /%4095s", method, path) != 2) { return true; }
    const char* range = strcasestr(request, "\r\nRange: bytes=");
    size_t start = range ? strtoul(range + strlen("\r\nRange: bytes="), NULL, 10) : 0;
    printf("%s %s %zu\n", method, path, start);
    fflush(stdout);

    static int num_meeting;
    static bool was_busy;
    if (strstr(path, "meet")) {
        num_meeting++;
        while (num_meeting == 1) { serve_one(); }
    }
    if (strstr(path, "busy") && !was_busy) {
        was_busy = true;
        send_page(fd, "503 Service Unavailable", path);
        return true;
    }
    bool stalls = strstr(path, "stall") && start == 0;
    size_t size = 0;
    char* data = strstr(path, "..") ? NULL : read_file(path, &size);
    if (!data) {
        send_page(fd, "404 Not Found", path);
        return true;
    }
    bool is_half = stalls || strstr(path, "cut") || (strstr(path, "flaky") && start == 0);
    size_t end = is_half ? size / 2 : size; // what comes after it is not sent
    if (strstr(path, "unsized")) {
        send_unsized(fd, data, size);
    } else if (!range || strstr(path, "norange")) {
        send_head(fd, "200 OK", size, "");
        send_all(fd, data, end);
    } else if (start >= size) {
        send_head(fd, "416 Range Not Satisfiable", 0, "");
    } else {
        char more[128];
        snprintf(more, sizeof(more), "Content-Range: bytes %zu-%zu/%zu\r\n", start, size - 1, size);
        send_head(fd, "206 Partial Content", size - start, more);
        send_all(fd, data + start, start < end ? end - start : 0);
    }
    free(data);
    return !stalls;
}

static void serve_one(void) {
    int fd = accept(server, NULL, NULL);
    if (fd >= 0 && answer(fd)) { close(fd); }
}

int main(int argc, char** argv) {
    if (argc != 2 || chdir(argv[1]) != 0) { fail(argc == 2 ? argv[1] : "usage: http_server DIRECTORY"); }
    signal(SIGPIPE, SIG_IGN);
    server = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in address;
    memset(&address, 0, sizeof(address));
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK); // port 0: any free port
    socklen_t length = sizeof(address);
    if (server < 0 || bind(server, (struct sockaddr*)&address, length) != 0 || listen(server, 16) != 0 ||
        getsockname(server, (struct sockaddr*)&address, &length) != 0) {
        fail("cannot serve on 127.0.0.1");
    }
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) { serve_one(); }
}
