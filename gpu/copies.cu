// gpu/copies.cu - GPUs of one machine write into each other's memory with their copy engines (peers.cuh).
//
// A process maps the memory of the others. Two flags for each pair order the copies, without the host:
//   ready    "my places for exchange n are free"       the receiver sets it at the sender
//   arrived  "what I send in exchange n is there"      the sender sets it at the receiver
// Streams set flags and wait for them by themselves (the driver's stream memory operations).
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "peers.cuh"

namespace coat::gpu {
namespace {

// What a rank tells the others, so that they can map its memory.
struct Address {
    char machine[40];
    int device;
    void* memory;
    cudaIpcMemHandle_t handle;
};

class Copies : public Peers {
public:
    // flags: two for each rank.
    Copies(const Setup& s, cudaStream_t compute, uint8_t* memory, uint32_t* flags)
        : Peers(s, compute), memory_(memory), ready_(flags), arrived_(flags + count), others_(count) {
        check(cudaMemset(flags, 0, 2 * count * sizeof(uint32_t)), "Clearing memory failed");
        check(cudaDeviceSynchronize(), "Clearing memory failed");
    }
    ~Copies() override {
        // Copies may be in flight, which wait for another rank.
        processes_->wait_until([&] { return cudaStreamQuery(stream()) != cudaErrorNotReady; });
        cudaDeviceSynchronize();
        for (const Other& o : others_)
            if (o.mapped) cudaIpcCloseMemHandle(o.memory);
        cudaGetLastError();
    }

    // Whether every rank reaches the memory of every other: all ranks get the same answer.
    bool map_others() {
        Address mine{{}, 0, memory_, {}};
        std::ifstream("/proc/sys/kernel/random/boot_id").read(mine.machine, sizeof mine.machine - 1);
        check(cudaGetDevice(&mine.device), "Asking for the GPU failed");
        bool mapped = mine.machine[0] && cudaIpcGetMemHandle(&mine.handle, memory_) == cudaSuccess;
        const std::vector<Address> all = processes_->all_gather(mine);
        for (int64_t r = 0; r < count && mapped; r++)
            mapped = r == rank || (!std::strcmp(all[r].machine, mine.machine) && map(all[r], others_[r]));
        cudaGetLastError();
        for (int theirs : processes_->all_gather(int(mapped))) mapped = mapped && theirs;
        return mapped;
    }

    // Tells every sender that the places here are free. Then, for one receiver after the other: waits until
    // its places are free, copies, and tells it that all has arrived. At last waits for what the others send.
    void send(const std::vector<Transfer>& transfers) override {
        number_++;
        auto other = [&](int64_t i) { return (rank + i) % count; };  // each rank begins with another one
        for (int64_t i = 1; i < count; i++) flag(write_, at(other(i), ready_ + rank));
        for (int64_t i = 1; i < count; i++) {
            const int64_t to = other(i);
            flag(wait_, ready_ + to);
            for (const Transfer& t : transfers)
                if (t.from == rank && t.to == to && t.bytes)
                    copy(at(to, t.receive), t.send, t.bytes, stream());
            flag(write_, at(to, arrived_ + rank));
        }
        for (int64_t i = 1; i < count; i++) flag(wait_, arrived_ + other(i));
    }

private:
    struct Other {
        void* memory = nullptr;
        bool mapped = false;  // to be closed; ranks that are threads of one process share addresses
    };
    uint8_t* const memory_;
    uint32_t *const ready_, *const arrived_;  // flags, by the rank that sets them
    std::vector<Other> others_;
    uint32_t number_ = 0;  // of the exchange; flags only grow
    // Sets a flag; waits until a flag is at least the value (with the option 0).
    using StreamFlag = decltype(cuStreamWriteValue32);
    StreamFlag* const write_ = library_function<StreamFlag>(DRIVER, "cuStreamWriteValue32_v2", UPDATE);
    StreamFlag* const wait_ = library_function<StreamFlag>(DRIVER, "cuStreamWaitValue32_v2", UPDATE);

    // Ranks that are threads of one process have the same addresses; of another process, CUDA maps them.
    bool map(const Address& theirs, Other& other) {
        if (processes_->threads) {
            other.memory = theirs.memory;
            const cudaError_t error = cudaDeviceEnablePeerAccess(theirs.device, 0);
            return error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled;
        }
        other.mapped =
            cudaIpcOpenMemHandle(&other.memory, theirs.handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
        return other.mapped;
    }
    // The place at a rank that has this address here.
    template <class T> T* at(int64_t at_rank, T* here) const {
        const ptrdiff_t offset = reinterpret_cast<uint8_t*>(here) - memory_;
        return reinterpret_cast<T*>(static_cast<uint8_t*>(others_[at_rank].memory) + offset);
    }
    void flag(StreamFlag* operation, uint32_t* at) const {
        if (operation(stream(), reinterpret_cast<CUdeviceptr>(at), number_, 0) != CUDA_SUCCESS)
            throw Error("The GPUs cannot signal each other; set COAT_NCCL=libnccl.so.2 to use NCCL instead.");
    }
};

}  // namespace

std::unique_ptr<Peers> connect_gpus(const Setup& s, uint8_t* memory, Arena& arena, cudaStream_t compute) {
    uint32_t* const flags = arena.take<uint32_t>(s.ranks > 1 ? 2 * s.ranks : 0);
    if (s.ranks == 1 || compute == DRY_RUN) return std::make_unique<Peers>(s, compute);
    const char* const set = std::getenv("COAT_NCCL");
    const std::string library = set ? set : "";
    bool chosen = false;  // by any rank: a launcher may have set the variable on one host only
    for (const std::string& theirs : s.processes->all_gather(library)) chosen = chosen || !theirs.empty();
    if (!chosen) {
        auto copies = std::make_unique<Copies>(s, compute, memory, flags);
        if (copies->map_others()) return copies;
    }
    if (s.rank == 0)
        std::printf("The GPUs send through NCCL: %s.\n",
                    chosen ? "COAT_NCCL is set" : "they do not reach each other's memory");
    return connect_by_nccl(s, compute, library.empty() ? "libnccl.so.2" : library);
}

}  // namespace coat::gpu
