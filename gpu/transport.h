// gpu/transport.h - how GPUs send each other bytes. There are two ways: GPUs of one machine write into each
// other's memory with their copy engines; others send through NCCL.
#pragma once
#include "../common/ranks.h"
#include "cuda.h"

namespace coat::gpu {

// What this rank and another one send each other. Where two ranks have several transfers with each other,
// both list them in the same order.
struct Transfer {
    int64_t with;         // the other rank
    const uint8_t* send;  // what the other rank gets
    // Where it goes: the place at the same offset in the other rank's allocation, given as an address in this
    // rank's (see attach()).
    uint8_t* there;
    int64_t send_bytes;
    uint8_t* receive;  // where this rank gets what the other one sends
    int64_t receive_bytes;
};

// How GPUs send each other bytes: that is its one operation. Gradients are added by add_gradients(), in the
// order of the ranks. A library such as NCCL could add them on the way, but the order in which it adds
// depends on the number of GPUs, and so would the bits.
class Transport {
public:
    virtual ~Transport() = default;
    // To be called before the first send(), on all ranks at the same time. What is received lies equally far
    // after `begin` on all ranks. So the address of a place here also names that place at any other rank.
    // flags: two for each rank. stream: what is sent is put on it.
    virtual void attach(uint8_t* begin, uint32_t* flags, cudaStream_t stream) = 0;
    // All transfers of one call belong together; what is put on the stream afterwards finds them done. The
    // host does not wait. A collective: every rank makes the same calls in the same order. If a rank ends,
    // the others notice it where their hosts wait (GpuContext::wait()): nothing else ends them.
    virtual void send(const std::vector<Transfer>& transfers) = 0;
};

// Chooses the transport. Copy engines move the bytes if all GPUs are in this machine and reach each other's
// memory: that takes no multiprocessor from the computation. Otherwise, or if the environment variable
// COAT_NCCL of any rank names NCCL's library (libnccl.so.2, or a path), NCCL moves them. It allocates its own
// memory in this call. The result is null with one rank.
std::shared_ptr<Transport> connect_gpus(const RunSettings& s);

}  // namespace coat::gpu
