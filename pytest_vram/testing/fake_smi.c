/* A fake of the program nvidia-smi on the cards of the fake driver: -L, --query-gpu and --query-compute-apps as CSV. */
#include "fake_nvml.c"

#include <limits.h>

static int header = 1, units = 1;

/* A size in MiB as the program prints it. */
static void size(char *to, size_t room, u64 bytes) {
    if (bytes == NOT_AVAILABLE) snprintf(to, room, "[N/A]");
    else snprintf(to, room, units ? "%llu MiB" : "%llu", bytes >> 20);
}

static int fail(const char *why, int code) {
    printf("%s\n", why);
    return code;
}

static void head(const char *fields) {
    char text[1024], *rest = text;
    copy(text, sizeof text, fields);
    int first = 1;
    for (char *field; (field = strsep(&rest, ","));) {
        const char *unit = strstr(field, "memory") ? " [MiB]" : strstr(field, "utilization") ? " [%]" : "";
        printf("%s%s%s", first ? "" : ", ", field, units ? unit : "");
        first = 0;
    }
    printf("\n");
}

static int gpus(const char *fields) {
    unsigned count = 0;
    int code = nvmlDeviceGetCount_v2(&count);
    if (code) return fail(nvmlErrorString(code), code);
    if (header) head(fields);
    for (unsigned i = 0; i < count; i++) {
        char text[1024], value[128], *rest = text;
        void *device;
        Memory memory;
        code = nvmlDeviceGetHandleByIndex_v2(i, &device);
        if (code) return fail("Unable to determine the device handle for GPU: GPU is lost. Reboot the system to recover this GPU", code);
        int no_memory = nvmlDeviceGetMemoryInfo(device, &memory);
        copy(text, sizeof text, fields);
        for (char *field; (field = strsep(&rest, ","));) {
            while (*field == ' ') field++;
            u64 bytes = !strcmp(field, "memory.total") ? memory.total : !strcmp(field, "memory.used") ? memory.used : memory.free;
            if (!strncmp(field, "memory.", 7)) size(value, sizeof value, no_memory ? NOT_AVAILABLE : bytes);
            else if (!strcmp(field, "index")) snprintf(value, sizeof value, "%u", i);
            else if (!strcmp(field, "uuid") || !strcmp(field, "gpu_uuid")) nvmlDeviceGetUUID(device, value, sizeof value);
            else if (!strcmp(field, "name")) nvmlDeviceGetName(device, value, sizeof value);
            else if (!strcmp(field, "driver_version")) nvmlSystemGetDriverVersion(value, sizeof value);
            else if (!strcmp(field, "utilization.gpu")) snprintf(value, sizeof value, units ? "%u %%" : "%u", S.cards[i].gpu_utilization);
            else return fail("Field is not a valid field to query.", 2);
            printf("%s%s", value, rest ? ", " : "\n");
        }
    }
    return 0;
}

static int processes(const char *fields) {
    unsigned cards = 0;
    int code = nvmlDeviceGetCount_v2(&cards);
    if (code) return fail(nvmlErrorString(code), code);
    if (header) head(fields);
    for (unsigned i = 0; i < cards; i++) {
        ProcessV2 found[PROCESSES];
        unsigned count = PROCESSES;
        void *device;
        if (nvmlDeviceGetHandleByIndex_v2(i, &device) || processes_v2(device, COMPUTE, &count, found)) continue;
        for (unsigned k = 0; k < count; k++) {
            char text[1024], value[PATH_MAX], path[64], *rest = text;
            copy(text, sizeof text, fields);
            for (char *field; (field = strsep(&rest, ","));) {
                while (*field == ' ') field++;
                if (!strcmp(field, "pid")) snprintf(value, sizeof value, "%u", found[k].pid);
                else if (!strcmp(field, "used_memory") || !strcmp(field, "used_gpu_memory")) size(value, sizeof value, found[k].used);
                else if (!strcmp(field, "gpu_uuid")) nvmlDeviceGetUUID(device, value, sizeof value);
                else if (!strcmp(field, "process_name") || !strcmp(field, "name")) {
                    snprintf(path, sizeof path, "/proc/%u/exe", found[k].pid);
                    ssize_t length = readlink(path, value, sizeof value - 1);
                    value[length > 0 ? length : 0] = 0;
                    if (length <= 0) copy(value, sizeof value, "[Not Found]");
                } else return fail("Field is not a valid field to query.", 2);
                printf("%s%s", value, rest ? ", " : "\n");
            }
        }
    }
    return 0;
}

static int list(void) {
    unsigned count = 0;
    int code = nvmlDeviceGetCount_v2(&count);
    for (unsigned i = 0; !code && i < count; i++)
        printf("GPU %u: %s (UUID: %s)\n", i, S.cards[i].slot.name, S.cards[i].slot.uuid);
    return code;
}

int main(int argc, char **argv) {
    const char *cards = NULL, *apps = NULL;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "--query-gpu=", 12)) cards = argv[i] + 12;
        else if (!strncmp(argv[i], "--query-compute-apps=", 21)) apps = argv[i] + 21;
        else if (!strncmp(argv[i], "--format=csv", 12)) {
            header = !strstr(argv[i], "noheader");
            units = !strstr(argv[i], "nounits");
        }
    }
    int code = nvmlInitWithFlags(0);
    if (code) return fail("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", code);
    return cards ? gpus(cards) : apps ? processes(apps) : list();
}
