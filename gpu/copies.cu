// gpu/copies.cu - GPUs of one machine write into each other's memory with their copy engines (comm.cuh).
//
// A process maps the memory of the others. Two flags for each pair order the copies, without the host:
//   ready    "my places for exchange n are free"       the receiver sets it at the sender
//   arrived  "what I send in exchange n is there"      the sender sets it at the receiver
// Streams set flags and wait for them by themselves (the driver's stream memory operations).
#include <cuda.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <random>

#include "comm.cuh"
#include "cuda.cuh"

namespace coat::gpu {
namespace {

// What a rank tells the others, so that they can map its memory.
struct Address {
    char machine[40];
    uint64_t process;  // a random number: processes of two containers can have the same pid
    int device;
    uint8_t* memory;
    uint32_t* flags;
    cudaIpcMemHandle_t memory_handle, flags_handle;
};

// machine is empty if CUDA cannot share this memory, say in a container without the right to.
Address address_of(uint8_t* memory, uint32_t* flags) {
    Address address{};
    std::ifstream("/proc/sys/kernel/random/boot_id").read(address.machine, sizeof address.machine - 1);
    static const uint64_t process = uint64_t(std::random_device{}()) << 32 | uint32_t(getpid());
    address.process = process;
    check(cudaGetDevice(&address.device), "Asking for the GPU failed");
    address.memory = memory, address.flags = flags;
    if (cudaIpcGetMemHandle(&address.memory_handle, memory) != cudaSuccess ||
        cudaIpcGetMemHandle(&address.flags_handle, flags) != cudaSuccess)
        address.machine[0] = 0, cudaGetLastError();
    return address;
}

class Copies : public Comm {
public:
    explicit Copies(ProcessGroup& processes)
        : processes_(processes), ranks_(processes.count()), peers_(ranks_) {
        check(cudaMalloc(&flags_, 2 * ranks_ * sizeof(uint32_t)), "Allocating the GPU's memory failed");
        check(cudaMemset(flags_, 0, 2 * ranks_ * sizeof(uint32_t)), "Clearing memory failed");
        check(cudaDeviceSynchronize(), "Clearing memory failed");
    }
    ~Copies() override {
        // Copies may be in flight, which wait for another rank.
        if (stream_) processes_.wait_until([&] { return cudaStreamQuery(stream_) != cudaErrorNotReady; });
        cudaDeviceSynchronize();
        for (const Peer& p : peers_)
            if (p.mapped) cudaIpcCloseMemHandle(p.memory), cudaIpcCloseMemHandle(p.flags);
        cudaFree(flags_);
        cudaGetLastError();
    }

    // Whether every rank reaches the memory of every other: all ranks get the same answer.
    bool map_others(void* memory) {
        memory_ = static_cast<uint8_t*>(memory);
        const Address mine = address_of(memory_, flags_);
        const std::vector<Address> addresses = processes_.all_gather(mine);
        bool mapped = write_ && wait_ && mine.machine[0];
        for (int r = 0; r < ranks_ && mapped; r++)
            mapped = r == processes_.rank() ||
                     (!std::strcmp(addresses[r].machine, mine.machine) && map(addresses[r], mine, peers_[r]));
        cudaGetLastError();
        for (int theirs : processes_.all_gather(int(mapped))) mapped = mapped && theirs;
        return mapped;
    }

    // Tells every sender that the places here are free. Then, for one receiver after the other: waits until
    // its places are free, copies, and tells it that all has arrived. At last waits for what the others send.
    void exchange(int64_t key, const std::vector<Transfer>& transfers, cudaStream_t s) override {
        const std::vector<uint8_t*>& places = places_of(key, transfers);
        const int me = processes_.rank();
        number_++, stream_ = s;
        for (int i = 1; i < ranks_; i++) flag(write_, peers_[(me + i) % ranks_].flags + me, s);
        for (int i = 1; i < ranks_; i++) {  // each rank begins with another one
            const int to = (me + i) % ranks_;
            flag(wait_, flags_ + to, s);
            for (size_t t = 0; t < transfers.size(); t++)
                if (transfers[t].rank == to && transfers[t].send_bytes)
                    check(cudaMemcpyAsync(places[t], transfers[t].send, transfers[t].send_bytes,
                                          cudaMemcpyDeviceToDevice, s),
                          "Copying to another GPU failed");
            flag(write_, peers_[to].flags + ranks_ + me, s);
        }
        for (int i = 1; i < ranks_; i++) flag(wait_, flags_ + ranks_ + (me + i) % ranks_, s);
    }

private:
    struct Peer {
        uint8_t* memory = nullptr;
        uint32_t* flags = nullptr;  // ready by rank, then arrived by rank
        bool mapped = false;        // to be closed; ranks that are threads of one process share addresses
    };
    ProcessGroup& processes_;
    const int ranks_;
    std::vector<Peer> peers_;
    uint8_t* memory_ = nullptr;
    uint32_t* flags_ = nullptr;
    uint32_t number_ = 0;            // of the exchange; flags only grow
    cudaStream_t stream_ = nullptr;  // of the last exchange
    // Sets a flag; waits until a flag is at least the value (with the option 0).
    using StreamFlag = decltype(&cuStreamWriteValue32);
    const StreamFlag write_ = driver_function<StreamFlag>("cuStreamWriteValue32");
    const StreamFlag wait_ = driver_function<StreamFlag>("cuStreamWaitValue32");
    using Receive = std::array<int64_t, 2>;  // the rank that sends, and the offset in memory_
    struct Places {
        std::vector<Receive> receives;
        std::vector<uint8_t*> sends;  // addresses in the others' memory
    };
    std::map<int64_t, Places> places_;  // by key

    // Ranks that are threads of one process have the same addresses; of another process, CUDA maps them.
    bool map(const Address& address, const Address& mine, Peer& peer) {
        if (address.process == mine.process) {
            const cudaError_t error = cudaDeviceEnablePeerAccess(address.device, 0);
            peer.memory = address.memory, peer.flags = address.flags;
            return error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled;
        }
        auto open = [](auto** to, const cudaIpcMemHandle_t& handle) {
            return cudaIpcOpenMemHandle(reinterpret_cast<void**>(to), handle,
                                        cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
        };
        if (!open(&peer.memory, address.memory_handle)) return false;
        peer.mapped = open(&peer.flags, address.flags_handle);
        if (!peer.mapped) cudaIpcCloseMemHandle(peer.memory);
        return peer.mapped;
    }
    void flag(StreamFlag operation, uint32_t* at, cudaStream_t s) const {
        if (operation(s, reinterpret_cast<CUdeviceptr>(at), number_, 0) != CUDA_SUCCESS)
            throw Error("The GPUs cannot signal each other; set COAT_NCCL=libnccl.so.2 to use NCCL instead.");
    }
    // Where each transfer's bytes go in the other's memory. It tells us the first time that a key is used.
    const std::vector<uint8_t*>& places_of(int64_t key, const std::vector<Transfer>& transfers) {
        std::vector<Receive> receives;
        for (const Transfer& t : transfers)
            receives.push_back({t.rank, static_cast<uint8_t*>(t.receive) - memory_});
        const auto [found, first_time] = places_.try_emplace(key);
        Places& places = found->second;
        if (first_time) {
            places.receives = receives;
            const std::vector<std::vector<Receive>> all = processes_.all_gather(receives);
            std::vector<size_t> next(all.size());  // by rank: the first of its receives that is still to come
            for (const Transfer& t : transfers) {
                size_t& i = next[t.rank];
                while (all[t.rank].at(i)[0] != processes_.rank()) i++;
                places.sends.push_back(peers_[t.rank].memory + all[t.rank][i++][1]);
            }
        }
        require(places.receives == receives, "a key of exchange() stands for other transfers");
        return places.sends;
    }
};

}  // namespace

std::unique_ptr<Comm> connect_gpus(ProcessGroup& processes, void* memory) {
    const char* const set = std::getenv("COAT_NCCL");
    const std::string library = set ? set : "";
    bool chosen = false;  // by any rank: a launcher may have set the variable on one host only
    for (const std::string& theirs : processes.all_gather(library)) chosen = chosen || !theirs.empty();
    if (!chosen) {
        auto copies = std::make_unique<Copies>(processes);
        if (copies->map_others(memory)) return copies;
    }
    if (processes.rank() == 0)
        std::printf("The GPUs send through NCCL: %s.\n",
                    chosen ? "COAT_NCCL is set" : "they do not reach each other's memory");
    return make_nccl(processes, library.empty() ? "libnccl.so.2" : library);
}

}  // namespace coat::gpu
