/* A libnvidia-ml.so.1 that answers from a text file, so that tests run the real bindings without a GPU.

   The file is named by NVML_SCRIPT and read at each call: lines "key value". A missing key answers NOT_SUPPORTED, a value "E4" answers
   with error 4. Keys start with the device: "0.", or "0m1." for the second MIG instance of GPU 0. While there is a key "hang",
   nvmlDeviceGetUtilizationRates does not return. Layouts are those of nvml.h. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef unsigned long long u64;
typedef unsigned int uint;
enum { OK = 0, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, SMALL = 7, NO_DRIVER = 9, TIMEOUT = 10 };

static int next_event;

static int text(const char *key, char *out) {
    const char *path = getenv("NVML_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    if (!file) return NO_DRIVER;
    char line[512], name[256], value[256];
    int result = NOT_SUPPORTED;
    while (fgets(line, sizeof line, file))
        if (sscanf(line, "%255s %255[^\n]", name, value) == 2 && !strcmp(name, key)) {
            strcpy(out, value);
            result = value[0] == 'E' && value[1] >= '0' && value[1] <= '9' ? atoi(value + 1) : OK;
        }
    fclose(file);
    return result;
}

static int number(const char *key, double *out) {
    char value[256];
    int result = text(key, value);
    if (result == OK) *out = atof(value);
    return result;
}

static const char *key_of(void *device, const char *name) {
    static __thread char key[128];
    long id = (long)device - 1;
    if (id % 16) snprintf(key, sizeof key, "%ldm%ld.%s", id / 16, id % 16 - 1, name);
    else snprintf(key, sizeof key, "%ld.%s", id / 16, name);
    return key;
}

static int uint_of(void *device, const char *name, uint *out) {
    double value;
    int result = number(key_of(device, name), &value);
    if (result == OK) *out = (uint)value;
    return result;
}

static int u64_of(void *device, const char *name, u64 *out) {
    double value;
    int result = number(key_of(device, name), &value);
    if (result == OK) *out = (u64)value;
    return result;
}

static int named(void *device, const char *format, int a, int b, u64 *out) {
    char name[64];
    snprintf(name, sizeof name, format, a, b);
    return u64_of(device, name, out);
}

static int named_uint(void *device, const char *format, int a, uint *out) {
    u64 value;
    int result = named(device, format, a, 0, &value);
    if (result == OK) *out = (uint)value;
    return result;
}

/* -- library ---------------------------------------------------------------------------------------------------------- */

int nvmlInitWithFlags(uint flags) {
    double ignored;
    next_event = 0;
    int result = number("init", &ignored);
    return result == NOT_SUPPORTED ? OK : result;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) {
    static __thread char message[32];
    snprintf(message, sizeof message, "error %d", code);
    return message;
}
int nvmlSystemGetDriverVersion(char *out, uint length) { return text("driver", out); }
int nvmlDeviceGetCount_v2(uint *count) {
    double value;
    int result = number("count", &value);
    if (result == OK) *count = (uint)value;
    return result;
}
int nvmlDeviceGetHandleByIndex_v2(uint index, void **device) {
    char value[256];
    *device = (void *)(long)(1 + 16 * index);
    int result = text(key_of(*device, "handle"), value);
    return result == NOT_SUPPORTED ? OK : result;
}
int nvmlDeviceGetUUID(void *device, char *out, uint length) { return text(key_of(device, "uuid"), out); }
int nvmlDeviceGetName(void *device, char *out, uint length) { return text(key_of(device, "name"), out); }
struct pci { char legacy[16]; uint numbers[5]; char bus[32]; };
int nvmlDeviceGetPciInfo_v3(void *device, struct pci *out) { return text(key_of(device, "bus"), out->bus); }

/* -- values ----------------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetUtilizationRates(void *device, uint *rates) {
    char value[256];
    while (text("hang", value) == OK) usleep(20000);
    int result = uint_of(device, "utilization.gpu", rates);
    return result ? result : uint_of(device, "utilization.memory", rates + 1);
}
struct memory2 { uint version; u64 total, reserved, free, used; };
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory2 *out) {
    int result = u64_of(device, "memory.reserved", &out->reserved);
    if (result) return result;
    if ((result = u64_of(device, "memory.total", &out->total))) return result;
    if ((result = u64_of(device, "memory.used", &out->used))) return result;
    return u64_of(device, "memory.free", &out->free);
}
int nvmlDeviceGetMemoryInfo(void *device, u64 *out) {
    int result = u64_of(device, "memory.total", out);
    if (result) return result;
    if ((result = u64_of(device, "memory.free", out + 1))) return result;
    return u64_of(device, "memory.used", out + 2);
}
int nvmlDeviceGetPcieThroughput(void *d, int way, uint *out) { return named_uint(d, "pcie.rate%d", way, out); }
int nvmlDeviceGetCurrPcieLinkWidth(void *d, uint *out) { return uint_of(d, "pcie.width", out); }
int nvmlDeviceGetMaxPcieLinkWidth(void *d, uint *out) { return uint_of(d, "pcie.width.max", out); }
int nvmlDeviceGetCurrPcieLinkGeneration(void *d, uint *out) { return uint_of(d, "pcie.generation", out); }
int nvmlDeviceGetMaxPcieLinkGeneration(void *d, uint *out) { return uint_of(d, "pcie.generation.max", out); }
int nvmlDeviceGetPcieReplayCounter(void *d, uint *out) { return uint_of(d, "pcie.replays", out); }
int nvmlDeviceGetNvLinkState(void *d, uint link, uint *out) {
    char name[32];
    snprintf(name, sizeof name, "link%u", link);
    int result = uint_of(d, name, out);
    return result == NOT_SUPPORTED && link ? INVALID : result;
}
int nvmlDeviceGetNvLinkErrorCounter(void *d, uint link, uint kind, u64 *out) { return named(d, "link%d.error%d", link, kind, out); }
int nvmlDeviceGetTotalEccErrors(void *d, int kind, int counter, u64 *out) { return named(d, "ecc%d.%d", kind, counter, out); }
int nvmlDeviceGetRetiredPages(void *d, int cause, uint *count, u64 *pages) {
    uint there;
    int result = named_uint(d, "retired%d", cause, &there);
    if (result) return result;
    if (!pages || *count < there) return *count = there, there ? SMALL : OK;
    *count = there;
    return OK;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *d, uint *out) { return uint_of(d, "retired.pending", out); }
int nvmlDeviceGetRemappedRows(void *d, uint *corrected, uint *uncorrected, uint *pending, uint *failed) {
    int result = uint_of(d, "remapped.corrected", corrected);
    if (result) return result;
    if ((result = uint_of(d, "remapped.uncorrected", uncorrected))) return result;
    if ((result = uint_of(d, "remapped.pending", pending))) return result;
    return uint_of(d, "remapped.failed", failed);
}
int nvmlDeviceGetViolationStatus(void *d, int policy, u64 *out) { return named(d, "violation%d", policy, 0, out + 1); }
int nvmlDeviceGetCurrentClocksEventReasons(void *d, u64 *out) { return u64_of(d, "clock.reasons", out); }
int nvmlDeviceGetPowerUsage(void *d, uint *out) { return uint_of(d, "power", out); }
int nvmlDeviceGetEnforcedPowerLimit(void *d, uint *out) { return uint_of(d, "power.limit", out); }
int nvmlDeviceGetPowerManagementDefaultLimit(void *d, uint *out) { return uint_of(d, "power.default", out); }
int nvmlDeviceGetTotalEnergyConsumption(void *d, u64 *out) { return u64_of(d, "energy", out); }
int nvmlDeviceGetTemperature(void *d, int sensor, uint *out) { return uint_of(d, "temperature", out); }
int nvmlDeviceGetTemperatureThreshold(void *d, int which, uint *out) { return named_uint(d, "threshold%d", which, out); }
int nvmlDeviceGetClockInfo(void *d, int which, uint *out) { return named_uint(d, "clock%d", which, out); }
int nvmlDeviceGetMaxClockInfo(void *d, int which, uint *out) { return named_uint(d, "clock%d.max", which, out); }
int nvmlDeviceGetPersistenceMode(void *d, uint *out) { return uint_of(d, "persistence", out); }
struct field { uint id, scope; long long timestamp, latency; uint type, result; u64 value; };
int nvmlDeviceGetFieldValues(void *d, int count, struct field *fields) {
    for (int i = 0; i < count; i++) fields[i].result = named(d, "field%d", fields[i].id, 0, &fields[i].value);
    return OK;
}

/* -- MIG -------------------------------------------------------------------------------------------------------------- */

int nvmlDeviceGetMigMode(void *d, uint *current, uint *pending) {
    int result = uint_of(d, "mig", current);
    *pending = *current;
    return result;
}
int nvmlDeviceGetMaxMigDeviceCount(void *d, uint *out) { return uint_of(d, "mig.most", out); }
int nvmlDeviceGetMigDeviceHandleByIndex(void *d, uint index, void **out) {
    uint there;
    *out = (void *)((long)d + 1 + index);
    return uint_of(*out, "gi", &there) == NOT_SUPPORTED ? NOT_FOUND : OK;
}
int nvmlDeviceGetGpuInstanceId(void *d, uint *out) { return uint_of(d, "gi", out); }
int nvmlDeviceGetComputeInstanceId(void *d, uint *out) { return uint_of(d, "ci", out); }

/* -- events: keys "event0.gpu", "event0.xid" and so on, each told once -------------------------------------------------- */

int nvmlEventSetCreate(void **set) { *set = (void *)1; return OK; }
int nvmlEventSetFree(void *set) { return OK; }
int nvmlDeviceRegisterEvents(void *d, u64 types, void *set) {
    uint answer;
    int result = uint_of(d, "events", &answer);
    return result;
}
struct event { void *device; u64 type, data; uint gi, ci; };
int nvmlEventSetWait_v2(void *set, struct event *out, uint timeout) {
    char key[32];
    double gpu, xid;
    snprintf(key, sizeof key, "event%d.gpu", next_event);
    if (number(key, &gpu)) return TIMEOUT;
    snprintf(key, sizeof key, "event%d.xid", next_event);
    number(key, &xid);
    next_event++;
    *out = (struct event){(void *)(long)(1 + 16 * (long)gpu), 8, (u64)xid, 0, 0};
    return OK;
}

/* -- GPM -------------------------------------------------------------------------------------------------------------- */

struct support { uint version, supported; };
struct metric { uint id; int result; double value; char *names[3]; };
struct metrics { uint version, count; void *first, *second; struct metric metrics[]; };
int nvmlGpmQueryDeviceSupport(void *d, struct support *out) { return uint_of(d, "gpm", &out->supported); }
int nvmlGpmSampleAlloc(void **out) { *out = calloc(1, sizeof(long)); return OK; }
int nvmlGpmSampleFree(void *sample) { free(sample); return OK; }
int nvmlGpmSampleGet(void *d, void *sample) { *(long *)sample = (long)d; return OK; }
int nvmlGpmMetricsGet(struct metrics *query) {
    void *d = (void *)*(long *)query->second;
    if (*(long *)query->first != (long)d) return INVALID;
    for (uint i = 0; i < query->count; i++) {
        char name[32];
        snprintf(name, sizeof name, "gpm%u", query->metrics[i].id);
        query->metrics[i].result = number(key_of(d, name), &query->metrics[i].value);
    }
    return OK;
}
