// The memory of a GPU is memory of the host, of which all processes together have at most FEIGNED_CUDA_MEMORY_MB.
#include "feigned.h"
#include "machine.h"

#include <cstring>
#include <map>
#include <memory>

namespace feigned {
int gpu_of_current_device();

struct Block {
    size_t bytes;
    int gpu;  // -1: pinned memory of the host
    int device;
};

static std::mutex mutex;
static std::map<char *, Block> &blocks() {
    static auto *found = new std::map<char *, Block>;
    return *found;
}

static cudaError_t allocated(void **out, size_t bytes, int gpu) {
    need_context();
    Lock lock(mutex);
    bytes = std::max<size_t>(bytes, 1);
    if (gpu >= 0 && machine::used_bytes(gpu) + long(bytes) > machine::memory_bytes())
        return result(cudaErrorMemoryAllocation);
    void *place = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return result(cudaErrorMemoryAllocation);
    if (gpu >= 0) machine::mine().bytes[gpu] += long(bytes);
    blocks()[static_cast<char *>(place)] = {bytes, gpu, current_device};
    *out = place;
    return result();
}

static void freed(void *place) {
    Lock lock(mutex);
    auto found = blocks().find(static_cast<char *>(place));
    if (found == blocks().end()) return;
    if (found->second.gpu >= 0) machine::mine().bytes[found->second.gpu] -= long(found->second.bytes);
    munmap(place, found->second.bytes);
    blocks().erase(found);
}

}  // namespace feigned

using namespace feigned;

EXPORTED cudaError_t cudaDeviceSynchronize();
EXPORTED cudaError_t cudaMalloc(void **out, size_t bytes) { return allocated(out, bytes, gpu_of_current_device()); }
EXPORTED cudaError_t cudaFree(void *place) {
    if (place && !is_lost()) {
        cudaDeviceSynchronize();
        freed(place);
    }
    return result();
}
EXPORTED cudaError_t cudaMallocAsync(void **out, size_t bytes, cudaStream_t) { return cudaMalloc(out, bytes); }
EXPORTED cudaError_t cudaFreeAsync(void *place, cudaStream_t) { return cudaFree(place); }
EXPORTED cudaError_t cudaHostAlloc(void **out, size_t bytes, unsigned) { return allocated(out, bytes, -1); }
EXPORTED cudaError_t cudaFreeHost(void *place) { return freed(place), result(); }
EXPORTED cudaError_t cudaHostRegister(void *, size_t, unsigned) { return result(); }
EXPORTED cudaError_t cudaHostUnregister(void *) { return result(); }
EXPORTED cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total) {
    need_context();
    *total = machine::memory_bytes();
    *free_bytes = *total - machine::used_bytes(gpu_of_current_device());
    return result();
}
EXPORTED cudaError_t cudaPointerGetAttributes(cudaPointerAttributes *out, const void *place) {
    memset(out, 0, sizeof *out);
    out->type = cudaMemoryTypeUnregistered;
    Lock lock(mutex);
    auto *address = static_cast<char *>(const_cast<void *>(place));
    auto found = blocks().upper_bound(address);
    if (found == blocks().begin()) return result();
    --found;
    if (address >= found->first + found->second.bytes) return result();
    out->type = found->second.gpu < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    out->device = found->second.device;
    out->devicePointer = out->hostPointer = address;
    return result();
}

EXPORTED cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t handle) {
    need_context();
    if (kind == cudaMemcpyHostToDevice) {  // the caller may change the memory of the host as soon as this returns
        auto copy = std::make_shared<std::string>(static_cast<const char *>(from), bytes);
        stream(handle).put([=] { memcpy(to, copy->data(), bytes); });
    } else {
        stream(handle).put([=] { memcpy(to, from, bytes); });
    }
    return result();
}
EXPORTED cudaError_t cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, cudaStream_t handle) {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, handle);
}
EXPORTED cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, cudaMemcpyKind kind) {
    cudaMemcpyAsync(to, from, bytes, kind, nullptr);
    stream(nullptr).wait();
    return result();
}
EXPORTED cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                       size_t height, cudaMemcpyKind, cudaStream_t handle) {
    stream(handle).put([=] {
        for (size_t row = 0; row < height; row++)
            memcpy(static_cast<char *>(to) + row * to_pitch, static_cast<const char *>(from) + row * from_pitch, width);
    });
    return result();
}
EXPORTED cudaError_t cudaMemsetAsync(void *place, int value, size_t bytes, cudaStream_t handle) {
    stream(handle).put([=] { memset(place, value, bytes); });
    return result();
}
EXPORTED cudaError_t cudaMemset(void *place, int value, size_t bytes) {
    cudaMemsetAsync(place, value, bytes, nullptr);
    stream(nullptr).wait();
    return result();
}
