// ranks.h - the processes of a run: how they start, find each other, exchange bytes and end together
// (ranks.cpp).
//
// A run on several GPUs has one process for each, a rank. Rank 0 has two TCP connections with every other
// rank, for data and for alarms. GPUs exchange gradients and weights by themselves (gpu/comm.cuh). Small
// values and the tensors of a sharded checkpoint go through TCP. On the CPU everything does, so that all
// rules of several ranks are tested without a GPU.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "error.h"

namespace coat {

using Bytes = std::vector<uint8_t>;

double now();  // in seconds, for durations and deadlines; the origin means nothing

// Which process this is. local: its number on this host, which chooses the GPU. port 0: rank 0 chooses a free
// port and starts the other ranks itself.
struct Launch {
    int rank = 0, ranks = 1, local = 0;
    std::string address;  // of rank 0
    int port = 0;
};

// What the environment says: torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT), mpirun
// (OMPI_COMM_WORLD_*, PMI_*), srun (SLURM_*), or this program itself in the processes that it starts
// (COAT_RANK, COAT_RANKS, COAT_LOCAL_RANK, COAT_PORT). One rank if none of them says anything. Error if a
// value is wrong, or contradicts --ranks (0: not given).
Launch find_launch(int64_t ranks_flag);

class ProcessGroup {
public:
    // Connects with the other ranks; rank 0 waits for all of them. If launch.port is 0, rank 0 first starts
    // them on this host, with the command line argv. Error if they are not connected within `seconds`.
    ProcessGroup(const Launch& launch, char** argv, double seconds = 60);
    // Waits until all ranks have come here. An exception that leaves the scope on one rank ends the others,
    // each with exit code 1 and without a message: the rank that has the exception prints it.
    ~ProcessGroup();
    ProcessGroup(const ProcessGroup&) = delete;
    ProcessGroup& operator=(const ProcessGroup&) = delete;

    int rank() const { return launch_.rank; }
    int count() const { return launch_.ranks; }
    int local() const { return launch_.local; }

    // Every rank calls it at the same time. to[p] goes to rank p; the result has what each rank sent here.
    // Both have count() entries of any size.
    std::vector<Bytes> exchange(std::vector<Bytes> to);
    // What every rank has, by rank: a value, or a vector or string of values.
    template <class T>
    std::vector<T> all_gather(const T& mine);

    // Ends all ranks, each with exit code 1, after rank 0 has printed this sentence once. The same happens by
    // itself, with a sentence of its own, when the process of a rank ends in any other way.
    [[noreturn]] void fail(const std::string& sentence);

private:
    struct Connections;
    const Launch launch_;
    std::unique_ptr<Connections> connections_;  // null if there is one rank
};

template <class T>
std::vector<T> ProcessGroup::all_gather(const T& mine) {
    std::vector<T> all;
    if constexpr (std::is_trivially_copyable_v<T>) {
        for (const std::vector<T>& theirs : all_gather(std::vector<T>{mine})) all.push_back(theirs[0]);
    } else {
        const auto* bytes = reinterpret_cast<const uint8_t*>(mine.data());
        const Bytes sent(bytes, bytes + mine.size() * sizeof(mine[0]));
        for (const Bytes& theirs : exchange(std::vector<Bytes>(count(), sent))) {
            const auto* values = reinterpret_cast<const typename T::value_type*>(theirs.data());
            all.emplace_back(values, values + theirs.size() / sizeof(mine[0]));
        }
    }
    return all;
}

}  // namespace coat
