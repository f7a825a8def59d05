/* A fake of NVIDIA's libcuda.so.1 on the cards of the fake driver: contexts and allocations that NVML lists.

   Nothing is stored: an allocation is a figure in a table that all processes share, gone when its process ends. */
#include "fake_state.h"

enum {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_DEVICE = 101,
    INVALID_CONTEXT = 201, UNKNOWN = 999
};

#define API __attribute__((visibility("default"))) int
/* Memory is given in pieces of this size. */
#define PIECE (2ULL << 20)
#define POINTERS 65536

typedef struct { int card, slice; } Place;
typedef struct { int device, own; u64 charged; } Context;

static int initialized, visible_count, current = -1;
static Place visible[CARDS * (SLICES + 1)];
static int retained[CARDS * (SLICES + 1)];
static struct { int device; u64 bytes; } pointers[POINTERS];

static Slot *slot_of(Place place) {
    return place.slice < 0 ? &S.cards[place.card].slot : &S.cards[place.card].slices[place.slice];
}

/* The devices that CUDA_VISIBLE_DEVICES leaves: indices, or beginnings of UUIDs; what cannot be read ends the list. */
static void choose(void) {
    const char *list = getenv("CUDA_VISIBLE_DEVICES");
    visible_count = 0;
    if (!list) {
        for (int i = 0; i < S.card_count; i++)
            visible[visible_count++] = (Place){i, S.cards[i].slice_count ? 0 : -1};
        return;
    }
    char text[4096], *rest = text;
    snprintf(text, sizeof text, "%s", list);
    for (char *one; (one = strsep(&rest, ",")) && visible_count < CARDS;) {
        Place place = {-1, -1};
        char *end;
        long index = strtol(one, &end, 10);
        if (*one && !*end) {
            if (index >= 0 && index < S.card_count) place = (Place){(int)index, S.cards[index].slice_count ? 0 : -1};
        } else if (!strncmp(one, "GPU-", 4) || !strncmp(one, "MIG-", 4)) {
            for (int i = 0; i < S.card_count; i++) {
                if (!strncmp(S.cards[i].slot.uuid, one, strlen(one))) place = (Place){i, S.cards[i].slice_count ? 0 : -1};
                for (int k = 0; k < S.cards[i].slice_count; k++)
                    if (!strncmp(S.cards[i].slices[k].uuid, one, strlen(one))) place = (Place){i, k};
            }
        }
        if (place.card < 0) break;
        visible[visible_count++] = place;
    }
}

/* Descriptor by which the table of all processes is locked. */
static int table = -1;

/* Begin a call; on success the lock of this library is held. */
static int begin(void) {
    pthread_mutex_lock(&guard);
    if (load() && initialized) return SUCCESS;
    pthread_mutex_unlock(&guard);
    return NOT_INITIALIZED;
}

static int end(int code) {
    pthread_mutex_unlock(&guard);
    return code;
}

static void lock_table(void) {
    char path[4096];
    map_allocations(1);
    snprintf(path, sizeof path, "%s.allocations", getenv("PYTEST_VRAM_FAKE_NVML"));
    table = open(path, O_RDWR | O_CLOEXEC);
    while (table >= 0 && flock(table, LOCK_EX) && errno == EINTR) {}
}

static void unlock_table(void) {
    if (table >= 0) close(table);
    table = -1;
}

/* This process's row of a device; NULL where the table is full or cannot be had. */
static Allocation *row(Place place) {
    Allocation *empty = NULL;
    u64 born = born_of(getpid());
    for (int i = 0; allocations && i < ALLOCATIONS; i++) {
        Allocation *one = &allocations[i];
        if (one->pid == getpid() && one->born == born && one->card == place.card && one->slice == place.slice) return one;
        if (!empty && (!one->pid || born_of(one->pid) != one->born)) empty = one;
    }
    if (empty) *empty = (Allocation){getpid(), place.card, place.slice, born, 0};
    return empty;
}

static u64 left(Place place) {
    Slot *slot = slot_of(place);
    u64 taken = slot->reserved + in_use(place.card, place.slice, now_ns());
    return slot->total > taken ? slot->total - taken : 0;
}

static int take(int device, u64 bytes) {
    Place place = visible[device];
    Slot *card = &S.cards[place.card].slot;
    if (fault_in(card->faults, card->fault_count, "cuda", now_ns())) return UNKNOWN;
    lock_table();
    int code = SUCCESS;
    Allocation *own = row(place);
    if (!own || (bytes > left(place) && !S.cards[place.card].oversubscribes)) code = OUT_OF_MEMORY;
    else own->bytes += bytes;
    unlock_table();
    return code;
}

static void put_back(int device, u64 bytes) {
    lock_table();
    Allocation *own = row(visible[device]);
    if (own) own->bytes -= own->bytes < bytes ? own->bytes : bytes;
    unlock_table();
}

static u64 rounded(u64 bytes) { return (bytes + PIECE - 1) / PIECE * PIECE; }

API cuInit(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&guard);
    if (!load()) return end(NO_DEVICE);
    if (!initialized) choose();
    if (!visible_count) return end(NO_DEVICE);
    initialized = 1;
    return end(SUCCESS);
}
API cuDriverGetVersion(int *version) {
    pthread_mutex_lock(&guard);
    *version = load() ? S.cuda : 0;
    return end(SUCCESS);
}
API cuDeviceGetCount(int *count) {
    int code = begin();
    if (code) return code;
    *count = visible_count;
    return end(SUCCESS);
}
API cuDeviceGet(int *device, int ordinal) {
    int code = begin();
    if (code) return code;
    if (ordinal < 0 || ordinal >= visible_count) return end(INVALID_DEVICE);
    *device = ordinal;
    return end(SUCCESS);
}
static int begin_at(int device) {
    int code = begin();
    if (code) return code;
    return device < 0 || device >= visible_count ? end(INVALID_DEVICE) : SUCCESS;
}
API cuDeviceGetName(char *to, int room, int device) {
    int code = begin_at(device);
    if (code) return code;
    snprintf(to, (size_t)room, "%s", slot_of(visible[device])->name);
    return end(SUCCESS);
}
API cuDeviceGetUuid_v2(unsigned char to[16], int device) {
    int code = begin_at(device);
    if (code) return code;
    memset(to, 0, 16);
    int digits = 0;
    for (const char *c = slot_of(visible[device])->uuid + 4; *c && digits < 32; c++) {
        if (!isxdigit((unsigned char)*c)) continue;
        int value = isdigit((unsigned char)*c) ? *c - '0' : tolower((unsigned char)*c) - 'a' + 10;
        to[digits / 2] |= (unsigned char)(digits % 2 ? value : value << 4);
        digits++;
    }
    return end(SUCCESS);
}
API cuDeviceGetUuid(unsigned char to[16], int device) { return cuDeviceGetUuid_v2(to, device); }
API cuDeviceTotalMem_v2(size_t *bytes, int device) {
    int code = begin_at(device);
    if (code) return code;
    *bytes = slot_of(visible[device])->total;
    return end(SUCCESS);
}

/* ------------------------------------------------------------------ contexts */

API cuDevicePrimaryCtxRetain(void **context, int device) {
    int code = begin_at(device);
    if (code) return code;
    if (!retained[device]) code = take(device, S.cards[visible[device].card].context);
    if (code) return end(code);
    retained[device]++;
    Context *made = calloc(1, sizeof *made);
    made->device = device;
    *context = made;
    return end(SUCCESS);
}
API cuDevicePrimaryCtxRelease_v2(int device) {
    int code = begin_at(device);
    if (code) return code;
    if (!retained[device]) return end(INVALID_CONTEXT);
    if (!--retained[device]) put_back(device, S.cards[visible[device].card].context);
    return end(SUCCESS);
}
API cuDevicePrimaryCtxRelease(int device) { return cuDevicePrimaryCtxRelease_v2(device); }
API cuCtxCreate_v2(void **context, unsigned flags, int device) {
    (void)flags;
    int code = begin_at(device);
    if (code) return code;
    u64 bytes = S.cards[visible[device].card].context;
    code = take(device, bytes);
    if (code) return end(code);
    Context *made = calloc(1, sizeof *made);
    *made = (Context){device, 1, bytes};
    *context = made;
    current = device;
    return end(SUCCESS);
}
API cuCtxDestroy_v2(void *context) {
    Context *own = context;
    int code = begin();
    if (code) return code;
    if (!own || !own->own) return end(INVALID_CONTEXT);
    put_back(own->device, own->charged);
    if (current == own->device) current = -1;
    free(own);
    return end(SUCCESS);
}
API cuCtxSetCurrent(void *context) {
    int code = begin();
    if (code) return code;
    current = context ? ((Context *)context)->device : -1;
    return end(SUCCESS);
}
API cuCtxGetDevice(int *device) {
    int code = begin();
    if (code) return code;
    if (current < 0) return end(INVALID_CONTEXT);
    *device = current;
    return end(SUCCESS);
}
API cuCtxSynchronize(void) { return SUCCESS; }

/* ------------------------------------------------------------------ memory */

API cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    int code = begin();
    if (code) return code;
    if (current < 0) return end(INVALID_CONTEXT);
    *free_bytes = left(visible[current]);
    *total = slot_of(visible[current])->total;
    return end(SUCCESS);
}
API cuMemAlloc_v2(u64 *pointer, size_t bytes) {
    int code = begin();
    if (code) return code;
    if (current < 0) return end(INVALID_CONTEXT);
    if (!bytes) return end(INVALID_VALUE);
    for (int i = 0; i < POINTERS; i++) {
        if (pointers[i].bytes) continue;
        code = take(current, rounded(bytes));
        if (code) return end(code);
        pointers[i].device = current;
        pointers[i].bytes = rounded(bytes);
        *pointer = 0x700000000000ULL + (u64)i * PIECE;
        return end(SUCCESS);
    }
    return end(OUT_OF_MEMORY);
}
API cuMemFree_v2(u64 pointer) {
    int code = begin();
    if (code) return code;
    u64 i = (pointer - 0x700000000000ULL) / PIECE;
    if (pointer < 0x700000000000ULL || i >= POINTERS || !pointers[i].bytes) return end(INVALID_VALUE);
    put_back(pointers[i].device, pointers[i].bytes);
    pointers[i].bytes = 0;
    return end(SUCCESS);
}

/* ------------------------------------------------------------------ words */

API cuGetErrorName(int code, const char **name) {
    switch (code) {
    case SUCCESS: *name = "CUDA_SUCCESS"; break;
    case INVALID_VALUE: *name = "CUDA_ERROR_INVALID_VALUE"; break;
    case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
    case NOT_INITIALIZED: *name = "CUDA_ERROR_NOT_INITIALIZED"; break;
    case NO_DEVICE: *name = "CUDA_ERROR_NO_DEVICE"; break;
    case INVALID_DEVICE: *name = "CUDA_ERROR_INVALID_DEVICE"; break;
    case INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
    case UNKNOWN: *name = "CUDA_ERROR_UNKNOWN"; break;
    default: *name = NULL; return INVALID_VALUE;
    }
    return SUCCESS;
}
API cuGetErrorString(int code, const char **text) { return cuGetErrorName(code, text); }
