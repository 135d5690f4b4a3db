// What the parts of the feigned CUDA runtime share. ../__init__.py says what it is for.
#pragma once
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <string>

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace feigned {

using Lock = std::unique_lock<std::mutex>;
using Work = std::function<void()>;

// A stream: one thread that does what was put into its queue, in that order.
class Stream {
  public:
    explicit Stream(int device);
    void put(Work work);
    bool done();
    void wait();
    const int device;

  private:
    void serve();
    std::mutex mutex;
    std::condition_variable filled, emptied;
    std::deque<Work> queue;
    bool busy = false;
};

// The stream of a handle; of the current device's own one for the default handles.
Stream &stream(cudaStream_t handle);

// The device of the calling thread.
extern thread_local int current_device;

int device_count();

// What a function of the runtime returns: the error by which the process has lost its context, if there is one.
cudaError_t result(cudaError_t error = cudaSuccess);
bool is_lost();
void lose_context(cudaError_t error);
// Loses the context if the device has fallen off the bus.
void look_at(int device);

// Makes a context on the current device, if there is none.
void need_context();
bool has_context(int device);

// Adds a line to the file of calls: seconds, pid, text.
void note(const std::string &text);

}  // namespace feigned
