// The driver's library (NVML), as far as this package and torch ask it.
#include "machine.h"

#include <cstdio>
#include <cstring>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NO_PERMISSION = 4, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15 };

struct Gpu {
    int number;
};
Gpu *gpu(int number) {
    static Gpu all[machine::MOST_GPUS];
    all[number].number = number;
    return &all[number];
}

struct Memory {
    unsigned long long total, free, used;
};
struct Use {
    unsigned gpu, memory;
};
struct Process {
    unsigned pid;
    unsigned long long used;
    unsigned instance, compute_instance;
};

}  // namespace

EXPORTED int nvmlInit_v2() {
    machine::wait_for_driver();
    return int(machine::number("FEIGNED_CUDA_NVML", SUCCESS));
}
EXPORTED int nvmlInitWithFlags(unsigned) { return nvmlInit_v2(); }
EXPORTED int nvmlShutdown() { return SUCCESS; }
EXPORTED const char *nvmlErrorString(int error) { return error == NO_PERMISSION ? "Insufficient Permissions" : "Not Supported"; }
EXPORTED int nvmlDeviceGetCount_v2(unsigned *count) {
    machine::wait_for_driver();
    return *count = unsigned(machine::gpus()), SUCCESS;
}
EXPORTED int nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **out) {
    if (index >= unsigned(machine::gpus())) return NOT_FOUND;
    if (machine::is_gone(int(index))) return GPU_IS_LOST;
    return *out = gpu(int(index)), SUCCESS;
}
EXPORTED int nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **out) {
    for (int number = 0; number < machine::gpus(); number++)
        if (machine::uuid(number) == uuid) return nvmlDeviceGetHandleByIndex_v2(unsigned(number), out);
    return NOT_FOUND;
}
EXPORTED int nvmlDeviceGetHandleByPciBusId_v2(const char *id, Gpu **out) {
    unsigned number = 0;
    sscanf(id, "0000:%x", &number);
    return nvmlDeviceGetHandleByIndex_v2(number, out);
}
EXPORTED int nvmlDeviceGetUUID(Gpu *device, char *text, unsigned size) {
    return snprintf(text, size, "%s", machine::uuid(device->number).c_str()), SUCCESS;
}
EXPORTED int nvmlDeviceGetName(Gpu *, char *text, unsigned size) {
    return snprintf(text, size, "Feigned H100"), SUCCESS;
}
EXPORTED int nvmlDeviceGetMemoryInfo(Gpu *device, Memory *out) {
    if (machine::is_gone(device->number)) return GPU_IS_LOST;
    if (machine::refuses()) return NO_PERMISSION;
    out->total = machine::memory_bytes();
    out->used = machine::used_bytes(device->number);
    out->free = out->total - out->used;
    return SUCCESS;
}
EXPORTED int nvmlDeviceGetUtilizationRates(Gpu *, Use *out) { return *out = {0, 0}, SUCCESS; }
template <class Form> int running(Gpu *device, unsigned *count, Form *out) {
    if (machine::refuses()) return NO_PERMISSION;
    unsigned room = *count, found = 0;
    machine::each([&](int pid, machine::Held &held) {
        if (!held.context[device->number]) return;
        if (found < room && out) {
            out[found].pid = unsigned(pid);
            out[found].used = static_cast<unsigned long long>(held.bytes[device->number]);
        }
        found++;
    });
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}
struct FirstProcess {  // the form of the function without a version, which torch calls
    unsigned pid;
    unsigned long long used;
};
EXPORTED int nvmlDeviceGetComputeRunningProcesses_v3(Gpu *device, unsigned *count, Process *out) {
    for (unsigned each = 0; out && each < *count; each++) out[each].instance = out[each].compute_instance = ~0u;
    return running(device, count, out);
}
EXPORTED int nvmlDeviceGetComputeRunningProcesses(Gpu *device, unsigned *count, FirstProcess *out) {
    return running(device, count, out);
}
EXPORTED int nvmlSystemGetDriverVersion(char *text, unsigned size) { return snprintf(text, size, "580.0"), SUCCESS; }
EXPORTED int nvmlSystemGetCudaDriverVersion_v2(int *version) {
    return *version = int(machine::number("FEIGNED_CUDA_DRIVER", 13000)), machine::refuses() ? NO_PERMISSION : SUCCESS;
}
EXPORTED int nvmlDeviceGetGpuFabricInfoV() { return NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetNvLinkRemoteDeviceType() { return NOT_SUPPORTED; }
EXPORTED int nvmlDeviceGetNvLinkRemotePciInfo_v2() { return NOT_SUPPORTED; }
