// NCCL, as far as nbelastic/collectives/nccl uses it, with memory of the host.
//
// Ranks are threads or processes. They share the memory that a unique id names, which is open in
// the process that has made the id. Each communicator has a thread that performs groups of
// operations in order; a stream counts what is left to do. As late as it may be, a group begins
// when the host has asked for its end.
//
// The environment variable FAKE_NCCL has faults and their ranks, such as "stuck:1 abort:1":
//   init      ncclCommInitRankConfig never returns
//   progress  the communicator is in progress for ever
//   refuses   ncclCommInitRankConfig returns an error
//   error     an operation has an asynchronous error, and never ends
//   stuck     an operation never ends
//   abort     ncclCommAbort never returns, and frees no stream
//   finalize  ncclCommFinalize is in progress for ever
//   garbles   sums are wrong
//   id        ncclGetUniqueId returns an error
// "For ever" is as long as the variable says so.
#define _GNU_SOURCE
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID = 4, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { MOST = 8, CHUNK = 64 << 10, MOST_CALLS = 4096 };

typedef struct {
    char internal[128];
} Id;

typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking;
} Config;

typedef struct {
    atomic_uint full;  // the number of bytes, and one
    char data[CHUNK];
} Mailbox;

typedef struct {
    atomic_long arrived[MOST];
    char data[MOST][CHUNK];
    Mailbox mail[MOST][MOST];  // from, to
} Shared;

typedef struct {
    atomic_long begun, asked, ended;  // groups
} Stream;

typedef enum { ALLREDUCE, BROADCAST, GATHER, SCATTER, SEND, RECEIVE } Kind;

typedef struct Comm Comm;

typedef struct {
    Kind kind;
    const char* from;
    char* to;
    size_t count;
    int type, what;  // an operation, or a rank
    Comm* comm;
    Stream* stream;
} Call;

typedef struct Group {
    Call* calls;
    int count;
    long number;  // in its stream
    struct Group* next;
} Group;

struct Comm {
    Shared* shared;
    int rank, size, descriptor;
    long meetings;
    atomic_int state, aborted, ended;
    pthread_t thread;
    pthread_mutex_t lock;
    Group *first, *last;
};

static _Thread_local Call group[MOST_CALLS];
static _Thread_local int group_count, group_depth;

static int fault(const char* name, int rank) {
    const char* its = getenv("FAKE_NCCL");
    char wanted[64];
    snprintf(wanted, sizeof wanted, "%s:%d", name, rank);
    return its != NULL && strstr(its, wanted) != NULL;
}

// -- meeting ------------------------------------------------------------------------------------

static int gone(Comm* comm) { return atomic_load(&comm->aborted) && !fault("abort", comm->rank); }

static int meet(Comm* comm) {
    long number = ++comm->meetings;
    atomic_store(&comm->shared->arrived[comm->rank], number);
    for (int rank = 0; rank < comm->size; ++rank) {
        while (atomic_load(&comm->shared->arrived[rank]) < number) {
            if (gone(comm)) return 0;
            usleep(20);
        }
    }
    return 1;
}

// -- arithmetic ---------------------------------------------------------------------------------

static const size_t width_of[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};

static double half(uint16_t bits) {
    int exponent = bits >> 10 & 31, fraction = bits & 1023;
    double value = exponent == 31   ? (fraction ? NAN : INFINITY)
                   : exponent == 0 ? ldexp(fraction, -24)
                                   : ldexp(fraction + 1024, exponent - 25);
    return bits & 0x8000 ? -value : value;
}

static uint16_t to_half(double value) {
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    value = fabs(value);
    if (isnan(value)) return sign | 0x7e00;
    if (value == 0) return sign;
    int exponent;
    frexp(value, &exponent);
    exponent = exponent - 1 < -14 ? -14 : exponent - 1;
    long fraction = lrint(ldexp(value, 10 - exponent));  // to even
    if (fraction == 2048) fraction = 1024, ++exponent;
    if (exponent > 15) return sign | 0x7c00;
    return sign | (fraction < 1024 ? fraction : (exponent + 15) << 10 | (fraction - 1024));
}

static double brain(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static uint16_t to_brain(double value) {
    float narrow = (float)value;
    uint32_t bits;
    memcpy(&bits, &narrow, 4);
    if (isnan(value)) return 0x7fc0;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

static int64_t whole(int type, const char* at) {
    switch (type) {
        case 0: return *(const int8_t*)at;
        case 1: return *(const uint8_t*)at;
        case 2: return *(const int32_t*)at;
        default: return *(const int64_t*)at;
    }
}

static void set_whole(int type, char* at, int64_t value) { memcpy(at, &value, width_of[type]); }

static double real(int type, const char* at) {
    switch (type) {
        case 6: return half(*(const uint16_t*)at);
        case 7: return *(const float*)at;
        case 8: return *(const double*)at;
        default: return brain(*(const uint16_t*)at);
    }
}

static void set_real(int type, char* at, double value) {
    switch (type) {
        case 6: *(uint16_t*)at = to_half(value); break;
        case 7: *(float*)at = (float)value; break;
        case 8: *(double*)at = value; break;
        default: *(uint16_t*)at = to_brain(value);
    }
}

// Operations: sum, product, max, min, average. As NCCL does, each step is rounded to the type,
// but for types of two bytes, for which rings differ anyway.
static void reduce(Comm* comm, char* to, size_t count, int type, int op) {
    size_t width = width_of[type];
    int wrong = fault("garbles", comm->rank);
    for (size_t i = 0; i < count; ++i) {
        if (type < 6) {
            uint64_t total = (uint64_t)whole(type, comm->shared->data[0] + i * width);
            for (int rank = 1; rank < comm->size; ++rank) {
                int64_t each = whole(type, comm->shared->data[rank] + i * width);
                if (op == 0) total += (uint64_t)each;
                if (op == 1) total *= (uint64_t)each;
                if (op == 2 && each > (int64_t)total) total = (uint64_t)each;
                if (op == 3 && each < (int64_t)total) total = (uint64_t)each;
            }
            set_whole(type, to + i * width, (int64_t)total + wrong);
            continue;
        }
        double total = real(type, comm->shared->data[0] + i * width);
        for (int rank = 1; rank < comm->size; ++rank) {
            double each = real(type, comm->shared->data[rank] + i * width);
            if (op == 0 || op == 4) total += each;
            if (op == 1) total *= each;
            if (op == 2 && (each > total || isnan(each))) total = each;
            if (op == 3 && (each < total || isnan(each))) total = each;
            if (type != 8) total = (float)total;
        }
        if (op == 4) total /= comm->size;
        set_real(type, to + i * width, total + wrong);
    }
}

// -- operations, in the thread of a communicator ------------------------------------------------

static int collective(Call* call) {
    Comm* comm = call->comm;
    size_t width = width_of[call->type];
    size_t total = call->count * width * (call->kind == SCATTER ? (size_t)comm->size : 1);
    for (size_t start = 0; start < total; start += CHUNK) {
        size_t bytes = total - start < CHUNK ? total - start : CHUNK;
        memcpy(comm->shared->data[comm->rank], call->from + start, bytes);
        if (!meet(comm)) return 0;
        if (call->kind == ALLREDUCE) {
            reduce(comm, call->to + start, bytes / width, call->type, call->what);
        } else if (call->kind == BROADCAST) {
            memcpy(call->to + start, comm->shared->data[call->what], bytes);
        } else if (call->kind == GATHER) {
            for (int rank = 0; rank < comm->size; ++rank) {
                memcpy(call->to + (size_t)rank * total + start, comm->shared->data[rank], bytes);
            }
        } else {
            static _Thread_local char sums[CHUNK];
            reduce(comm, sums, bytes / width, call->type, call->what);
            size_t low = (size_t)comm->rank * call->count * width, high = low + call->count * width;
            size_t first = start > low ? start : low;
            size_t last = start + bytes < high ? start + bytes : high;
            if (first < last) memcpy(call->to + first - low, sums + first - start, last - first);
        }
        if (!meet(comm)) return 0;
    }
    return 1;
}

static int exchange(Call* calls, int count) {
    size_t* moved = calloc((size_t)count, sizeof *moved);
    int left = count, fine = 1;
    char* done = calloc((size_t)count, 1);
    while (left && fine) {
        int idle = 1;
        for (int i = 0; i < count; ++i) {
            Call* call = &calls[i];
            Comm* comm = call->comm;
            Mailbox* box = call->kind == SEND ? &comm->shared->mail[comm->rank][call->what]
                                              : &comm->shared->mail[call->what][comm->rank];
            unsigned full = atomic_load(&box->full);
            if (done[i] || (call->kind == SEND) != (full == 0)) continue;
            idle = 0;
            if (call->kind == SEND) {
                size_t rest = call->count - moved[i], bytes = rest < CHUNK ? rest : CHUNK;
                memcpy(box->data, call->from + moved[i], bytes);
                moved[i] += bytes;
                atomic_store(&box->full, (unsigned)bytes + 1);
            } else {
                memcpy(call->to + moved[i], box->data, full - 1);
                moved[i] += full - 1;
                atomic_store(&box->full, 0);
            }
            if (moved[i] == call->count) done[i] = 1, --left;
        }
        if (gone(calls[0].comm)) fine = 0;
        if (idle) usleep(20);
    }
    free(moved);
    free(done);
    return fine;
}

static void perform(Comm* comm, Group* its) {
    Stream* stream = its->calls[0].stream;
    while (atomic_load(&stream->asked) < its->number && !gone(comm)) usleep(20);
    if (fault("error", comm->rank)) atomic_store(&comm->state, REMOTE_ERROR);
    while ((fault("stuck", comm->rank) || fault("error", comm->rank)) && !gone(comm)) usleep(100);
    int fine = !gone(comm);
    for (int i = 0; fine && i < its->count;) {
        int moves = i;
        while (moves < its->count && its->calls[moves].kind >= SEND) ++moves;
        fine = moves > i ? exchange(its->calls + i, moves - i) : collective(&its->calls[i]);
        i = moves > i ? moves : i + 1;
    }
    atomic_store(&stream->ended, its->number);
    free(its->calls);
    free(its);
}

static void* serve(void* argument) {
    Comm* comm = argument;
    while (1) {
        pthread_mutex_lock(&comm->lock);
        Group* its = comm->first;
        if (its != NULL && (comm->first = its->next) == NULL) comm->last = NULL;
        pthread_mutex_unlock(&comm->lock);
        if (its != NULL) {
            perform(comm, its);
        } else if (atomic_load(&comm->ended)) {
            return NULL;
        } else {
            usleep(50);
        }
    }
}

// -- streams, for the fake device ---------------------------------------------------------------

void* fakeStreamCreate(void) { return calloc(1, sizeof(Stream)); }

long fakeStreamBegun(Stream* stream) { return atomic_load(&stream->begun); }

int fakeStreamReached(Stream* stream, long number) {
    if (atomic_load(&stream->asked) < number) atomic_store(&stream->asked, number);
    return atomic_load(&stream->ended) >= number;
}

// -- NCCL's interface ---------------------------------------------------------------------------

int ncclGetVersion(int* version) {
    *version = 22809;
    return SUCCESS;
}

const char* ncclGetErrorString(int result) {
    return result == SYSTEM_ERROR   ? "unhandled system error (run with NCCL_DEBUG=INFO for details)"
           : result == REMOTE_ERROR ? "remote process exited or there was a network error"
                                    : "invalid argument (run with NCCL_DEBUG=WARN for details)";
}

const char* ncclGetLastError(void* comm) {
    (void)comm;
    return "";
}

int ncclGetUniqueId(Id* id) {
    if (fault("id", 0)) return SYSTEM_ERROR;
    int descriptor = memfd_create("fake-nccl", 0);
    if (descriptor < 0 || ftruncate(descriptor, sizeof(Shared)) != 0) return SYSTEM_ERROR;
    memset(id, 'x', sizeof *id);  // all of it matters
    snprintf(id->internal, 100, "/proc/%d/fd/%d", (int)getpid(), descriptor);
    memcpy(id->internal + 124, "end!", 4);
    return SUCCESS;
}

int ncclCommInitRankConfig(Comm** made, int size, Id id, int rank, Config* config) {
    while (fault("init", rank)) usleep(1000);
    if (fault("refuses", rank)) return SYSTEM_ERROR;
    if (config->magic != 0xcafebeef || config->blocking != 0 || size > MOST) return INVALID;
    if (memcmp(id.internal + 124, "end!", 4) != 0) return INVALID;
    int pid, own;
    if (sscanf(id.internal, "/proc/%d/fd/%d", &pid, &own) != 2) return INVALID;
    int descriptor = open(id.internal, O_RDWR);
    if (descriptor < 0) return SYSTEM_ERROR;
    void* memory = mmap(NULL, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (memory == MAP_FAILED) return SYSTEM_ERROR;
    Comm* comm = calloc(1, sizeof *comm);
    comm->shared = memory;
    comm->rank = rank;
    comm->size = size;
    comm->descriptor = rank == 0 ? own : -1;
    pthread_mutex_init(&comm->lock, NULL);
    atomic_store(&comm->state, fault("progress", rank) ? IN_PROGRESS : SUCCESS);
    pthread_create(&comm->thread, NULL, serve, comm);
    *made = comm;
    return IN_PROGRESS;
}

int ncclCommGetAsyncError(Comm* comm, int* state) {
    *state = atomic_load(&comm->state);
    if (*state == IN_PROGRESS && !fault("progress", comm->rank) && !fault("finalize", comm->rank)) {
        atomic_store(&comm->state, SUCCESS);
    }
    return SUCCESS;
}

static int release(Comm* comm) {
    atomic_store(&comm->ended, 1);
    pthread_join(comm->thread, NULL);
    munmap(comm->shared, sizeof(Shared));
    if (comm->descriptor >= 0) close(comm->descriptor);
    pthread_mutex_destroy(&comm->lock);
    free(comm);
    return SUCCESS;
}

int ncclCommFinalize(Comm* comm) {
    atomic_store(&comm->state, IN_PROGRESS);
    return IN_PROGRESS;
}

int ncclCommDestroy(Comm* comm) { return release(comm); }

int ncclCommAbort(Comm* comm) {
    atomic_store(&comm->aborted, 1);
    while (fault("abort", comm->rank)) usleep(1000);
    return release(comm);
}

int ncclGroupStart(void) {
    ++group_depth;
    return SUCCESS;
}

int ncclGroupEnd(void) {
    if (--group_depth > 0 || group_count == 0) return SUCCESS;
    Comm* comm = group[0].comm;
    Group* its = calloc(1, sizeof *its);
    its->calls = malloc((size_t)group_count * sizeof(Call));
    its->count = group_count;
    memcpy(its->calls, group, (size_t)group_count * sizeof(Call));
    group_count = 0;
    its->number = atomic_fetch_add(&its->calls[0].stream->begun, 1) + 1;
    pthread_mutex_lock(&comm->lock);
    if (comm->last != NULL) {
        comm->last->next = its;
    } else {
        comm->first = its;
    }
    comm->last = its;
    pthread_mutex_unlock(&comm->lock);
    atomic_store(&comm->state, IN_PROGRESS);
    return IN_PROGRESS;
}

static int begin(Kind kind, const void* from, void* to, size_t count, int type, int what,
                 Comm* comm, Stream* stream) {
    if (group_count == MOST_CALLS || type < 0 || type > 9) return INVALID;
    ncclGroupStart();
    group[group_count++] = (Call){kind, from, to, count, type, what, comm, stream};
    return ncclGroupEnd();
}

int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, Comm* comm,
                  Stream* stream) {
    return begin(ALLREDUCE, from, to, count, type, op, comm, stream);
}

int ncclBroadcast(const void* from, void* to, size_t count, int type, int root, Comm* comm,
                  Stream* stream) {
    return begin(BROADCAST, from, to, count, type, root, comm, stream);
}

int ncclAllGather(const void* from, void* to, size_t count, int type, Comm* comm, Stream* stream) {
    return begin(GATHER, from, to, count, type, 0, comm, stream);
}

int ncclReduceScatter(const void* from, void* to, size_t count, int type, int op, Comm* comm,
                      Stream* stream) {
    return begin(SCATTER, from, to, count, type, op, comm, stream);
}

int ncclSend(const void* from, size_t count, int type, int peer, Comm* comm, Stream* stream) {
    return begin(SEND, from, NULL, count, type, peer, comm, stream);
}

int ncclRecv(void* to, size_t count, int type, int peer, Comm* comm, Stream* stream) {
    return begin(RECEIVE, NULL, to, count, type, peer, comm, stream);
}
