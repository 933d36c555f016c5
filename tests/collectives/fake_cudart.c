// CUDA's runtime, as far as nbelastic/collectives/cuda_ipc uses it, with memory of the host.
// What the environment variable FAKE_CUDART_REFUSES names fails.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct {
    char reserved[64];
} Handle;

enum { MOST = 64 };
static struct {
    void* address;
    size_t bytes;
    int descriptor;
} memory[MOST];
static int last_error = 0;

static int refused(const char* name) {
    const char* refuses = getenv("FAKE_CUDART_REFUSES");
    return last_error = refuses != NULL && strcmp(refuses, name) == 0 ? 2 : 0;
}

static int map(void** address, size_t bytes, int descriptor) {
    for (int i = 0; i < MOST; ++i) {
        if (memory[i].address != NULL) continue;
        *address = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
        if (*address == MAP_FAILED) return 1;
        memory[i].address = *address;
        memory[i].bytes = bytes;
        memory[i].descriptor = descriptor;
        return 0;
    }
    return 2;
}

static int unmap(void* address) {
    for (int i = 0; i < MOST; ++i) {
        if (memory[i].address != address) continue;
        munmap(address, memory[i].bytes);
        close(memory[i].descriptor);
        memory[i].address = NULL;
        return 0;
    }
    return 1;
}

int cudaMalloc(void** address, size_t bytes) {
    if (refused("cudaMalloc")) return last_error;
    int descriptor = memfd_create("fake-cudart", 0);
    if (ftruncate(descriptor, (off_t)bytes) != 0) return 2;
    return map(address, bytes, descriptor);
}

int cudaFree(void* address) { return unmap(address); }

int cudaIpcGetMemHandle(Handle* handle, void* address) {
    if (refused("cudaIpcGetMemHandle")) return last_error;
    for (int i = 0; i < MOST; ++i) {
        if (memory[i].address != address) continue;
        memset(handle->reserved, 'x', sizeof handle->reserved);  // all of it matters
        snprintf(handle->reserved, 60, "/proc/%d/fd/%d", (int)getpid(), memory[i].descriptor);
        memcpy(handle->reserved + 60, "end!", 4);
        return 0;
    }
    return 1;
}

int cudaIpcOpenMemHandle(void** address, Handle handle, unsigned flags) {
    if (refused("cudaIpcOpenMemHandle")) return last_error;
    struct stat found;
    if (flags != 1 || memcmp(handle.reserved + 60, "end!", 4) != 0) return 1;
    int descriptor = open(handle.reserved, O_RDWR);
    if (descriptor < 0 || fstat(descriptor, &found) != 0) return 1;
    return map(address, (size_t)found.st_size, descriptor);
}

int cudaIpcCloseMemHandle(void* address) { return unmap(address); }

int cudaGetLastError(void) {
    int error = last_error;
    last_error = 0;
    return error;
}

const char* cudaGetErrorString(int error) {
    return error == 2 ? "out of memory" : "invalid argument";
}
