// gpu/peers.cu - how GPUs send each other bytes (peers.cuh): with their copy engines, or through NCCL.
#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
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

// GPUs of one machine write into each other's memory with their copy engines. A process maps the memory of
// the others. Two flags for each pair order the copies, without the host:
//   ready    "my places for exchange n are free"       the receiver sets it at the sender
//   arrived  "what I send in exchange n is there"      the sender sets it at the receiver
// Streams set flags and wait for them by themselves (the driver's stream memory operations).
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
        for (void* memory : others_)
            if (memory && !processes_->threads) cudaIpcCloseMemHandle(memory);
        cudaGetLastError();
        // Memory must not be freed while another process has it open (the manual of cudaIpcOpenMemHandle):
        // all ranks have closed it before one goes on. After an error no rank goes on.
        if (!std::uncaught_exceptions()) processes_->all_gather(0);
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
        for (int64_t i = 1; i < count; i++) flag(write_, at(other(i), ready_ + rank), 0);
        for (int64_t i = 1; i < count; i++) {
            const int64_t to = other(i);
            flag(wait_, ready_ + to, AT_LEAST);
            for (const Transfer& t : transfers)
                if (t.with == to && t.send_bytes) copy(at(to, t.there), t.send, t.send_bytes, stream());
            flag(write_, at(to, arrived_ + rank), 0);
        }
        for (int64_t i = 1; i < count; i++) flag(wait_, arrived_ + other(i), AT_LEAST | flush_);
    }

private:
    uint8_t* const memory_;
    uint32_t *const ready_, *const arrived_;  // flags, by the rank that sets them
    std::vector<void*> others_;               // where the memory of each rank is mapped; null if it is not
    uint32_t number_ = 0;                     // of the exchange; flags only grow
    // What other GPUs have written before the flag must be visible after it: where a GPU reorders such
    // writes, it has this option of waiting.
    static constexpr unsigned AT_LEAST = CU_STREAM_WAIT_VALUE_GEQ;
    const unsigned flush_ =
        device_attribute(cudaDevAttrCanFlushRemoteWrites) ? CU_STREAM_WAIT_VALUE_FLUSH : 0;
    // Sets a flag; waits until a flag is at least the value.
    using StreamFlag = decltype(cuStreamWriteValue32);
    StreamFlag* const write_ = library_function<StreamFlag>(DRIVER, "cuStreamWriteValue32_v2", UPDATE);
    StreamFlag* const wait_ = library_function<StreamFlag>(DRIVER, "cuStreamWaitValue32_v2", UPDATE);

    // Ranks that are threads of one process have the same addresses; of another process, CUDA maps them.
    bool map(const Address& theirs, void*& other) {
        if (!processes_->threads)
            return cudaIpcOpenMemHandle(&other, theirs.handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
        other = theirs.memory;
        const cudaError_t error = cudaDeviceEnablePeerAccess(theirs.device, 0);
        return error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled;
    }
    // The place at a rank that has this address here.
    template <class T> T* at(int64_t at_rank, T* here) const {
        const ptrdiff_t offset = reinterpret_cast<uint8_t*>(here) - memory_;
        return reinterpret_cast<T*>(static_cast<uint8_t*>(others_[at_rank]) + offset);
    }
    void flag(StreamFlag* operation, uint32_t* at, unsigned options) const {
        if (operation(stream(), reinterpret_cast<CUdeviceptr>(at), number_, options) != CUDA_SUCCESS)
            throw Error("The GPUs cannot signal each other; set COAT_NCCL=libnccl.so.2 to use NCCL instead.");
    }
};

// GPUs that do not reach each other's memory, as those of several machines, send through NCCL. It is loaded
// at run time, so that a program that does not use it does not need it.
class Nccl : public Peers {
public:
    Nccl(const Setup& s, cudaStream_t compute, const std::string& file)
        : Peers(s, compute), library_(dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        // NCCL's multicast adds in an order of its own, and some machines forbid it. Nothing here needs it.
        setenv("NCCL_NVLS_ENABLE", "0", 0);
        UniqueId id{};
        if (rank == 0) call<int(UniqueId*)>("ncclGetUniqueId", &id);
        id = s.processes->all_gather(id)[0];
        call<int(void**, int, UniqueId, int)>("ncclCommInitRank", &communicator_, int(count), id, int(rank));
    }
    // Abort does not wait for ranks that have failed; at an orderly end there is nothing left to wait for.
    ~Nccl() override { find<int(void*)>("ncclCommAbort")(communicator_); }

    // A group: NCCL starts all sends and receives together, so that their order cannot make ranks wait in a
    // circle.
    void send(const std::vector<Transfer>& transfers) override {
        call<int()>("ncclGroupStart");
        for (const Transfer& t : transfers) {
            const int with = static_cast<int>(t.with);
            if (t.send_bytes)
                call<Move<const void*>>("ncclSend", t.send, t.send_bytes, BYTE, with, communicator_,
                                        stream());
            if (t.receive_bytes)
                call<Move<void*>>("ncclRecv", t.receive, t.receive_bytes, BYTE, with, communicator_,
                                  stream());
        }
        call<int()>("ncclGroupEnd");
    }

private:
    // What is used of NCCL's interface, as in its documentation. It has been the same since version 2.7.
    struct UniqueId {
        char bytes[128];
    };
    template <class Data>
    using Move = int(Data, size_t, int type, int peer, void* communicator, cudaStream_t);
    static constexpr int SUCCESS = 0, IN_PROGRESS = 7, BYTE = 1;  // ncclSuccess, ncclInProgress, ncclUint8
    void* const library_;                                         // null if there is none
    void* communicator_ = nullptr;

    template <class F> F* find(const char* name) const {
        void* const function = library_ ? dlsym(library_, name) : nullptr;
        if (function) return reinterpret_cast<F*>(function);
        throw Error("NCCL with ", name,
                    " was not found, and GPUs that do not reach each other's memory need ",
                    "it: install libnccl2, or name the file in COAT_NCCL.");
    }
    // Calls the function of this name and of type F.
    template <class F, class... A> void call(const char* name, A... arguments) const {
        const int result = find<F>(name)(arguments...);
        if (result == SUCCESS || result == IN_PROGRESS) return;
        throw Error(name, " failed (", find<const char*(int)>("ncclGetErrorString")(result),
                    "); NCCL_DEBUG=WARN in the environment makes it say more.");
    }
};

}  // namespace

std::unique_ptr<Peers> connect_gpus(const Setup& s, Arena& arena, cudaStream_t compute) {
    uint32_t* const flags = arena.take<uint32_t>(s.ranks > 1 ? 2 * s.ranks : 0);
    if (s.ranks == 1 || compute == DRY_RUN) return std::make_unique<Peers>(s, compute);
    const char* const set = std::getenv("COAT_NCCL");
    const std::string library = set ? set : "";
    bool chosen = false;  // by any rank: a launcher may have set the variable on one host only
    for (const std::string& theirs : s.processes->all_gather(library)) chosen = chosen || !theirs.empty();
    if (!chosen) {
        auto copies = std::make_unique<Copies>(s, compute, arena.begin(), flags);
        if (copies->map_others()) return copies;
    }
    if (s.rank == 0)
        std::printf("The GPUs send through NCCL: %s.\n",
                    chosen ? "COAT_NCCL is set" : "they do not reach each other's memory");
    return std::make_unique<Nccl>(s, compute, library.empty() ? "libnccl.so.2" : library);
}

}  // namespace coat::gpu
