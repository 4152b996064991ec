// gpu/comm.cuh - how the GPUs of a run send each other bytes (copies.cu, nccl.cu).
//
// There is one operation: every rank sends some bytes to some others and receives some from them. Sums are
// not its business: a library's order depends on its algorithm and on the number of GPUs, and so would the
// bits. model.cu adds in the order of the ranks.
#pragma once
#include <memory>
#include <vector>

#include "../ranks.h"
#include "tensor.cuh"

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
std::unique_ptr<Comm> connect_gpus(Ranks& group, void* memory);
std::unique_ptr<Comm> make_nccl(Ranks& group, const std::string& library);  // nccl.cu

}  // namespace coat::gpu
