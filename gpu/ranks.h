// gpu/ranks.h - what travels between the GPUs of a run, and when (step by step: dev/WALK.md); and the two
// ways in which it does: GPUs of one machine write into each other's memory with their copy engines; others
// send through NCCL.
//
//   gradients   after a bucket's backward: each rank sends to every other rank the gradients that the
//               receiver owns. The receiver adds them in the order of the ranks, in FP32, and rounds once. If
//               sums are FP32 and a micro-batch adds to each once, they have the bits of one GPU that adds up
//               as many micro-batches. (To a tied embedding, and to the head of many tokens, it adds more.)
//   weights     while one stage (gpu/run.h) computes, the matrices of the stage that comes next in this pass
//               are gathered. Each of the two has a buffer.
#pragma once
#include "run.h"

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

// How GPUs send each other bytes. There is one operation. Sums are not its business: a library's order
// depends on the number of GPUs, and so would the bits. add_gradients() adds in the order of the ranks.
class Transport {
public:
    virtual ~Transport() = default;
    // Before the first send(), on all ranks at the same time. What is received lies in memory that has the
    // same place after `begin` on all ranks. So the address of a place here also names that place at any
    // other rank. flags: two for each rank.
    virtual void attach(uint8_t* begin, uint32_t* flags, cudaStream_t stream) = 0;
    // All transfers of one call belong together; what is put on the stream afterwards finds them done. The
    // host does not wait. A collective: every rank makes the same calls in the same order. If a rank ends,
    // the others notice it where their hosts wait (Device::wait()): nothing else ends them.
    virtual void send(const std::vector<Transfer>& transfers, cudaStream_t stream) = 0;
};

// Copy engines move the bytes if all GPUs are in this machine and reach each other's memory: that takes no
// multiprocessor from the computation. Otherwise NCCL does, or if a rank's environment variable COAT_NCCL
// names a library (libnccl.so.2, or a path). NCCL takes its own memory here. Null with one rank.
std::shared_ptr<Transport> connect_gpus(const Setup& s);

// The part of the other GPUs in a step; with one rank nothing (gpu/run.h). transport: null with one rank, and
// in a dry run, in which nothing travels.
std::unique_ptr<Exchange> make_exchange(const Device& device, const Memory& memory, Parameters& parameters,
                                        const Scales& scales, std::shared_ptr<Transport> transport);

}  // namespace coat::gpu
