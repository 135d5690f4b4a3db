// The machine that all processes share: $FEIGNED_CUDA is its folder. Used by the runtime and by the driver's library.
//
//   memory/PID   the bytes that a process holds of each GPU, and whether it has a context there
//   calls        a line for each call that matters
//   refuse       if it exists, the driver tells neither memory nor processes
//   lost-N       if it exists, GPU N has fallen off the bus
//   hangs        as long as it exists, the driver's library does not answer
//
// FEIGNED_CUDA_DRIVER is the newest version of CUDA that the driver supports, as CUDA counts, and FEIGNED_CUDA_NVML the
// number of the error with which its library refuses everything.
#pragma once
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <functional>
#include <string>

namespace machine {

constexpr int MOST_GPUS = 16;

struct Held {
    std::atomic<long> bytes[MOST_GPUS];
    std::atomic<int> context[MOST_GPUS];
};

inline std::string folder() {
    const char *value = getenv("FEIGNED_CUDA");
    return value ? value : "/nonexistent";
}

inline long number(const char *name, long otherwise) {
    const char *value = getenv(name);
    return value ? atol(value) : otherwise;
}

inline int gpus() { return int(number("FEIGNED_CUDA_GPUS", 8)); }

inline long memory_bytes() { return number("FEIGNED_CUDA_MEMORY_MB", 2048) << 20; }

inline bool refuses() { return access((folder() + "/refuse").c_str(), F_OK) == 0; }

inline void wait_for_driver() {
    while (access((folder() + "/hangs").c_str(), F_OK) == 0) usleep(10000);
}

inline bool is_gone(int gpu) { return access((folder() + "/lost-" + std::to_string(gpu)).c_str(), F_OK) == 0; }

inline Held *mapped(const std::string &path, int flags) {
    int fd = open(path.c_str(), flags, 0666);
    if (fd < 0 || ((flags & O_CREAT) && ftruncate(fd, sizeof(Held)) != 0)) return nullptr;
    void *place = mmap(nullptr, sizeof(Held), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return place == MAP_FAILED ? nullptr : static_cast<Held *>(place);
}

// Of this process, which a fork makes another one.
inline Held &mine() {
    static Held *held = nullptr;
    static int pid = 0;
    if (pid != getpid()) {
        pid = getpid();
        std::string path = folder() + "/memory/" + std::to_string(pid);
        unlink(path.c_str());  // of an earlier process with the same number
        held = mapped(path, O_RDWR | O_CREAT);
        if (!held) abort();
    }
    return *held;
}

// Calls back with each process that is alive: what a process had is free when it has ended.
inline void each(const std::function<void(int pid, Held &)> &call) {
    std::string where = folder() + "/memory/";
    DIR *listing = opendir(where.c_str());
    if (!listing) return;
    while (dirent *entry = readdir(listing)) {
        int pid = atoi(entry->d_name);
        if (pid <= 0 || kill(pid, 0) != 0) continue;
        if (Held *held = mapped(where + entry->d_name, O_RDWR)) {
            call(pid, *held);
            munmap(held, sizeof(Held));
        }
    }
    closedir(listing);
}

inline long used_bytes(int gpu) {
    long sum = 0;
    each([&](int, Held &held) { sum += held.bytes[gpu]; });
    return sum;
}

inline std::string uuid(int gpu) {
    char text[48];
    const char *tag = getenv("FEIGNED_CUDA_TAG");  // GPUs of two machines are two: leases hold between both
    snprintf(text, sizeof text, "GPU-%.8s-%04x-0000-0000-000000000000", tag ? tag : "fe000000", gpu);
    return text;
}

}  // namespace machine
