// gpu/ranks.h - what travels between the GPUs of a run, and when (step by step: dev/WALK.md); and the two
// ways in which it does: GPUs of one machine write into each other's memory with their copy engines; others
// send through NCCL.
//
//   gradients   after a bucket's backward: each rank sends to every other rank the gradients that the
//               receiver owns. The receiver adds them in the order of the ranks, in FP32, and rounds once. If
//               sums are FP32 and a micro-batch adds to each once, they have the bits of one GPU that adds up
//               as many micro-batches. (To a tied embedding, and to the head of many tokens, it adds more.)
//   weights     while one stage (gpu/plan.h) computes, the matrices of the stage that comes next in this pass
//               are gathered. Each of the two has a buffer.
#pragma once
#include "run.h"

namespace coat::gpu {

// What this rank and another one send each other. Where two ranks have several transfers with each other,
// both list them in the same order.
struct Transfer {
    int64_t with;         // the other rank
    const uint8_t* send;  // what the other rank gets
    uint8_t* there;       // where it gets it, as the address that the place has at this rank
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
    // behind `begin` on all ranks. So the address of a place here also names that place at any other rank.
    // flags: two for each rank.
    virtual void attach(uint8_t* begin, uint32_t* flags, cudaStream_t stream) = 0;
    // All transfers of one call belong together; what is put on the stream afterwards finds them done. The
    // host does not wait. A collective: every rank makes the same calls in the same order. If a rank ends,
    // the others notice it where their hosts wait (Device::wait()): nothing else ends them.
    virtual void send(const std::vector<Transfer>& transfers, cudaStream_t stream) = 0;
};

// Chooses the transport. Copy engines move the bytes if all GPUs are in this machine and reach each other's
// memory: that takes no multiprocessor from the computation. Otherwise NCCL does; also if the environment
// variable COAT_NCCL of any rank names its library (libnccl.so.2, or a path). NCCL takes its own memory in
// this call. The result is null with one rank.
std::shared_ptr<Transport> connect_gpus(const Setup& s);

// What the other GPUs do in a step (gpu/run.h, Exchange). transport: null with one rank, and in a dry run, in
// which nothing travels.
std::unique_ptr<Exchange> make_exchange(const Device& device, const Memory& memory, Parameters& parameters,
                                        const Scales& scales, std::shared_ptr<Transport> transport);

}  // namespace coat::gpu
