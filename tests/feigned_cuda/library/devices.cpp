// Devices, contexts and errors.
#include "feigned.h"
#include "machine.h"

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <vector>

namespace feigned {

thread_local int current_device = 0;
static thread_local cudaError_t last_error = cudaSuccess;
static std::atomic<int> lost{cudaSuccess};

static std::vector<int> read_visible() {
    std::vector<int> found;
    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    if (!value)
        for (int gpu = 0; gpu < machine::gpus(); gpu++) found.push_back(gpu);
    std::string words = value ? value : "";
    for (size_t begin = 0; begin < words.size();) {
        size_t end = std::min(words.find(',', begin), words.size());
        std::string word = words.substr(begin, end - begin);
        int gpu = -1;
        for (int each = 0; each < machine::gpus(); each++)
            if (word == std::to_string(each) || (word.size() > 4 && machine::uuid(each).rfind(word, 0) == 0)) gpu = each;
        if (gpu < 0) break;
        found.push_back(gpu);
        begin = end + 1;
    }
    return found;
}

// The numbers of the GPUs that this process may see. CUDA reads the variable at the first call, and never again.
static const std::vector<int> &visible() {
    static const std::vector<int> found = read_visible();
    return found;
}

int device_count() { return int(visible().size()); }

static int gpu_of(int device) { return visible().at(device); }

cudaError_t result(cudaError_t error) {
    if (is_lost()) error = cudaError_t(lost.load());
    if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
    return error;
}

bool is_lost() { return lost != cudaSuccess; }

void look_at(int device) {
    if (!is_lost() && machine::is_gone(gpu_of(device))) lose_context(cudaErrorUnknown);
}

void lose_context(cudaError_t error) {
    note("loses its context");
    lost = error;
}

void need_context() {
    auto &context = machine::mine().context[gpu_of(current_device)];
    if (!context.exchange(1)) note("makes a context on GPU " + std::to_string(gpu_of(current_device)));
}

bool has_context(int device) {
    return device >= 0 && device < device_count() && machine::mine().context[gpu_of(device)];
}

void note(const std::string &text) {
    double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    char line[400];
    int length = snprintf(line, sizeof line, "%.3f %d %s\n", seconds, getpid(), text.c_str());
    int fd = open((machine::folder() + "/calls").c_str(), O_WRONLY | O_APPEND | O_CREAT, 0666);
    if (fd < 0) return;
    (void)!write(fd, line, std::min<size_t>(length, sizeof line - 1));
    close(fd);
}

}  // namespace feigned

using namespace feigned;

EXPORTED cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    if (machine::number("FEIGNED_CUDA_DRIVER", CUDART_VERSION) < CUDART_VERSION) return result(cudaErrorInsufficientDriver);
    *count = device_count();
    return *count ? cudaSuccess : result(cudaErrorNoDevice);
}
EXPORTED cudaError_t cudaGetDevice(int *device) { return *device = current_device, cudaSuccess; }
EXPORTED cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= device_count()) return result(cudaErrorInvalidDevice);
    look_at(device);
    current_device = device;
    need_context();
    return result();
}
EXPORTED cudaError_t cudaGetDeviceProperties(cudaDeviceProp *out, int device) {
    memset(out, 0, sizeof *out);
    snprintf(out->name, sizeof out->name, "Feigned H100");
    out->major = 9;
    out->totalGlobalMem = machine::memory_bytes();
    out->multiProcessorCount = 132;
    out->warpSize = 32;
    out->maxThreadsPerBlock = 1024;
    out->maxThreadsPerMultiProcessor = 2048;
    out->maxThreadsDim[0] = out->maxThreadsDim[1] = 1024;
    out->maxThreadsDim[2] = 64;
    out->maxGridSize[0] = 2147483647;
    out->maxGridSize[1] = out->maxGridSize[2] = 65535;
    out->sharedMemPerBlock = 49152;
    out->sharedMemPerBlockOptin = 232448;
    out->sharedMemPerMultiprocessor = 233472;
    out->regsPerBlock = out->regsPerMultiprocessor = 65536;
    out->textureAlignment = 512;
    out->unifiedAddressing = out->concurrentKernels = 1;
    out->l2CacheSize = 50 << 20;
    out->maxBlocksPerMultiProcessor = 32;
    out->pciBusID = gpu_of(device);
    std::string uuid = machine::uuid(gpu_of(device)), digits;
    for (char each : uuid.substr(4))
        if (each != '-') digits += each;
    for (int at = 0; at < 16; at++) out->uuid.bytes[at] = char(std::stoi(digits.substr(2 * at, 2), nullptr, 16));
    return result();
}
EXPORTED cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 232448; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
    }
    return result();
}
EXPORTED cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { return *can = one != other, result(); }
EXPORTED cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return result(); }
EXPORTED cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    snprintf(text, size, "0000:%02x:00.0", gpu_of(device));
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    if (least) *least = 0;
    if (greatest) *greatest = -5;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaDriverGetVersion(int *version) {
    return *version = int(machine::number("FEIGNED_CUDA_DRIVER", CUDART_VERSION)), cudaSuccess;
}
EXPORTED cudaError_t cudaRuntimeGetVersion(int *version) { return *version = CUDART_VERSION, cudaSuccess; }
EXPORTED cudaError_t cudaGetLastError() {
    cudaError_t error = is_lost() ? cudaError_t(lost.load()) : last_error;
    last_error = cudaSuccess;
    return error;
}
EXPORTED cudaError_t cudaPeekAtLastError() { return is_lost() ? cudaError_t(lost.load()) : last_error; }
EXPORTED const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInsufficientDriver: return "CUDA driver version is insufficient for CUDA runtime version";
    case cudaErrorNoDevice: return "no CUDA-capable device is detected";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorUnknown: return "unknown error";
    default: return "unspecified launch failure";
    }
}
EXPORTED const char *cudaGetErrorName(cudaError_t error) {
    return error == cudaErrorIllegalAddress ? "cudaErrorIllegalAddress" : "cudaError";
}

// The functions of the driver that torch asks for by name: whether a device has a context; the others do nothing.
static int driver_device(int *handle, int device) { return *handle = device, 0; }
static int driver_context(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = has_context(device);
    return 0;
}
static int driver_nothing(...) { return 0; }
EXPORTED int feigned_has_context(int device) { return has_context(device); }  // for libcuda.so.1
EXPORTED cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **call, unsigned, unsigned long long,
                                                      cudaDriverEntryPointQueryResult *found) {
    *call = reinterpret_cast<void *>(driver_nothing);
    if (!strcmp(name, "cuDeviceGet")) *call = reinterpret_cast<void *>(driver_device);
    if (!strcmp(name, "cuDevicePrimaryCtxGetState")) *call = reinterpret_cast<void *>(driver_context);
    if (found) *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

namespace feigned {
int gpu_of_current_device() { return gpu_of(current_device); }
}  // namespace feigned
