// gpu/comm.cuh - how the GPUs of a run send each other bytes (copies.cu, nccl.cu).
//
// There is one operation: every rank sends some bytes to some others and receives some from them. Sums are
// not its business: a library's order depends on its algorithm and on the number of GPUs, and so would the
// bits. add_gradients() in gradients.cu adds in the order of the ranks.
//
// What is received lies in buffers that all ranks take first, in the same order and with the same sizes. So
// each of them is at the same distance from the beginning of a rank's memory, and the address of a place here
// also names that place at any other rank.
#pragma once
#include <memory>
#include <vector>

#include "../program/model.h"
#include "../program/ranks.h"
#include "arena.cuh"
#include "cuda.cuh"

namespace coat::gpu {

// What goes to another rank, and what comes from it. The n-th transfer between two ranks is the same on both.
struct Transfer {
    int64_t rank;
    const uint8_t* send;
    uint8_t* there;  // where that rank receives it: the address of the same place here
    int64_t send_bytes;
    uint8_t* receive;
    int64_t receive_bytes;
};

class Comm {
public:
    virtual ~Comm() = default;
    // All transfers of one call belong together; what is launched on s afterwards finds them done. The host
    // does not wait. A collective: every rank makes the same calls in the same order. If a rank ends, ranks.h
    // ends the others.
    virtual void exchange(const std::vector<Transfer>& transfers, cudaStream_t s) = 0;
};

// Copy engines move the bytes if all GPUs are in this machine and reach each other's memory: that takes no
// multiprocessor from the computation. Otherwise NCCL does, or if a rank's environment variable COAT_NCCL
// names a library (libnccl.so.2, or a path). Every receive is in the one allocation that begins at `memory`,
// as are the flags, two for each rank.
std::unique_ptr<Comm> connect_gpus(ProcessGroup& processes, uint8_t* memory, uint32_t* flags);
std::unique_ptr<Comm> make_nccl(ProcessGroup& processes, const std::string& library);  // nccl.cu

// The other GPUs of the run. What travels does so on a stream of its own, beside the computation.
class Peers {
public:
    // memory: where the arena begins. compute: the stream of the computation.
    Peers(const Setup& s, uint8_t* memory, Arena& arena, cudaStream_t compute)
        : rank(s.rank), count(s.ranks), compute_(compute), stream_(compute == DRY_RUN) {
        if (!several()) return;
        uint32_t* const flags = arena.take<uint32_t>(2 * count);
        if (compute != DRY_RUN) comm_ = connect_gpus(*s.processes, memory, flags);
    }

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
    void exchange(const std::vector<Transfer>& transfers) {
        if (comm_) comm_->exchange(transfers, stream_);
    }

    // Adds the transfers after which every rank has all of `whole`, of which rank r has the bytes part(r).
    template <class Part> void add_gather(uint8_t* whole, Part part, std::vector<Transfer>& transfers) const {
        const Slice mine = part(rank);
        uint8_t* const here = whole + mine.first;
        for (int64_t r = 0; r < count; r++) {
            const Slice theirs = part(r);
            if (r != rank)
                transfers.push_back({r, here, here, mine.count, whole + theirs.first, theirs.count});
        }
    }
    // blocks (count, bytes): every rank has filled its own; afterwards all are filled. The computation
    // waits for it.
    void all_gather(void* blocks, int64_t bytes) {
        if (!several()) return;
        std::vector<Transfer> transfers;
        auto block = [&](int64_t r) { return Slice{r * bytes, bytes}; };
        add_gather(static_cast<uint8_t*>(blocks), block, transfers);
        wait_for_compute();
        exchange(transfers);
        make_compute_wait();
    }

private:
    const cudaStream_t compute_;
    Stream stream_;
    Event now_, then_;
    std::unique_ptr<Comm> comm_;
};

}  // namespace coat::gpu
