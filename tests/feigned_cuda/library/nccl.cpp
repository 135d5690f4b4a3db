// Collectives between processes, in a file that the ranks of a communicator share. As with the real NCCL over NVLink,
// one that waits for a rank which never comes waits until it is aborted; destroying waits for it, too.
// An abort takes FEIGNED_CUDA_ABORT_MS, in which the other communicators of the process meet errors.
// FEIGNED_CUDA_JOIN_FAILS is the number of the error with which a rank fails to join a communicator, and
// FEIGNED_CUDA_JOIN_SAYS the last error that it then reports. Others wait for such a rank, until they end.
#include "feigned.h"
#include "machine.h"

// Types of CUDA that NCCL names only for CUDA code; their headers need a library of C++.
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace {

using feigned::Work;

constexpr int MOST_RANKS = 16;
constexpr size_t PIECE = 1 << 18, LETTER = 1 << 16;

struct Letters {  // from one rank to another
    std::atomic<long> written, read;
    char data[LETTER];
};

struct Shared {
    std::atomic<int> here[MOST_RANKS];
    std::atomic<long> written[MOST_RANKS], read[MOST_RANKS];
    std::atomic<long> splits[MOST_RANKS];
    int color[MOST_RANKS], key[MOST_RANKS];
    char piece[MOST_RANKS][PIECE];
    Letters letters[MOST_RANKS][MOST_RANKS];
};

}  // namespace

struct ncclComm {
    std::string name;
    Shared *shared;
    int rank, size, device;
    std::atomic<bool> aborted{false};
    std::atomic<int> pending{0};
    long pieces = 0, splits = 0;

    // Waits until something holds; false if this communicator is aborted before.
    template <class Holds> bool until(Holds holds) {
        while (!holds()) {
            if (aborted) return false;
            usleep(50);
        }
        return true;
    }
    template <class Value> bool all(std::atomic<Value> *values, Value least) {
        for (int rank = 0; rank < size; rank++)
            if (!until([&] { return values[rank] >= least; })) return false;
        return true;
    }
};

namespace {

Shared *shared_file(const std::string &name) {
    int fd = open((machine::folder() + "/" + name).c_str(), O_RDWR | O_CREAT, 0666);
    if (fd < 0 || ftruncate(fd, sizeof(Shared)) != 0) abort();
    void *place = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    return static_cast<Shared *>(place);
}

std::string last_error;

ncclResult_t joined(ncclComm_t *out, const std::string &name, int rank, int size) {
    feigned::need_context();
    if (long error = machine::number("FEIGNED_CUDA_JOIN_FAILS", 0)) {
        const char *says = getenv("FEIGNED_CUDA_JOIN_SAYS");
        last_error = says ? says : "";
        feigned::note("does not join " + name + " as rank " + std::to_string(rank));
        return ncclResult_t(error);
    }
    feigned::note("joins " + name + " as rank " + std::to_string(rank) + " of " + std::to_string(size));
    auto *made = new ncclComm{name, shared_file(name), rank, size, feigned::current_device};
    made->shared->here[rank] = 1;
    for (int tries = 0; std::count_if(made->shared->here, made->shared->here + size, [](auto &each) { return each == 1; }) < size;
         tries++) {
        if (tries > 300000) return ncclSystemError;
        usleep(200);
    }
    *out = made;
    return ncclSuccess;
}

size_t width(ncclDataType_t type) {
    switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    case ncclInt32: case ncclUint32: case ncclFloat32: return 4;
    default: return 1;
    }
}

template <class Value> void fold_as(char *to, const char *from, size_t bytes, bool first, int operation) {
    auto *sum = reinterpret_cast<Value *>(to);
    auto *value = reinterpret_cast<const Value *>(from);
    for (size_t i = 0; i < bytes / sizeof(Value); i++)
        sum[i] = first                    ? value[i]
                 : operation == ncclMax ? std::max(sum[i], value[i])
                 : operation == ncclMin ? std::min(sum[i], value[i])
                                        : Value(sum[i] + value[i]);
}

// Adds what a rank has; numbers of 16 bits are those of the first rank.
void fold(ncclDataType_t type, char *to, const char *from, size_t bytes, bool first, int operation) {
    switch (type) {
    case ncclFloat32: return fold_as<float>(to, from, bytes, first, operation);
    case ncclFloat64: return fold_as<double>(to, from, bytes, first, operation);
    case ncclInt64: return fold_as<long>(to, from, bytes, first, operation);
    case ncclInt32: return fold_as<int>(to, from, bytes, first, operation);
    case ncclInt8: case ncclUint8: return fold_as<unsigned char>(to, from, bytes, first, operation);
    default:
        if (first) memcpy(to, from, bytes);
    }
}

void divide(ncclDataType_t type, char *values, size_t bytes, int by) {
    if (type == ncclFloat32)
        for (size_t i = 0; i < bytes / 4; i++) reinterpret_cast<float *>(values)[i] /= float(by);
    if (type == ncclFloat64)
        for (size_t i = 0; i < bytes / 8; i++) reinterpret_cast<double *>(values)[i] /= by;
}

// Exchanges memory of all ranks piece by piece; without `mine`, this rank has nothing to give.
template <class Take> void exchange(ncclComm_t comm, const char *mine, size_t bytes, Take take) {
    Shared &shared = *comm->shared;
    for (size_t at = 0; at < bytes; at += PIECE) {
        size_t size = std::min(PIECE, bytes - at);
        long number = ++comm->pieces;
        if (!comm->all(shared.read, number - 1)) return;
        if (mine) memcpy(shared.piece[comm->rank], mine + at, size);
        shared.written[comm->rank] = number;
        if (!comm->all(shared.written, number)) return;
        for (int rank = 0; rank < comm->size; rank++) take(rank, shared.piece[rank], at, size);
        shared.read[comm->rank] = number;
    }
}

struct Queued {
    ncclComm_t comm;
    cudaStream_t stream;
    Work work;
};
std::atomic<int> aborting{0};
thread_local int groups = 0;
thread_local std::vector<Queued> letters;

ncclResult_t put(ncclComm_t comm, cudaStream_t handle, Work work) {
    if (feigned::is_lost()) return ncclUnhandledCudaError;
    comm->pending++;
    feigned::stream(handle).put([=] {
        if (!comm->aborted) work();
        comm->pending--;
    });
    return ncclSuccess;
}

// Letters of one group pass at the same time, so that two ranks may both send before they receive.
ncclResult_t put_letters() {
    if (letters.empty()) return ncclSuccess;
    auto all = std::make_shared<std::vector<Queued>>(std::move(letters));
    letters.clear();
    return put(all->front().comm, all->front().stream, [all] {
        std::vector<std::thread> threads;
        for (auto &each : *all) threads.emplace_back(each.work);
        for (auto &each : threads) each.join();
    });
}

ncclResult_t letter(ncclComm_t comm, cudaStream_t stream, Work work) {
    letters.push_back({comm, stream, std::move(work)});
    return groups ? ncclSuccess : put_letters();
}

ncclResult_t left(ncclComm_t comm, const char *how) {
    feigned::note(std::string(how) + " " + comm->name + " with " + std::to_string(comm->pending) + " open");
    while (comm->pending && !feigned::is_lost()) usleep(200);
    return ncclSuccess;
}

void remove(ncclComm_t comm) { unlink((machine::folder() + "/" + comm->name).c_str()); }

}  // namespace

EXPORTED ncclResult_t ncclGetVersion(int *version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }
EXPORTED ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    memset(id, 0, sizeof *id);
    int fd = open("/dev/urandom", O_RDONLY);
    (void)!read(fd, id->internal, 8);
    close(fd);
    return ncclSuccess;
}
EXPORTED const char *ncclGetErrorString(ncclResult_t error) {
    switch (error) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError: return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "unknown result code";
    }
}
EXPORTED const char *ncclGetLastError(ncclComm_t) { return last_error.c_str(); }
EXPORTED ncclResult_t ncclCommInitRankConfig(ncclComm_t *out, int size, ncclUniqueId id, int rank, ncclConfig_t *) {
    char name[32];
    snprintf(name, sizeof name, "nccl-%016lx", *reinterpret_cast<unsigned long *>(id.internal));
    return joined(out, name, rank, size);
}
EXPORTED ncclResult_t ncclCommInitRank(ncclComm_t *out, int size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(out, size, id, rank, nullptr);
}
EXPORTED ncclResult_t ncclCommInitRankScalable(ncclComm_t *out, int size, int rank, int, ncclUniqueId *id,
                                               ncclConfig_t *how) {
    return ncclCommInitRankConfig(out, size, *id, rank, how);
}
EXPORTED ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *out, ncclConfig_t *) {
    Shared &shared = *comm->shared;
    long number = ++comm->splits;
    shared.color[comm->rank] = color;
    shared.key[comm->rank] = key;
    shared.splits[comm->rank] = 2 * number - 1;
    if (!comm->all(shared.splits, 2 * number - 1)) return ncclInternalError;
    std::vector<std::pair<int, int>> members;
    for (int rank = 0; rank < comm->size; rank++)
        if (shared.color[rank] == color) members.emplace_back(shared.key[rank], rank);
    shared.splits[comm->rank] = 2 * number;
    if (!comm->all(shared.splits, 2 * number)) return ncclInternalError;
    *out = nullptr;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    std::sort(members.begin(), members.end());
    int rank = int(std::find(members.begin(), members.end(), std::make_pair(key, comm->rank)) - members.begin());
    std::string name = comm->name + "-" + std::to_string(number) + "-" + std::to_string(color);
    return joined(out, name, rank, int(members.size()));
}
EXPORTED ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t *error) {
    bool fails = aborting && machine::number("FEIGNED_CUDA_ABORT_MS", 0);  // as the other ranks abort theirs
    return *error = fails ? ncclRemoteError : ncclSuccess, ncclSuccess;
}
EXPORTED ncclResult_t ncclCommCount(ncclComm_t comm, int *count) { return *count = comm->size, ncclSuccess; }
EXPORTED ncclResult_t ncclCommUserRank(ncclComm_t comm, int *rank) { return *rank = comm->rank, ncclSuccess; }
EXPORTED ncclResult_t ncclCommAbort(ncclComm_t comm) {
    aborting++;
    usleep(useconds_t(1000 * machine::number("FEIGNED_CUDA_ABORT_MS", 0)));
    comm->aborted = true;
    left(comm, "aborts");
    remove(comm);
    aborting--;
    return ncclSuccess;
}
EXPORTED ncclResult_t ncclCommFinalize(ncclComm_t comm) { return left(comm, "finalizes"); }
EXPORTED ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    left(comm, "destroys");
    remove(comm);
    return ncclSuccess;
}
EXPORTED ncclResult_t ncclGroupStart() { return groups++, ncclSuccess; }
EXPORTED ncclResult_t ncclGroupEnd() {
    if (!groups) return ncclInvalidUsage;
    return --groups ? ncclSuccess : put_letters();
}
EXPORTED ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *) { return ncclSuccess; }

EXPORTED ncclResult_t ncclAllReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                                    ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * width(type);
    return put(comm, stream, [=] {
        std::string mine(static_cast<const char *>(from), bytes);
        exchange(comm, mine.data(), bytes, [&](int rank, const char *piece, size_t at, size_t size) {
            char *place = static_cast<char *>(to) + at;
            fold(type, place, piece, size, rank == 0, operation);
            if (operation == ncclAvg && rank == comm->size - 1) divide(type, place, size, comm->size);
        });
    });
}
EXPORTED ncclResult_t ncclReduce(const void *from, void *to, size_t count, ncclDataType_t type, ncclRedOp_t operation,
                                 int root, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * width(type);
    return put(comm, stream, [=] {
        std::string mine(static_cast<const char *>(from), bytes);
        exchange(comm, mine.data(), bytes, [&](int rank, const char *piece, size_t at, size_t size) {
            if (comm->rank == root) fold(type, static_cast<char *>(to) + at, piece, size, rank == 0, operation);
        });
    });
}
EXPORTED ncclResult_t ncclBroadcast(const void *from, void *to, size_t count, ncclDataType_t type, int root,
                                    ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * width(type);
    return put(comm, stream, [=] {
        const char *mine = comm->rank == root ? static_cast<const char *>(from) : nullptr;
        exchange(comm, mine, bytes, [&](int rank, const char *piece, size_t at, size_t size) {
            if (rank == root && comm->rank != root) memcpy(static_cast<char *>(to) + at, piece, size);
        });
        if (mine && from != to) memmove(to, from, bytes);
    });
}
EXPORTED ncclResult_t ncclBcast(void *values, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                                cudaStream_t stream) {
    return ncclBroadcast(values, values, count, type, root, comm, stream);
}
EXPORTED ncclResult_t ncclAllGather(const void *from, void *to, size_t count, ncclDataType_t type, ncclComm_t comm,
                                    cudaStream_t stream) {
    size_t bytes = count * width(type);
    return put(comm, stream, [=] {
        std::string mine(static_cast<const char *>(from), bytes);
        exchange(comm, mine.data(), bytes, [&](int rank, const char *piece, size_t at, size_t size) {
            memcpy(static_cast<char *>(to) + rank * bytes + at, piece, size);
        });
    });
}
EXPORTED ncclResult_t ncclReduceScatter(const void *from, void *to, size_t count, ncclDataType_t type,
                                        ncclRedOp_t operation, ncclComm_t comm, cudaStream_t stream) {
    size_t bytes = count * width(type);
    return put(comm, stream, [=] {
        std::string mine(static_cast<const char *>(from), bytes * comm->size), sum(bytes * comm->size, 0);
        exchange(comm, mine.data(), mine.size(), [&](int rank, const char *piece, size_t at, size_t size) {
            fold(type, &sum[at], piece, size, rank == 0, operation);
            if (operation == ncclAvg && rank == comm->size - 1) divide(type, &sum[at], size, comm->size);
        });
        memcpy(to, sum.data() + bytes * comm->rank, bytes);
    });
}
EXPORTED ncclResult_t ncclSend(const void *from, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                               cudaStream_t stream) {
    size_t bytes = count * width(type);
    return letter(comm, stream, [=] {
        Letters &box = comm->shared->letters[comm->rank][peer];
        for (size_t at = 0; at < bytes; at += LETTER) {
            if (!comm->until([&] { return box.read == box.written; })) return;
            memcpy(box.data, static_cast<const char *>(from) + at, std::min(LETTER, bytes - at));
            box.written++;
        }
    });
}
EXPORTED ncclResult_t ncclRecv(void *to, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                               cudaStream_t stream) {
    size_t bytes = count * width(type);
    return letter(comm, stream, [=] {
        Letters &box = comm->shared->letters[peer][comm->rank];
        for (size_t at = 0; at < bytes; at += LETTER) {
            if (!comm->until([&] { return box.read < box.written; })) return;
            memcpy(static_cast<char *>(to) + at, box.data, std::min(LETTER, bytes - at));
            box.read++;
        }
    });
}
