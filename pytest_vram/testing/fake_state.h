/* The cards of a fake NVIDIA driver: what the state file says, and what processes hold by it at this moment.

   The file is named by the environment variable PYTEST_VRAM_FAKE_NVML and read anew whenever it was replaced. One thing
   a line, fields by tabs; pytest_vram/testing/fake_nvml.py writes it and knows the order. Times are nanoseconds of
   CLOCK_MONOTONIC. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long u64;

#define NOT_AVAILABLE (~0ULL)
#define CARDS 16
#define SLICES 8
#define FAULTS 16
#define PROCESSES 256
#define ALLOCATIONS 256
/* A process that has not come yet is looked for this often at most. */
#define LOOK_AGAIN_NS 5000000ULL

enum { COMPUTE = 1, GRAPHICS = 2, MPS = 4 };
enum { CONSTANT, SCRIPT, MEMORY };

typedef struct {
    char on[24];
    int code;
    u64 from, hang;
} Fault;

typedef struct {
    char uuid[96], name[96];
    u64 total, reserved, hidden;
    unsigned gpu_instance, compute_instance;
    int fault_count;
    Fault faults[FAULTS];
} Slot;

typedef struct {
    Slot slot;
    char pci[32];
    unsigned minor, gpu_utilization, memory_utilization, addressing;
    int accounting, oversubscribes, insufficient;
    unsigned pid_offset;
    u64 context, frozen_from;
    int slice_count;
    Slot slices[SLICES];
} Card;

typedef struct {
    int card, slice, kind, pid, not_available, source;
    u64 born, ends, began, peaked;
    char *command;
    u64 bytes;                /* CONSTANT */
    u64 start, period;        /* SCRIPT */
    int steps;
    u64 *at, *value, *most;
    int memory_of;            /* MEMORY */
    u64 base;
    /* what this process has learnt */
    int life, life_is_pidfd, status_fd, found, last;
    u64 looked, frozen, kept;
    int is_frozen;
} Process;

/* What programs took through the fake CUDA driver, shared by all processes. */
typedef struct {
    int pid, card, slice;
    u64 born, bytes;
} Allocation;

static struct {
    char driver[80], nvml[80];
    int cuda;
    int card_count, process_count, fault_count;
    Card cards[CARDS];
    Process processes[PROCESSES];
    Fault faults[FAULTS];
    char *text;
    struct stat seen;
    int loaded;
} S;

static pthread_mutex_t guard = PTHREAD_MUTEX_INITIALIZER;
static Allocation *allocations;

static u64 now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (u64)t.tv_sec * 1000000000ULL + (u64)t.tv_nsec;
}

static void copy(char *to, size_t room, const char *from) { snprintf(to, room, "%s", from ? from : ""); }

static u64 number(char **rest) {
    char *field = strsep(rest, "\t");
    return field ? strtoull(field, NULL, 10) : 0;
}

static const char *word(char **rest) {
    char *field = strsep(rest, "\t");
    return field ? field : "";
}

static void forget(void) {
    for (int i = 0; i < S.process_count; i++) {
        Process *p = &S.processes[i];
        free(p->at);
        free(p->value);
        free(p->most);
        if (p->life >= 0) close(p->life);
        if (p->status_fd >= 0) close(p->status_fd);
    }
    free(S.text);
    memset(&S, 0, sizeof S);
}

static void read_steps(Process *p, char *text) {
    int room = 1;
    for (char *c = text; *c; c++) room += *c == ' ';
    p->at = calloc(room, sizeof(u64));
    p->value = calloc(room, sizeof(u64));
    p->most = calloc(room, sizeof(u64));
    u64 most = 0;
    for (char *step; (step = strsep(&text, " "));) {
        char *value = strchr(step, ':');
        if (!value) continue;
        p->at[p->steps] = strtoull(step, NULL, 10);
        p->value[p->steps] = strtoull(value + 1, NULL, 10);
        if (p->value[p->steps] > most) most = p->value[p->steps];
        p->most[p->steps++] = most;
    }
}

static void read_line(char *line) {
    Card *card = S.card_count ? &S.cards[S.card_count - 1] : NULL;
    char *rest = line;
    const char *what = word(&rest);
    if (!strcmp(what, "driver")) {
        copy(S.driver, sizeof S.driver, word(&rest));
        copy(S.nvml, sizeof S.nvml, word(&rest));
        S.cuda = (int)number(&rest);
    } else if (!strcmp(what, "card") && S.card_count < CARDS) {
        card = &S.cards[S.card_count++];
        copy(card->slot.uuid, sizeof card->slot.uuid, word(&rest));
        copy(card->slot.name, sizeof card->slot.name, word(&rest));
        copy(card->pci, sizeof card->pci, word(&rest));
        card->minor = (unsigned)number(&rest);
        card->slot.total = number(&rest);
        card->slot.reserved = number(&rest);
        card->slot.hidden = number(&rest);
        card->context = number(&rest);
        card->accounting = (int)number(&rest);
        card->oversubscribes = (int)number(&rest);
        card->addressing = (unsigned)number(&rest);
        card->pid_offset = (unsigned)number(&rest);
        card->insufficient = (int)number(&rest);
        card->frozen_from = number(&rest);
        card->gpu_utilization = (unsigned)number(&rest);
        card->memory_utilization = (unsigned)number(&rest);
        card->slot.gpu_instance = card->slot.compute_instance = 0xFFFFFFFFu;
    } else if (!strcmp(what, "slice") && card && card->slice_count < SLICES) {
        Slot *slice = &card->slices[card->slice_count++];
        copy(slice->uuid, sizeof slice->uuid, word(&rest));
        copy(slice->name, sizeof slice->name, word(&rest));
        slice->gpu_instance = (unsigned)number(&rest);
        slice->compute_instance = (unsigned)number(&rest);
        slice->total = number(&rest);
        slice->reserved = number(&rest);
        slice->hidden = number(&rest);
    } else if (!strcmp(what, "fault")) {
        Slot *slot = !card ? NULL : card->slice_count ? &card->slices[card->slice_count - 1] : &card->slot;
        int *count = slot ? &slot->fault_count : &S.fault_count;
        if (*count == FAULTS) return;
        Fault *fault = slot ? &slot->faults[(*count)++] : &S.faults[(*count)++];
        copy(fault->on, sizeof fault->on, word(&rest));
        fault->code = (int)number(&rest);
        fault->from = number(&rest);
        fault->hang = number(&rest);
    } else if (!strcmp(what, "process") && card && S.process_count < PROCESSES) {
        Process *p = &S.processes[S.process_count++];
        p->card = S.card_count - 1;
        p->life = p->status_fd = -1;
        p->slice = atoi(word(&rest));
        p->kind = (int)number(&rest);
        p->pid = (int)number(&rest);
        p->born = number(&rest);
        p->ends = number(&rest);
        p->began = number(&rest);
        p->peaked = number(&rest);
        p->not_available = (int)number(&rest);
        p->command = (char *)word(&rest);
        const char *source = word(&rest);
        if (!strcmp(source, "script")) {
            p->source = SCRIPT;
            p->start = number(&rest);
            p->period = number(&rest);
            read_steps(p, rest ? rest : (char *)"");
        } else if (!strcmp(source, "memory")) {
            p->source = MEMORY;
            p->memory_of = (int)number(&rest);
            p->base = number(&rest);
        } else {
            p->source = CONSTANT;
            p->bytes = number(&rest);
        }
    }
}

/* Read the state where it was replaced. 0 where there is none. */
static int load(void) {
    const char *path = getenv("PYTEST_VRAM_FAKE_NVML");
    struct stat now;
    if (!path || stat(path, &now)) {
        forget();
        return 0;
    }
    if (S.loaded && now.st_ino == S.seen.st_ino && now.st_size == S.seen.st_size &&
        now.st_mtim.tv_sec == S.seen.st_mtim.tv_sec && now.st_mtim.tv_nsec == S.seen.st_mtim.tv_nsec)
        return 1;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return S.loaded;
    char *text = NULL;
    /* The status of what is read, for the name may be another file's by now. */
    if (!fstat(fd, &now) && (text = malloc((size_t)now.st_size + 1))) {
        off_t length = 0;
        for (ssize_t got; (got = read(fd, text + length, (size_t)(now.st_size - length))) > 0;) length += got;
        text[length] = 0;
    }
    close(fd);
    if (!text) return S.loaded;
    forget();
    S.text = text;
    S.seen = now;
    S.loaded = 1;
    for (char *line; (line = strsep(&text, "\n"));)
        if (*line) read_line(line);
    return 1;
}

static const Fault *fault_in(const Fault *faults, int count, const char *on, u64 now) {
    for (int i = 0; i < count; i++)
        if ((!strcmp(faults[i].on, on) || !strcmp(faults[i].on, "all")) && now >= faults[i].from) return &faults[i];
    return NULL;
}

/* ------------------------------------------------------------------ processes */

static int open_of(int pid, const char *file) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", pid, file);
    return open(path, O_RDONLY | O_CLOEXEC);
}

/* Start time of the process behind a descriptor of its stat file; 0 where it has ended. */
static u64 born_by(int fd) {
    char text[1024];
    ssize_t got = fd < 0 ? -1 : pread(fd, text, sizeof text - 1, 0);
    if (got <= 0) return 0;
    text[got] = 0;
    char *c = strrchr(text, ')');
    if (!c || c[2] == 'Z' || c[2] == 'X') return 0;
    c += 2;
    for (int field = 3; field < 22 && c; field++) {
        c = strchr(c, ' ');
        if (c) c++;
    }
    return c ? strtoull(c, NULL, 10) : 0;
}

static u64 born_of(int pid) {
    int fd = open_of(pid, "stat");
    u64 born = born_by(fd);
    if (fd >= 0) close(fd);
    return born;
}

/* The youngest process with these words in its command line; 0 where there is none. */
static int find_process(const char *command) {
    DIR *folder = opendir("/proc");
    if (!folder) return 0;
    int found = 0;
    u64 youngest = 0;
    for (struct dirent *entry; (entry = readdir(folder));) {
        int pid = atoi(entry->d_name);
        if (pid <= 0 || pid == getpid()) continue;
        char line[8192];
        int fd = open_of(pid, "cmdline");
        ssize_t got = fd < 0 ? -1 : read(fd, line, sizeof line - 1);
        if (fd >= 0) close(fd);
        if (got <= 0) continue;
        for (ssize_t i = 0; i < got; i++)
            if (!line[i]) line[i] = ' ';
        line[got] = 0;
        if (!strstr(line, command)) continue;
        u64 born = born_of(pid);
        if (born >= youngest && born) {
            youngest = born;
            found = pid;
        }
    }
    closedir(folder);
    return found;
}

/* Watch over the life of a process; 0 where it is not the one that is meant, or has ended.

   A pidfd is asked twenty times as fast as the file, and five processes are asked after by every call. */
static int watch(Process *p, int pid, u64 born) {
    if (p->life < 0) {
        int file = open_of(pid, "stat");
        if (born_by(file) != born || !born) {
            if (file >= 0) close(file);
            return 0;
        }
        p->life = file;
        p->life_is_pidfd = 0;
#ifdef SYS_pidfd_open
        int fd = (int)syscall(SYS_pidfd_open, pid, 0);
        if (fd >= 0 && born_by(file) == born) {
            close(file);
            p->life = fd;
            p->life_is_pidfd = 1;
        } else if (fd >= 0) {
            close(fd);
        }
#endif
    }
    if (!p->life_is_pidfd) return born_by(p->life) == born;
    struct pollfd asked = {p->life, POLLIN, 0};
    return poll(&asked, 1, 0) <= 0;
}

/* PID that holds this memory, 0 where it is not there (yet, or any more). */
static int holder(Process *p, u64 now) {
    if (p->ends && now >= p->ends) return 0;
    if (!p->command[0]) return p->born && !watch(p, p->pid, p->born) ? 0 : p->pid;
    if (p->found && !watch(p, p->found, p->born)) {
        if (p->life >= 0) close(p->life);
        p->life = -1;
        p->found = 0;
        p->looked = 0;
    }
    if (!p->found && (!p->looked || now - p->looked >= LOOK_AGAIN_NS)) {
        p->looked = now;
        p->found = find_process(p->command);
        p->born = p->found ? born_of(p->found) : 0;
        if (!p->born || !watch(p, p->found, p->born)) p->found = 0;
        if (p->found && p->found != p->last) {
            p->last = p->found;
            p->kept = 0;
        }
    }
    return p->found;
}

static int step_at(Process *p, u64 since) {
    int low = 0, high = p->steps;
    while (low < high) {
        int middle = (low + high) / 2;
        if (p->at[middle] <= since) low = middle + 1;
        else high = middle;
    }
    return low - 1;
}

static u64 status_of(Process *p, const char *const *fields) {
    char text[4096];
    if (p->status_fd < 0) p->status_fd = open_of(p->memory_of, "status");
    ssize_t got = p->status_fd < 0 ? -1 : pread(p->status_fd, text, sizeof text - 1, 0);
    if (got <= 0) return 0;
    text[got] = 0;
    u64 sum = 0;
    for (; *fields; fields++) {
        char *line = strstr(text, *fields);
        if (line) sum += strtoull(line + strlen(*fields), NULL, 10) * 1024;
    }
    return sum;
}

static u64 held(Process *p, u64 now) {
    static const char *const anonymous[] = {"RssAnon:", "VmSwap:", NULL};
    if (p->source == CONSTANT) return p->bytes;
    if (p->source == MEMORY) {
        u64 value = status_of(p, anonymous);
        value = value > p->base ? value - p->base : 0;
        if (value > p->kept) p->kept = value;
        return value;
    }
    if (!p->steps || (long long)(now - p->start) < 0) return 0;
    u64 since = now - p->start;
    int step = step_at(p, p->period ? since % p->period : since);
    return step < 0 ? 0 : p->value[step];
}

/* What the driver says that a process holds. */
__attribute__((unused)) static u64 listed(Process *p, u64 now) {
    u64 from = S.cards[p->card].frozen_from;
    if (p->not_available) return NOT_AVAILABLE;
    if (!from || now < from) return held(p, now);
    if (p->source != MEMORY) return held(p, from);
    if (!p->is_frozen) {
        p->frozen = held(p, now);
        p->is_frozen = 1;
    }
    return p->frozen;
}

/* The most of what a process holds now, since that was so. */
static u64 most_of_held(Process *p, u64 now) {
    static const char *const peak[] = {"VmHWM:", "VmSwap:", NULL};
    static const char *const files[] = {"RssFile:", "RssShmem:", NULL};
    if (p->ends && now > p->ends) now = p->ends;
    if (p->source == CONSTANT) return p->bytes;
    if (p->source == MEMORY) {
        u64 value = status_of(p, peak), less = status_of(p, files) + p->base;
        if (value > less && value - less > p->kept) p->kept = value - less;
        return p->kept; /* of one that has ended: as far as it was seen */
    }
    if (!p->steps || (long long)(now - p->start) < 0) return 0;
    u64 since = now - p->start;
    if (p->period && since >= p->period) return p->most[p->steps - 1];
    int step = step_at(p, since);
    return step < 0 ? 0 : p->most[step];
}

/* The exact most that a process has held since it began, as accounting keeps it. */
__attribute__((unused)) static u64 most(Process *p, u64 now) {
    u64 value = most_of_held(p, now);
    return value > p->peaked ? value : p->peaked;
}

/* ------------------------------------------------------------------ what the fake CUDA driver gave */

static void map_allocations(int create) {
    static char mapped[4096];
    const char *state = getenv("PYTEST_VRAM_FAKE_NVML");
    char path[4096];
    size_t size = ALLOCATIONS * sizeof(Allocation);
    snprintf(path, sizeof path, "%s.allocations", state ? state : "");
    if (allocations && strcmp(path, mapped)) {
        munmap(allocations, size);
        allocations = NULL;
    }
    if (allocations || !state) return;
    int fd = open(path, O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0600);
    if (fd < 0) return;
    struct stat status;
    if ((create && ftruncate(fd, (off_t)size)) || fstat(fd, &status) || status.st_size < (off_t)size) {
        close(fd);
        return;
    }
    void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (at == MAP_FAILED) return;
    allocations = at;
    strcpy(mapped, path);
}

static int counts(const Allocation *one, int card, int slice) {
    return one->pid && one->card == card && (slice < 0 || one->slice == slice) && one->bytes &&
           born_of(one->pid) == one->born;
}

/* ------------------------------------------------------------------ a card or slice as a whole */

/* Bytes in use, without what the driver keeps for itself. */
static u64 in_use(int card, int slice, u64 now) {
    Card *c = &S.cards[card];
    u64 sum = slice < 0 ? c->slot.hidden : c->slices[slice].hidden;
    for (int k = 0; slice < 0 && k < c->slice_count; k++) sum += c->slices[k].hidden;
    for (int i = 0; i < S.process_count; i++) {
        Process *p = &S.processes[i];
        if (p->card == card && (slice < 0 || p->slice == slice) && holder(p, now)) sum += held(p, now);
    }
    map_allocations(0);
    for (int i = 0; allocations && i < ALLOCATIONS; i++)
        if (counts(&allocations[i], card, slice)) sum += allocations[i].bytes;
    Slot *slot = slice < 0 ? &c->slot : &c->slices[slice];
    if (c->oversubscribes && sum > slot->total - slot->reserved) sum = slot->total - slot->reserved;
    return sum;
}
