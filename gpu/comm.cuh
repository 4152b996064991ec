// gpu/comm.cuh - how the GPUs of a run send each other bytes (copies.cu, nccl.cu).
//
// There is one operation: every rank sends some bytes to some others and receives some from them. Sums are
// not its business: a library's order depends on its algorithm and on the number of GPUs, and so would the
// bits. add_gradients() in gradients.cu adds in the order of the ranks.
#pragma once
#include <memory>
#include <vector>

#include "../program/model.h"
#include "../program/ranks.h"
#include "cuda.cuh"

namespace coat::gpu {

// What goes to another rank, and what comes from it. The n-th transfer between two ranks is the same on both.
struct Transfer {
    int64_t rank;
    const void* send;
    int64_t send_bytes;
    void* receive;
    int64_t receive_bytes;
};

class Comm {
public:
    virtual ~Comm() = default;
    // All transfers of one call belong together; what is launched on s afterwards finds them done. The host
    // does not wait, except when a key is used for the first time. The same key stands for the same transfers
    // every time. A collective: every rank makes the same calls in the same order. If a rank ends, ranks.h
    // ends the others.
    virtual void exchange(int64_t key, const std::vector<Transfer>& transfers, cudaStream_t s) = 0;
};

// Copy engines move the bytes if all GPUs are in this machine and reach each other's memory: that takes no
// multiprocessor from the computation. Otherwise NCCL does, or if a rank's environment variable COAT_NCCL
// names a library (libnccl.so.2, or a path). Every receive is in the one allocation that begins at `memory`.
std::unique_ptr<Comm> connect_gpus(ProcessGroup& processes, void* memory);
std::unique_ptr<Comm> make_nccl(ProcessGroup& processes, const std::string& library);  // nccl.cu

// The other GPUs of the run. What travels does so on a stream of its own, beside the computation.
class Peers {
public:
    // memory: the allocation in which everything is that travels. compute: the stream of the computation.
    Peers(const Setup& s, void* memory, cudaStream_t compute)
        : rank(s.rank), count(s.ranks), compute_(compute), stream_(compute == DRY_RUN),
          comm_(count > 1 && compute != DRY_RUN ? connect_gpus(*s.processes, memory) : nullptr) {}

    const int64_t rank, count;

    bool several() const { return count > 1; }
    // What a rank owns of a parameter (model.h, slice_of), and its elements with padding.
    Slice own(const Param& p, int64_t r) const { return slice_of(p.size(), r, count); }
    int64_t padded(const Param& p, int64_t r) const { return coat::padded(own(p, r)); }

    cudaStream_t stream() const { return stream_; }
    // What is launched on stream() from now on runs after what the computation has launched so far.
    void wait_for_compute() { now_.record(compute_), now_.make_wait(stream_); }
    // And the other way round.
    void make_compute_wait() {
        if (several()) then_.record(stream_), then_.make_wait(compute_);
    }
    // The key of an exchange: its topic, and a number within the topic.
    enum class Topic : int64_t { Gradients, Vectors, Gather, Amaxes, Squares };
    void exchange(Topic topic, int64_t number, const std::vector<Transfer>& transfers) {
        if (comm_) comm_->exchange(static_cast<int64_t>(topic) << 32 | number, transfers, stream_);
    }

    // blocks (count, bytes): every rank has filled its own; afterwards all are filled. The computation
    // waits for it.
    void all_gather(Topic topic, int64_t number, void* blocks, int64_t bytes) {
        if (!several()) return;
        uint8_t* const all = static_cast<uint8_t*>(blocks);
        std::vector<Transfer> transfers;
        for (int64_t r = 0; r < count; r++)
            if (r != rank) transfers.push_back({r, all + rank * bytes, bytes, all + r * bytes, bytes});
        wait_for_compute();
        exchange(topic, number, transfers);
        make_compute_wait();
    }
    // whole has p.padded_size() elements of `each` bytes, of which this rank has what it owns, at `mine`.
    // Adds the transfers that complete it on every rank.
    void add_gather(const Param& p, int64_t each, const void* mine, uint8_t* whole,
                    std::vector<Transfer>& transfers) const {
        for (int64_t r = 0; r < count; r++)
            if (r != rank)
                transfers.push_back(
                    {r, mine, padded(p, rank) * each, whole + own(p, r).first * each, padded(p, r) * each});
    }

private:
    const cudaStream_t compute_;
    Stream stream_;
    Event now_, then_;
    std::unique_ptr<Comm> comm_;
};

}  // namespace coat::gpu
