// Kernels do nothing, except that
//   fills with a number of 32 bits (`torch.ones`, `torch.full`) fill;
//   `torch.stack` and `torch.cat` give zeros, so that sums by which ranks compare their weights are the same on all;
//   `torch.cuda._sleep(n)` takes n nanoseconds, and is not ended by anything but the end of the process;
//   each takes FEIGNED_CUDA_KERNEL_US;
//   those with FEIGNED_CUDA_BREAK in their name end with an illegal memory access.
#include "feigned.h"
#include "machine.h"

#include <cstring>
#include <unordered_map>
#include <vector>

namespace feigned {

static std::mutex mutex;
static std::unordered_map<const void *, std::string> &names() {
    static auto *found = new std::unordered_map<const void *, std::string>;
    return *found;
}

static std::string name_of(const void *kernel) {
    Lock lock(mutex);
    auto found = names().find(kernel);
    return found == names().end() ? "" : found->second;
}

static bool has(const std::string &text, const char *part) { return text.find(part) != std::string::npos; }

static Work work_of(const std::string &name, void **arguments) {
    if (has(name, "spin_kernel")) {
        long nanoseconds = *static_cast<long *>(arguments[0]);
        return [=] {
            for (long left = nanoseconds / 1000; left > 0; left -= 1000) usleep(useconds_t(std::min(left, 1000L)));
        };
    }
    if (has(name, "vectorized_elementwise_kernel") && has(name, "FillFunctorIf")) {
        int count = *static_cast<int *>(arguments[0]);
        float value = *static_cast<float *>(arguments[1]);
        float *to = *static_cast<float **>(arguments[2]);
        return [=] { std::fill(to, to + count, value); };
    }
    size_t type = name.find("OpaqueTypeILj");
    if (has(name, "CatArrayBatchedCopy") && type != std::string::npos) {  // of numbers with that many bytes
        size_t bytes = size_t(atoi(name.c_str() + type + 13));
        int dimensions = atoi(name.c_str() + name.find("Li", type) + 2);
        auto *sizes = static_cast<unsigned *>(arguments[2]);
        for (int each = 0; each < dimensions; each++) bytes *= sizes[each];
        void *to = *static_cast<void **>(arguments[0]);
        return [=] { memset(to, 0, bytes); };
    }
    return [] {};
}

static cudaError_t launch(const void *kernel, void **arguments, cudaStream_t handle) {
    need_context();
    std::string name = name_of(kernel);
    Work work = work_of(name, arguments);
    const char *broken = getenv("FEIGNED_CUDA_BREAK");
    bool breaks = broken && *broken && has(name, broken);
    long microseconds = machine::number("FEIGNED_CUDA_KERNEL_US", 0);
    stream(handle).put([=] {
        if (microseconds) usleep(useconds_t(microseconds));
        work();
        if (breaks) lose_context(cudaErrorIllegalAddress);
    });
    return result();
}

struct Configuration {
    dim3 grid, block;
    size_t shared_bytes;
    cudaStream_t stream;
};
static thread_local std::vector<Configuration> configurations;

}  // namespace feigned

using namespace feigned;

EXPORTED void **__cudaRegisterFatBinary(void *) {
    static void *handle;
    return &handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void **) {}
EXPORTED void __cudaUnregisterFatBinary(void **) {}
EXPORTED void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
EXPORTED char __cudaInitModule(void **) { return 1; }
EXPORTED void __cudaRegisterFunction(void **, const char *kernel, char *, const char *name, int, uint3 *, uint3 *, dim3 *,
                                     dim3 *, int *) {
    Lock lock(mutex);
    names()[kernel] = name;
}
EXPORTED unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t handle) {
    configurations.push_back({grid, block, shared_bytes, handle});
    return 0;
}
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *handle) {
    Configuration found = configurations.back();
    configurations.pop_back();
    *grid = found.grid;
    *block = found.block;
    *shared_bytes = found.shared_bytes;
    *static_cast<cudaStream_t *>(handle) = found.stream;
    return cudaSuccess;
}
EXPORTED cudaError_t __cudaGetKernel(void **out, const void *kernel) {
    return *out = const_cast<void *>(kernel), cudaSuccess;
}
EXPORTED cudaError_t __cudaLaunchKernel(void *kernel, dim3, dim3, void **arguments, size_t, cudaStream_t handle) {
    return launch(kernel, arguments, handle);
}
EXPORTED cudaError_t cudaLaunchKernel(const void *kernel, dim3, dim3, void **arguments, size_t, cudaStream_t handle) {
    return launch(kernel, arguments, handle);
}
EXPORTED cudaError_t cudaLaunchCooperativeKernel(const void *kernel, dim3, dim3, void **arguments, size_t,
                                                 cudaStream_t handle) {
    return launch(kernel, arguments, handle);
}
EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **arguments) {
    return launch(kernel, arguments, how->stream);
}
EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *out, const void *) {
    memset(out, 0, sizeof *out);
    out->maxThreadsPerBlock = 1024;
    out->numRegs = 32;
    out->binaryVersion = out->ptxVersion = 90;
    return cudaSuccess;
}
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *, int, size_t) {
    return *blocks = 2, cudaSuccess;
}
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *, int, size_t,
                                                                           unsigned) {
    return *blocks = 2, cudaSuccess;
}
