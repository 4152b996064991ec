// gpu/copies.cu - GPUs of one machine write into each other's memory with their copy engines (comm.cuh).
//
// A process maps the memory of the others. Two flags for each pair order the copies, without the host:
//   ready    "my places for exchange n are free"       the receiver sets it at the sender
//   arrived  "what I send in exchange n is there"      the sender sets it at the receiver
// Streams set flags and wait for them by themselves (the driver's stream memory operations).
#include <cuda.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <random>

#include "comm.cuh"

namespace coat::gpu {
namespace {

// What a rank tells the others, so that they can map its memory.
struct Address {
    char machine[40];
    uint64_t process;  // a random number: processes of two containers can have the same pid
    int device;
    void* memory;
    cudaIpcMemHandle_t handle;
};

class Copies : public Comm {
public:
    Copies(ProcessGroup& processes, uint8_t* memory, uint32_t* flags)
        : processes_(processes), me_(processes.rank()), ranks_(processes.count()), memory_(memory),
          ready_(flags), arrived_(flags + ranks_), peers_(ranks_) {
        check(cudaMemset(flags, 0, 2 * ranks_ * sizeof(uint32_t)), "Clearing memory failed");
        check(cudaDeviceSynchronize(), "Clearing memory failed");
    }
    ~Copies() override {
        // Copies may be in flight, which wait for another rank.
        if (stream_) processes_.wait_until([&] { return cudaStreamQuery(stream_) != cudaErrorNotReady; });
        cudaDeviceSynchronize();
        for (const Peer& p : peers_)
            if (p.mapped) cudaIpcCloseMemHandle(p.memory);
        cudaGetLastError();
    }

    // Whether every rank reaches the memory of every other: all ranks get the same answer. CUDA may be unable
    // to share memory, say in a container without the right to.
    bool map_others() {
        static const uint64_t process = uint64_t(std::random_device{}()) << 32 | uint32_t(getpid());
        Address mine{{}, process, 0, memory_, {}};
        std::ifstream("/proc/sys/kernel/random/boot_id").read(mine.machine, sizeof mine.machine - 1);
        check(cudaGetDevice(&mine.device), "Asking for the GPU failed");
        bool mapped =
            write_ && wait_ && mine.machine[0] && cudaIpcGetMemHandle(&mine.handle, memory_) == cudaSuccess;
        const std::vector<Address> all = processes_.all_gather(mine);
        for (int r = 0; r < ranks_ && mapped; r++)
            mapped = r == me_ || (!std::strcmp(all[r].machine, mine.machine) && map(all[r], mine, peers_[r]));
        cudaGetLastError();
        for (int theirs : processes_.all_gather(int(mapped))) mapped = mapped && theirs;
        return mapped;
    }

    // Tells every sender that the places here are free. Then, for one receiver after the other: waits until
    // its places are free, copies, and tells it that all has arrived. At last waits for what the others send.
    void exchange(const std::vector<Transfer>& transfers, cudaStream_t s) override {
        number_++, stream_ = s;
        for (int i = 1; i < ranks_; i++) flag(write_, at((me_ + i) % ranks_, ready_ + me_));
        for (int i = 1; i < ranks_; i++) {  // each rank begins with another one
            const int to = (me_ + i) % ranks_;
            flag(wait_, ready_ + to);
            for (const Transfer& t : transfers)
                if (t.rank == to && t.send_bytes) copy(at(to, t.there), t.send, t.send_bytes, s);
            flag(write_, at(to, arrived_ + me_));
        }
        for (int i = 1; i < ranks_; i++) flag(wait_, arrived_ + (me_ + i) % ranks_);
    }

private:
    struct Peer {
        void* memory = nullptr;
        bool mapped = false;  // to be closed; ranks that are threads of one process share addresses
    };
    ProcessGroup& processes_;
    const int me_, ranks_;
    uint8_t* const memory_;
    uint32_t *const ready_, *const arrived_;  // flags, by the rank that sets them
    std::vector<Peer> peers_;
    uint32_t number_ = 0;            // of the exchange; flags only grow
    cudaStream_t stream_ = nullptr;  // of the last exchange
    // Sets a flag; waits until a flag is at least the value (with the option 0).
    using StreamFlag = decltype(&cuStreamWriteValue32);
    const StreamFlag write_ = driver_function<StreamFlag>("cuStreamWriteValue32");
    const StreamFlag wait_ = driver_function<StreamFlag>("cuStreamWaitValue32");

    // Ranks that are threads of one process have the same addresses; of another process, CUDA maps them.
    bool map(const Address& theirs, const Address& mine, Peer& peer) {
        if (theirs.process == mine.process) {
            peer.memory = theirs.memory;
            const cudaError_t error = cudaDeviceEnablePeerAccess(theirs.device, 0);
            return error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled;
        }
        peer.mapped =
            cudaIpcOpenMemHandle(&peer.memory, theirs.handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
        return peer.mapped;
    }
    // The place at a rank that has this address here.
    template <class T> T* at(int rank, T* here) const {
        const ptrdiff_t offset = reinterpret_cast<uint8_t*>(here) - memory_;
        return reinterpret_cast<T*>(static_cast<uint8_t*>(peers_[rank].memory) + offset);
    }
    void flag(StreamFlag operation, uint32_t* at) const {
        if (operation(stream_, reinterpret_cast<CUdeviceptr>(at), number_, 0) != CUDA_SUCCESS)
            throw Error("The GPUs cannot signal each other; set COAT_NCCL=libnccl.so.2 to use NCCL instead.");
    }
};

}  // namespace

std::unique_ptr<Comm> connect_gpus(ProcessGroup& processes, uint8_t* memory, uint32_t* flags) {
    const char* const set = std::getenv("COAT_NCCL");
    const std::string library = set ? set : "";
    bool chosen = false;  // by any rank: a launcher may have set the variable on one host only
    for (const std::string& theirs : processes.all_gather(library)) chosen = chosen || !theirs.empty();
    if (!chosen) {
        auto copies = std::make_unique<Copies>(processes, memory, flags);
        if (copies->map_others()) return copies;
    }
    if (processes.rank() == 0)
        std::printf("The GPUs send through NCCL: %s.\n",
                    chosen ? "COAT_NCCL is set" : "they do not reach each other's memory");
    return make_nccl(processes, library.empty() ? "libnccl.so.2" : library);
}

}  // namespace coat::gpu
