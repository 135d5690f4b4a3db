// Streams are threads, and events are numbers that a stream reaches.
#include "feigned.h"

#include <chrono>
#include <map>
#include <thread>
#include <vector>

namespace feigned {

constexpr size_t MOST_QUEUED = 1024;

Stream::Stream(int device) : device(device) {
    std::thread([this] { serve(); }).detach();
}

void Stream::serve() {
    for (;;) {
        Work work;
        {
            Lock lock(mutex);
            filled.wait(lock, [&] { return !queue.empty(); });
            work = std::move(queue.front());
            queue.pop_front();
            busy = true;
        }
        look_at(device);
        if (!is_lost()) work();
        Lock lock(mutex);
        busy = false;
        if (queue.empty() || queue.size() == MOST_QUEUED - 1) emptied.notify_all();
    }
}

// As with CUDA, whoever is far ahead of the device waits.
void Stream::put(Work work) {
    Lock lock(mutex);
    while (queue.size() >= MOST_QUEUED && !is_lost()) emptied.wait_for(lock, std::chrono::milliseconds(20));
    queue.push_back(std::move(work));
    filled.notify_one();
}

bool Stream::done() {
    Lock lock(mutex);
    return queue.empty() && !busy;
}

void Stream::wait() {
    Lock lock(mutex);
    // A lost context finishes nothing, and keeps nobody waiting.
    while (!(queue.empty() && !busy) && !is_lost()) emptied.wait_for(lock, std::chrono::milliseconds(20));
}

static std::mutex all_mutex;
static std::vector<Stream *> &all() {
    static auto *streams = new std::vector<Stream *>;
    return *streams;
}

static Stream *made(int device) {
    auto *found = new Stream(device);
    Lock lock(all_mutex);
    all().push_back(found);
    return found;
}

Stream &stream(cudaStream_t handle) {
    static auto *defaults = new std::map<int, Stream *>;
    static std::mutex mutex;
    if (reinterpret_cast<size_t>(handle) > 2) return *reinterpret_cast<Stream *>(handle);
    Lock lock(mutex);
    auto &found = (*defaults)[current_device];
    if (!found) found = made(current_device);
    return *found;
}

}  // namespace feigned

using namespace feigned;

EXPORTED cudaError_t cudaStreamCreateWithPriority(cudaStream_t *handle, unsigned, int) {
    need_context();
    *handle = reinterpret_cast<cudaStream_t>(made(current_device));
    return result();
}
EXPORTED cudaError_t cudaStreamCreate(cudaStream_t *handle) { return cudaStreamCreateWithPriority(handle, 0, 0); }
EXPORTED cudaError_t cudaStreamDestroy(cudaStream_t) { return result(); }
EXPORTED cudaError_t cudaStreamQuery(cudaStream_t handle) {
    return result(stream(handle).done() ? cudaSuccess : cudaErrorNotReady);
}
EXPORTED cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
    stream(handle).wait();
    return result();
}
EXPORTED cudaError_t cudaDeviceSynchronize() {
    need_context();
    std::vector<Stream *> streams;
    {
        Lock lock(all_mutex);
        streams = all();
    }
    for (Stream *each : streams)
        if (each->device == current_device) each->wait();
    return result();
}
EXPORTED cudaError_t cudaStreamGetPriority(cudaStream_t, int *priority) { return *priority = 0, cudaSuccess; }
EXPORTED cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus *status) {
    return *status = cudaStreamCaptureStatusNone, result();
}
EXPORTED cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus *status, unsigned long long *id,
                                              cudaGraph_t *, const cudaGraphNode_t **, const cudaGraphEdgeData **,
                                              size_t *) {
    if (id) *id = 0;
    return *status = cudaStreamCaptureStatusNone, result();
}
EXPORTED cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
    return result(cudaErrorStreamCaptureUnsupported);
}
EXPORTED cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *) { return cudaSuccess; }
EXPORTED cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t call, void *data) {
    stream(handle).put([=] { call(data); });
    return result();
}
EXPORTED cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t call, void *data, unsigned) {
    stream(handle).put([=] { call(handle, cudaSuccess, data); });
    return result();
}

// Events are never freed: a stream may still have to reach them.
struct CUevent_st {
    std::mutex mutex;
    std::condition_variable reached;
    long recorded = 0, finished = 0;
    std::chrono::steady_clock::time_point at;

    void wait(long number) {
        Lock lock(mutex);
        while (finished < number && !is_lost()) reached.wait_for(lock, std::chrono::milliseconds(20));
    }
};

EXPORTED cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned) {
    need_context();
    *event = new CUevent_st;
    return result();
}
EXPORTED cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORTED cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
EXPORTED cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
    long number;
    {
        Lock lock(event->mutex);
        number = ++event->recorded;
    }
    stream(handle).put([=] {
        Lock lock(event->mutex);
        event->finished = std::max(event->finished, number);
        event->at = std::chrono::steady_clock::now();
        event->reached.notify_all();
    });
    return result();
}
EXPORTED cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
    return cudaEventRecord(event, handle);
}
EXPORTED cudaError_t cudaEventQuery(cudaEvent_t event) {
    Lock lock(event->mutex);
    return result(event->finished >= event->recorded ? cudaSuccess : cudaErrorNotReady);
}
EXPORTED cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    long number;
    {
        Lock lock(event->mutex);
        number = event->recorded;
    }
    event->wait(number);
    return result();
}
EXPORTED cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    *milliseconds = std::chrono::duration<float, std::milli>(to->at - from->at).count();
    return result();
}
EXPORTED cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
    long number;
    {
        Lock lock(event->mutex);
        number = event->recorded;
    }
    stream(handle).put([=] { event->wait(number); });
    return result();
}
