// gpu/peers.cuh - the other GPUs of a run, and how they send each other bytes (peers.cu).
//
// There is one operation: ranks send bytes. Sums are not its business: a library's order depends on the
// number of GPUs, and so would the bits. add_gradients() in gradients.cu adds in the order of the ranks.
// What is received lies in buffers that all ranks take first, in the same order and with the same sizes. So
// the address of a place here also names that place at any other rank.
#pragma once
#include <memory>
#include <vector>

#include "../model.h"
#include "../program/ranks.h"
#include "arena.cuh"

namespace coat::gpu {

// What this rank and another one send each other. With each other rank, both list theirs in the same order.
struct Transfer {
    int64_t with;         // the other rank
    const uint8_t* send;  // what it gets
    uint8_t* there;       // where: its place has this address here
    int64_t send_bytes;
    uint8_t* receive;  // where its bytes come to
    int64_t receive_bytes;
};

// What travels has a stream of its own. Objects of this class are alone, or in a dry run: nothing travels.
class Peers {
public:
    Peers(const Setup& s, cudaStream_t compute)
        : rank(s.rank), count(s.ranks), processes_(s.processes), compute_(compute),
          stream_(compute == DRY_RUN) {}
    virtual ~Peers() = default;

    const int64_t rank, count;

    bool several() const { return count > 1; }
    cudaStream_t stream() const { return stream_; }
    // What is launched on stream() from now on runs after what the computation has launched so far.
    void wait_for_compute() { now_.record(compute_), now_.make_wait(stream_); }
    // And the other way round.
    void make_compute_wait() {
        if (several()) then_.record(stream_), then_.make_wait(compute_);
    }

    // All transfers of one call belong together; what is launched on stream() afterwards finds them done. The
    // host does not wait. A collective: every rank makes the same calls in the same order. If a rank ends,
    // the others notice it where their hosts wait (Device::wait(), ranks.h): nothing else ends them.
    //
    // Before CUDA loads a kernel, it waits for all GPUs of the process. One that waits for a transfer, which
    // the host of another rank is about to launch, would wait for ever, if that host, in the same process,
    // loads a kernel. So where ranks are threads, their hosts meet before and after they launch transfers.
    void exchange(const std::vector<Transfer>& transfers) {
        meet_threads();
        send(transfers);
        meet_threads();
    }

    // Adds the transfers after which every rank has all of `whole`, of which rank r has the bytes part(r).
    template <class Part> void add_gather(uint8_t* whole, Part part, std::vector<Transfer>& transfers) const {
        uint8_t* const mine = whole + part(rank).first;
        for (int64_t other = 0; other < count; other++)
            if (other != rank)
                transfers.push_back({.with = other,
                                     .send = mine,
                                     .there = mine,
                                     .send_bytes = part(rank).count,
                                     .receive = whole + part(other).first,
                                     .receive_bytes = part(other).count});
    }
    // blocks (count, bytes): every rank has filled its own; afterwards all are filled. The computation waits.
    void all_gather(void* blocks, int64_t bytes) {
        if (!several()) return;
        std::vector<Transfer> transfers;
        auto block = [&](int64_t r) { return Range{r * bytes, bytes}; };
        add_gather(static_cast<uint8_t*>(blocks), block, transfers);
        wait_for_compute();
        exchange(transfers);
        make_compute_wait();
    }

protected:
    virtual void send(const std::vector<Transfer>&) {}
    ProcessGroup* const processes_;

private:
    const cudaStream_t compute_;
    const Stream stream_;
    Event now_, then_;

    void meet_threads() const {
        if (several() && processes_ && processes_->threads) processes_->all_gather(0);
    }
};

// Copy engines move the bytes if all GPUs are in this machine and reach each other's memory: that takes no
// multiprocessor from the computation. Otherwise NCCL does, or if a rank's environment variable COAT_NCCL
// names a library (libnccl.so.2, or a path). compute: the stream of the computation.
std::unique_ptr<Peers> connect_gpus(const Setup& s, Arena& arena, cudaStream_t compute);

}  // namespace coat::gpu
