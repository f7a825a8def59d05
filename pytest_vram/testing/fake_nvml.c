/* A fake of NVIDIA's libnvidia-ml.so.1, for the real bindings: see fake_state.h for where its figures come from.

   DRIVER is the major version of the driver that is played; entry points that came later are not there. */
#include "fake_state.h"

#ifndef DRIVER
#define DRIVER 550
#endif

enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    DRIVER_NOT_LOADED = 9, VERSION_MISMATCH = 25
};

#define API __attribute__((visibility("default"))) int

typedef struct { u64 total, free, used; } Memory;
typedef struct { unsigned version; u64 total, reserved, free, used; } MemoryV2;
typedef struct { unsigned pid; u64 used; } ProcessV1;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; } ProcessV2;
typedef struct { unsigned pid; u64 used; unsigned gpu_instance, compute_instance; u64 protected_used; } Detail;
typedef struct { unsigned version, mode, count; Detail *array; } DetailList;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;
typedef struct {
    unsigned gpu_utilization, memory_utilization;
    u64 most, time, start;
    unsigned running, reserved[5];
} Stats;
typedef struct {
    unsigned pid, running, gpu_utilization, memory_utilization;
    u64 most;
    unsigned samples;
    u64 gpu_sum, memory_sum, time, start;
} StatsV2;
typedef struct { unsigned counts[6], gpu_slices, compute_slices; u64 memory_mb; } Attributes;

static int initialized, refused;
/* One byte per card, and per slice of it: its address is the handle. */
static char handles[CARDS * (SLICES + 1)];

typedef struct { int card, slice; Card *c; Slot *slot; u64 now; } Asked;

static void rest_for(u64 ns) {
    struct timespec t = {(time_t)(ns / 1000000000ULL), (long)(ns % 1000000000ULL)};
    while (nanosleep(&t, &t) && errno == EINTR) {}
}

/* Faults of this entry; the lock is held. A call that hangs does so without it, and is let through afterwards. */
static int trip(const Fault *fault) {
    if (!fault) return SUCCESS;
    int code = fault->code;
    u64 hang = fault->hang;
    if (hang) {
        pthread_mutex_unlock(&guard);
        rest_for(hang);
        pthread_mutex_lock(&guard);
        load();
    }
    return code;
}

/* Begin a call about the driver as a whole; on success the lock is held. */
static int begin(const char *on) {
    pthread_mutex_lock(&guard);
    int code = !load() ? DRIVER_NOT_LOADED : !initialized ? UNINITIALIZED : SUCCESS;
    if (code == SUCCESS) code = trip(fault_in(S.faults, S.fault_count, on, now_ns()));
    if (code != SUCCESS) pthread_mutex_unlock(&guard);
    return code;
}

/* Begin a call about a card or slice; on success the lock is held. */
static int begin_at(void *handle, const char *on, Asked *asked) {
    int code = begin(on);
    if (code != SUCCESS) return code;
    long place = (char *)handle - handles;
    int card = (int)(place / (SLICES + 1)), slice = (int)(place % (SLICES + 1)) - 1;
    if (place < 0 || place >= (long)sizeof handles || card >= S.card_count || slice >= S.cards[card].slice_count) {
        pthread_mutex_unlock(&guard);
        return INVALID_ARGUMENT;
    }
    u64 now = now_ns();
    Card *c = &S.cards[card];
    /* A card that is lost takes its slices along. */
    const Fault *fault = fault_in(c->slot.faults, c->slot.fault_count, slice < 0 ? on : "all", now);
    if (!fault && slice >= 0) fault = fault_in(c->slices[slice].faults, c->slices[slice].fault_count, on, now);
    code = trip(fault);
    if (code != SUCCESS || card >= S.card_count) {
        pthread_mutex_unlock(&guard);
        return code ? code : INVALID_ARGUMENT;
    }
    asked->card = card;
    asked->slice = slice;
    asked->c = &S.cards[card];
    asked->slot = slice < 0 ? &asked->c->slot : &asked->c->slices[slice];
    asked->now = now_ns();
    return SUCCESS;
}

static int end(int code) {
    pthread_mutex_unlock(&guard);
    return code;
}

static int give(char *to, unsigned room, const char *text) {
    if (strlen(text) >= room) return INSUFFICIENT_SIZE;
    strcpy(to, text);
    return SUCCESS;
}

static void *handle_of(int card, int slice) { return &handles[card * (SLICES + 1) + slice + 1]; }

/* ------------------------------------------------------------------ the driver */

API nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&guard);
    if (!load()) return end(DRIVER_NOT_LOADED);
    int code = trip(fault_in(S.faults, S.fault_count, "init", now_ns()));
    if (code == SUCCESS) initialized++;
    return end(code);
}
API nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
API nvmlShutdown(void) {
    pthread_mutex_lock(&guard);
    if (!initialized) return end(UNINITIALIZED);
    initialized--;
    return end(SUCCESS);
}

__attribute__((visibility("default"))) const char *nvmlErrorString(int code) {
    switch (code) {
    case 0: return "Success";
    case 1: return "Uninitialized";
    case 2: return "Invalid Argument";
    case 3: return "Not Supported";
    case 4: return "Insufficient Permissions";
    case 6: return "Not Found";
    case 7: return "Insufficient Size";
    case 9: return "Driver Not Loaded";
    case 10: return "Timeout";
    case 13: return "Function Not Found";
    case 15: return "GPU is lost";
    case 16: return "GPU requires reset";
    case 18: return "Driver/library version mismatch";
    case 25: return "Argument version mismatch";
    default: return "Unknown Error";
    }
}

API nvmlSystemGetDriverVersion(char *to, unsigned room) {
    int code = begin("driver");
    return code ? code : end(give(to, room, S.driver));
}
API nvmlSystemGetNVMLVersion(char *to, unsigned room) {
    int code = begin("driver");
    return code ? code : end(give(to, room, S.nvml));
}
API nvmlSystemGetCudaDriverVersion(int *version) {
    int code = begin("driver");
    if (code) return code;
    *version = S.cuda;
    return end(SUCCESS);
}
API nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

API nvmlDeviceGetCount_v2(unsigned *count) {
    int code = begin("count");
    if (code) return code;
    *count = (unsigned)S.card_count;
    return end(SUCCESS);
}

/* ------------------------------------------------------------------ handles and names */

API nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    int code = begin("handle");
    if (code) return code;
    int known = index < (unsigned)S.card_count;
    end(SUCCESS);
    if (!known) return INVALID_ARGUMENT;
    Asked asked;
    *device = handle_of((int)index, -1);
    code = begin_at(*device, "handle", &asked);
    return code ? code : end(SUCCESS);
}

API nvmlDeviceGetHandleByUUID(const char *uuid, void **device) {
    int code = begin("handle");
    if (code) return code;
    *device = NULL;
    for (int i = 0; i < S.card_count; i++) {
        if (!strcmp(S.cards[i].slot.uuid, uuid)) *device = handle_of(i, -1);
        for (int k = 0; k < S.cards[i].slice_count; k++)
            if (!strcmp(S.cards[i].slices[k].uuid, uuid)) *device = handle_of(i, k);
    }
    end(SUCCESS);
    if (!*device) return NOT_FOUND;
    Asked asked;
    code = begin_at(*device, "handle", &asked);
    return code ? code : end(SUCCESS);
}

static int place_of(const char *pci, unsigned place[4]) {
    return sscanf(pci, "%x:%x:%x.%x", &place[0], &place[1], &place[2], &place[3]) == 4;
}

API nvmlDeviceGetHandleByPciBusId_v2(const char *pci, void **device) {
    unsigned wanted[4], place[4];
    int code = begin("handle");
    if (code) return code;
    *device = NULL;
    if (!place_of(pci, wanted)) return end(INVALID_ARGUMENT);
    for (int i = 0; i < S.card_count; i++)
        if (place_of(S.cards[i].pci, place) && !memcmp(place, wanted, sizeof place)) *device = handle_of(i, -1);
    return end(*device ? SUCCESS : NOT_FOUND);
}

API nvmlDeviceGetName(void *device, char *to, unsigned room) {
    Asked asked;
    int code = begin_at(device, "name", &asked);
    return code ? code : end(give(to, room, asked.slot->name));
}
API nvmlDeviceGetUUID(void *device, char *to, unsigned room) {
    Asked asked;
    int code = begin_at(device, "uuid", &asked);
    return code ? code : end(give(to, room, asked.slot->uuid));
}
API nvmlDeviceGetIndex(void *device, unsigned *index) {
    Asked asked;
    int code = begin_at(device, "index", &asked);
    if (code) return code;
    *index = (unsigned)(asked.slice < 0 ? asked.card : asked.slice);
    return end(SUCCESS);
}
API nvmlDeviceGetMinorNumber(void *device, unsigned *minor) {
    Asked asked;
    int code = begin_at(device, "index", &asked);
    if (code) return code;
    if (asked.slice >= 0) return end(NOT_SUPPORTED);
    *minor = asked.c->minor;
    return end(SUCCESS);
}
API nvmlDeviceGetPciInfo_v3(void *device, Pci *info) {
    Asked asked;
    unsigned place[4] = {0, 0, 0, 0};
    int code = begin_at(device, "pci", &asked);
    if (code) return code;
    memset(info, 0, sizeof *info);
    place_of(asked.c->pci, place);
    snprintf(info->legacy, sizeof info->legacy, "%04x:%02x:%02x.%x", place[0] & 0xFFFF, place[1] & 0xFF, place[2] & 0xFF,
             place[3] & 0xF);
    snprintf(info->bus_id, sizeof info->bus_id, "%08x:%02x:%02x.%x", place[0], place[1] & 0xFF, place[2] & 0xFF,
             place[3] & 0xF);
    info->domain = place[0];
    info->bus = place[1];
    info->device = place[2];
    info->id = 0x250710DEu;
    return end(SUCCESS);
}

/* ------------------------------------------------------------------ memory */

API nvmlDeviceGetMemoryInfo(void *device, Memory *memory) {
    Asked asked;
    int code = begin_at(device, "memory", &asked);
    if (code) return code;
    memory->total = asked.slot->total;
    memory->used = in_use(asked.card, asked.slice, asked.now) + asked.slot->reserved;
    memory->free = memory->total > memory->used ? memory->total - memory->used : 0;
    return end(SUCCESS);
}

#if DRIVER >= 510
API nvmlDeviceGetMemoryInfo_v2(void *device, MemoryV2 *memory) {
    Asked asked;
    if (memory->version != 0x02000028u) return VERSION_MISMATCH;
    int code = begin_at(device, "memory", &asked);
    if (code) return code;
    memory->total = asked.slot->total;
    memory->reserved = asked.slot->reserved;
    memory->used = in_use(asked.card, asked.slice, asked.now);
    u64 taken = memory->used + memory->reserved;
    memory->free = memory->total > taken ? memory->total - taken : 0;
    return end(SUCCESS);
}
#endif

API nvmlDeviceGetBAR1MemoryInfo(void *device, Memory *memory) {
    Asked asked;
    int code = begin_at(device, "bar1", &asked);
    if (code) return code;
    memory->total = memory->free = 256ULL << 20;
    memory->used = 0;
    return end(SUCCESS);
}

/* ------------------------------------------------------------------ who holds it */

static int collect(Asked *asked, int kind, ProcessV2 *to, int room) {
    int count = 0;
    for (int i = 0; i < S.process_count && count < room; i++) {
        Process *p = &S.processes[i];
        if (p->card != asked->card || !(p->kind & kind) || (asked->slice >= 0 && p->slice != asked->slice)) continue;
        int pid = holder(p, asked->now);
        if (!pid) continue;
        Slot *slot = p->slice >= 0 && p->slice < asked->c->slice_count ? &asked->c->slices[p->slice] : &asked->c->slot;
        to[count++] = (ProcessV2){(unsigned)pid + asked->c->pid_offset, listed(p, asked->now), slot->gpu_instance,
                                  slot->compute_instance};
    }
    map_allocations(0);
    for (int i = 0; allocations && (kind & COMPUTE) && i < ALLOCATIONS && count < room; i++) {
        Allocation *one = &allocations[i];
        if (!counts(one, asked->card, asked->slice)) continue;
        Slot *slot = one->slice >= 0 && one->slice < asked->c->slice_count ? &asked->c->slices[one->slice] : &asked->c->slot;
        to[count++] = (ProcessV2){(unsigned)one->pid + asked->c->pid_offset, one->bytes, slot->gpu_instance,
                                  slot->compute_instance};
    }
    return count;
}

/* Whether the answer does not fit, also where the card plays a list that grows between two calls. */
static int too_small(Asked *asked, unsigned *room, int count, const void *to) {
    int grows = to && count && asked->c->insufficient && refused < asked->c->insufficient;
    if (grows) refused++;
    else if (to) refused = 0;
    if (!grows && (int)*room >= count && (to || !count)) {
        *room = (unsigned)count;
        return 0;
    }
    *room = (unsigned)count + (grows ? *room : 0);
    return 1;
}

static int processes_v2(void *device, int kind, unsigned *room, ProcessV2 *to) {
    Asked asked;
    ProcessV2 found[PROCESSES];
    int code = begin_at(device, "processes", &asked);
    if (code) return code;
    int count = collect(&asked, kind, found, PROCESSES);
    if (too_small(&asked, room, count, to)) return end(INSUFFICIENT_SIZE);
    if (count) memcpy(to, found, (size_t)count * sizeof *to);
    return end(SUCCESS);
}

static int processes_v1(void *device, int kind, unsigned *room, ProcessV1 *to) {
    Asked asked;
    ProcessV2 found[PROCESSES];
    int code = begin_at(device, "processes", &asked);
    if (code) return code;
    int count = collect(&asked, kind, found, PROCESSES);
    if (too_small(&asked, room, count, to)) return end(INSUFFICIENT_SIZE);
    for (int i = 0; i < count; i++) to[i] = (ProcessV1){found[i].pid, found[i].used};
    return end(SUCCESS);
}

#define LISTS(NAME, KIND) \
    API nvmlDeviceGet##NAME##RunningProcesses(void *d, unsigned *n, ProcessV1 *to) { return processes_v1(d, KIND, n, to); }
#define LISTS_V2(NAME, KIND) \
    API nvmlDeviceGet##NAME##RunningProcesses_v2(void *d, unsigned *n, ProcessV2 *to) { return processes_v2(d, KIND, n, to); }
#define LISTS_V3(NAME, KIND) \
    API nvmlDeviceGet##NAME##RunningProcesses_v3(void *d, unsigned *n, ProcessV2 *to) { return processes_v2(d, KIND, n, to); }
LISTS(Compute, COMPUTE)
LISTS(Graphics, GRAPHICS)
LISTS(MPSCompute, MPS)
#if DRIVER >= 450
LISTS_V2(Compute, COMPUTE)
LISTS_V2(Graphics, GRAPHICS)
LISTS_V2(MPSCompute, MPS)
#endif
#if DRIVER >= 510
LISTS_V3(Compute, COMPUTE)
LISTS_V3(Graphics, GRAPHICS)
LISTS_V3(MPSCompute, MPS)
#endif

#if DRIVER >= 535
API nvmlDeviceGetRunningProcessDetailList(void *device, DetailList *list) {
    static const int kinds[] = {COMPUTE, GRAPHICS, MPS, COMPUTE | GRAPHICS | MPS};
    Asked asked;
    ProcessV2 found[PROCESSES];
    if (list->version != 0x1000018u) return VERSION_MISMATCH;
    if (list->mode > 3) return INVALID_ARGUMENT;
    int code = begin_at(device, "processes", &asked);
    if (code) return code;
    int count = collect(&asked, kinds[list->mode], found, PROCESSES);
    if (too_small(&asked, &list->count, count, list->array)) return end(INSUFFICIENT_SIZE);
    for (int i = 0; i < count; i++)
        list->array[i] = (Detail){found[i].pid, found[i].used, found[i].gpu_instance, found[i].compute_instance, 0};
    return end(SUCCESS);
}
#endif

/* ------------------------------------------------------------------ accounting */

/* Accounting is not there on a card that is cut up, nor for slices. */
static int begin_accounting(void *device, Asked *asked) {
    int code = begin_at(device, "accounting", asked);
    if (code) return code;
    return asked->slice >= 0 || asked->c->slice_count ? end(NOT_SUPPORTED) : SUCCESS;
}

API nvmlDeviceGetAccountingMode(void *device, unsigned *mode) {
    Asked asked;
    int code = begin_accounting(device, &asked);
    if (code) return code;
    *mode = (unsigned)asked.c->accounting;
    return end(SUCCESS);
}
API nvmlDeviceGetAccountingBufferSize(void *device, unsigned *size) {
    Asked asked;
    int code = begin_accounting(device, &asked);
    if (code) return code;
    *size = 4000;
    return end(SUCCESS);
}

static int accounted(Asked *asked, unsigned pid, StatsV2 *stats) {
    int known = 0;
    memset(stats, 0, sizeof *stats);
    stats->pid = pid;
    for (int i = 0; i < S.process_count; i++) {
        Process *p = &S.processes[i];
        if (p->card != asked->card) continue;
        int running = holder(p, asked->now), its = running ? running : p->pid ? p->pid : p->last;
        if (!its || (unsigned)its + asked->c->pid_offset != pid) continue;
        known = 1;
        stats->running |= running != 0;
        stats->start = p->began;
        stats->most += most(p, asked->now);
        if (p->not_available) stats->most = NOT_AVAILABLE;
    }
    return known;
}

API nvmlDeviceGetAccountingPids(void *device, unsigned *room, unsigned *to) {
    Asked asked;
    int code = begin_accounting(device, &asked);
    if (code) return code;
    if (!asked.c->accounting) return end(NOT_SUPPORTED);
    unsigned found[PROCESSES], count = 0;
    for (int i = 0; i < S.process_count; i++) {
        Process *p = &S.processes[i];
        int pid = p->card == asked.card ? holder(p, asked.now) : 0;
        if (p->card == asked.card && !pid) pid = p->pid ? p->pid : p->last;
        unsigned shown = (unsigned)pid + asked.c->pid_offset, known = 0;
        for (unsigned k = 0; k < count; k++) known |= found[k] == shown;
        if (pid && !known) found[count++] = shown;
    }
    if (*room < count) {
        *room = count;
        return end(INSUFFICIENT_SIZE);
    }
    *room = count;
    if (count) memcpy(to, found, count * sizeof *to);
    return end(SUCCESS);
}
API nvmlDeviceGetAccountingStats(void *device, unsigned pid, Stats *stats) {
    Asked asked;
    StatsV2 all;
    int code = begin_accounting(device, &asked);
    if (code) return code;
    if (!asked.c->accounting) return end(NOT_SUPPORTED);
    if (!accounted(&asked, pid, &all)) return end(NOT_FOUND);
    memset(stats, 0, sizeof *stats);
    stats->most = all.most;
    stats->running = all.running;
    stats->start = all.start;
    return end(SUCCESS);
}
#if DRIVER >= 580
API nvmlDeviceGetAccountingStats_v2(void *device, StatsV2 *stats) {
    Asked asked;
    int code = begin_accounting(device, &asked);
    if (code) return code;
    if (!asked.c->accounting) return end(NOT_SUPPORTED);
    return end(accounted(&asked, stats->pid, stats) ? SUCCESS : NOT_FOUND);
}
#endif

/* ------------------------------------------------------------------ MIG */

#if DRIVER >= 450
API nvmlDeviceGetMigMode(void *device, unsigned *current, unsigned *pending) {
    Asked asked;
    int code = begin_at(device, "mig", &asked);
    if (code) return code;
    if (asked.slice >= 0) return end(NOT_SUPPORTED);
    *current = *pending = asked.c->slice_count > 0;
    return end(SUCCESS);
}
API nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    Asked asked;
    int code = begin_at(device, "mig", &asked);
    if (code) return code;
    *count = asked.c->slice_count ? SLICES : 0;
    return end(SUCCESS);
}
API nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **slice) {
    Asked asked;
    int code = begin_at(device, "mig", &asked);
    if (code) return code;
    if (index >= (unsigned)asked.c->slice_count) return end(NOT_FOUND);
    *slice = handle_of(asked.card, (int)index);
    return end(SUCCESS);
}
API nvmlDeviceGetDeviceHandleFromMigDeviceHandle(void *device, void **card) {
    Asked asked;
    int code = begin_at(device, "mig", &asked);
    if (code) return code;
    if (asked.slice < 0) return end(INVALID_ARGUMENT);
    *card = handle_of(asked.card, -1);
    return end(SUCCESS);
}
API nvmlDeviceIsMigDeviceHandle(void *device, unsigned *is) {
    Asked asked;
    int code = begin_at(device, "mig", &asked);
    if (code) return code;
    *is = asked.slice >= 0;
    return end(SUCCESS);
}
static int instance(void *device, unsigned *id, int compute) {
    Asked asked;
    int code = begin_at(device, "mig", &asked);
    if (code) return code;
    if (asked.slice < 0) return end(NOT_SUPPORTED);
    *id = compute ? asked.slot->compute_instance : asked.slot->gpu_instance;
    return end(SUCCESS);
}
API nvmlDeviceGetGpuInstanceId(void *device, unsigned *id) { return instance(device, id, 0); }
API nvmlDeviceGetComputeInstanceId(void *device, unsigned *id) { return instance(device, id, 1); }
API nvmlDeviceGetAttributes_v2(void *device, Attributes *attributes) {
    Asked asked;
    int code = begin_at(device, "mig", &asked);
    if (code) return code;
    if (asked.slice < 0) return end(NOT_SUPPORTED);
    memset(attributes, 0, sizeof *attributes);
    attributes->gpu_slices = attributes->compute_slices = 1;
    attributes->memory_mb = asked.slot->total >> 20;
    return end(SUCCESS);
}
#endif

/* ------------------------------------------------------------------ the rest that monitors ask for */

API nvmlDeviceGetUtilizationRates(void *device, unsigned to[2]) {
    Asked asked;
    int code = begin_at(device, "utilization", &asked);
    if (code) return code;
    if (asked.slice >= 0) return end(NOT_SUPPORTED);
    to[0] = asked.c->gpu_utilization;
    to[1] = asked.c->memory_utilization;
    return end(SUCCESS);
}
#if DRIVER >= 535
API nvmlDeviceGetAddressingMode(void *device, unsigned to[2]) {
    Asked asked;
    int code = begin_at(device, "addressing", &asked);
    if (code) return code;
    to[1] = asked.c->addressing;
    return end(SUCCESS);
}
#endif
API nvmlDeviceGetComputeMode(void *device, unsigned *mode) {
    Asked asked;
    int code = begin_at(device, "mode", &asked);
    if (code) return code;
    *mode = 0;
    return end(SUCCESS);
}
API nvmlDeviceGetPersistenceMode(void *device, unsigned *mode) { return nvmlDeviceGetComputeMode(device, mode); }
API nvmlDeviceGetCudaComputeCapability(void *device, int *major, int *minor) {
    Asked asked;
    int code = begin_at(device, "mode", &asked);
    if (code) return code;
    *major = 8;
    *minor = 6;
    return end(SUCCESS);
}

#define UNSUPPORTED(NAME) API NAME(void) { return NOT_SUPPORTED; }
UNSUPPORTED(nvmlDeviceGetProcessUtilization)
UNSUPPORTED(nvmlDeviceGetTemperature)
UNSUPPORTED(nvmlDeviceGetPowerUsage)
UNSUPPORTED(nvmlDeviceGetEnforcedPowerLimit)
UNSUPPORTED(nvmlDeviceGetPowerManagementLimit)
UNSUPPORTED(nvmlDeviceGetTotalEnergyConsumption)
UNSUPPORTED(nvmlDeviceGetFanSpeed)
UNSUPPORTED(nvmlDeviceGetClockInfo)
UNSUPPORTED(nvmlDeviceGetMaxClockInfo)
UNSUPPORTED(nvmlDeviceGetPerformanceState)
UNSUPPORTED(nvmlDeviceGetPcieThroughput)
UNSUPPORTED(nvmlDeviceGetEncoderUtilization)
UNSUPPORTED(nvmlDeviceGetDecoderUtilization)
UNSUPPORTED(nvmlDeviceGetDisplayActive)
UNSUPPORTED(nvmlDeviceGetDisplayMode)
UNSUPPORTED(nvmlDeviceGetCurrentDriverModel)
UNSUPPORTED(nvmlDeviceGetDriverModel_v2)
UNSUPPORTED(nvmlDeviceGetTotalEccErrors)
UNSUPPORTED(nvmlDeviceGetSerial)
