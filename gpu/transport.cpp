// gpu/transport.cpp - how GPUs send each other bytes (gpu/transport.h): through copy engines or NCCL.
#include "transport.h"

#include <cuda.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <fstream>

#include "handles.h"
#include "libraries.h"
#include "memory_layout.h"

namespace coat::gpu {
namespace {

// What a rank tells the others, so that they can map its memory.
struct Address {
    char machine[40];
    int device;
    void* memory;
    cudaIpcMemHandle_t handle;
};

// An allocation at every rank, mapped into this process.
class MappedMemory {
public:
    MappedMemory(const RunSettings& s, uint8_t* mine)
        : rank_(s.rank), processes_(*s.communicator), mine_(mine), others_(size_t(s.ranks)) {}
    // Memory must not be freed while another process has it open (the manual of cudaIpcOpenMemHandle): all
    // ranks have closed it before one goes on. After an error no rank goes on.
    ~MappedMemory() {
        for (void* memory : others_)
            if (memory && !processes_.ranks_are_threads) cudaIpcCloseMemHandle(memory);
        cudaGetLastError();
        if (!std::uncaught_exceptions()) processes_.all_gather(0);
    }
    MappedMemory(const MappedMemory&) = delete;

    // Whether every rank reaches the memory of every other: all ranks get the same answer.
    bool map() {
        Address mine{.machine = {}, .device = 0, .memory = mine_, .handle = {}};
        std::ifstream("/proc/sys/kernel/random/boot_id").read(mine.machine, sizeof mine.machine - 1);
        check(cudaGetDevice(&mine.device), "Asking for the GPU failed");
        bool mapped = mine.machine[0] && cudaIpcGetMemHandle(&mine.handle, mine_) == cudaSuccess;
        const std::vector<Address> all = processes_.all_gather(mine);
        for (size_t r = 0; r < all.size() && mapped; r++) {
            if (int64_t(r) == rank_) continue;
            mapped = std::strcmp(all[r].machine, mine.machine) == 0 && map_memory_of(all[r], others_[r]);
        }
        cudaGetLastError();
        for (int theirs : processes_.all_gather(int(mapped))) mapped = mapped && theirs;
        return mapped;
    }
    // The place at another rank that corresponds to this address at this rank.
    template <class T> T* address_at(int64_t rank, T* here) const {
        const ptrdiff_t offset = reinterpret_cast<uint8_t*>(here) - mine_;
        return reinterpret_cast<T*>(static_cast<uint8_t*>(others_[size_t(rank)]) + offset);
    }

private:
    const int64_t rank_;
    Communicator& processes_;
    uint8_t* const mine_;
    std::vector<void*> others_;  // by rank; null if it is not mapped

    // Ranks that are threads of one process share its addresses. The memory of another process is mapped by
    // CUDA.
    bool map_memory_of(const Address& theirs, void*& other) const {
        if (!processes_.ranks_are_threads)
            return cudaIpcOpenMemHandle(&other, theirs.handle, cudaIpcMemLazyEnablePeerAccess) == cudaSuccess;
        other = theirs.memory;
        const cudaError_t error = cudaDeviceEnablePeerAccess(theirs.device, 0);
        return error == cudaSuccess || error == cudaErrorPeerAccessAlreadyEnabled;
    }
};

// GPUs of one machine write into each other's memory with their copy engines. Two flags for each pair order
// the copies, without the host:
//   ready    "my places for exchange n are free"       the receiver sets it at the sender
//   arrived  "what I send in exchange n is there"      the sender sets it at the receiver
// Streams set flags and wait for them by themselves (the driver's stream memory operations).
class CopyEngines : public Transport {
public:
    explicit CopyEngines(const RunSettings& s) : settings_(s) {}
    ~CopyEngines() override {
        if (!memory_ || std::uncaught_exceptions()) return;
        // Copies may be in flight that wait for another rank.
        settings_.communicator->wait_until(
            [&] { return cudaStreamQuery(comm_stream_) != cudaErrorNotReady; });
        cudaDeviceSynchronize();
    }

    void attach(uint8_t* begin, uint32_t* flags, cudaStream_t stream) override {
        comm_stream_ = stream;
        ready_ = flags;
        arrived_ = flags + settings_.ranks;
        check(cudaMemset(flags, 0, size_t(2 * settings_.ranks) * sizeof(uint32_t)), "Clearing memory failed");
        check(cudaDeviceSynchronize(), "Clearing memory failed");
        memory_ = std::make_unique<MappedMemory>(settings_, begin);
        if (!memory_->map())
            throw Error("The GPUs do not reach each other's memory any more; set COAT_NCCL=libnccl.so.2.");
    }

    // First tells every sender that the places here are free. Then, for one receiver after the other: waits
    // until its places are free, copies, and tells it that everything has arrived. At last waits until what
    // the others send has arrived.
    void send(const std::vector<Transfer>& transfers) override {
        exchange_number_++;
        const int64_t me = settings_.rank, count = settings_.ranks;
        auto other = [&](int64_t i) { return (me + i) % count; };  // each rank begins with another one
        for (int64_t i = 1; i < count; i++) set_flag(memory_->address_at(other(i), ready_ + me));
        for (int64_t i = 1; i < count; i++) {
            const int64_t to = other(i);
            wait_for_flag(ready_ + to);
            for (const Transfer& t : transfers)
                if (t.with == to && t.send_bytes)
                    copy_async(memory_->address_at(to, t.there), t.send, t.send_bytes, comm_stream_);
            set_flag(memory_->address_at(to, arrived_ + me));
        }
        for (int64_t i = 1; i < count; i++) wait_for_flag(arrived_ + other(i), flush_);
    }

private:
    const RunSettings settings_;
    cudaStream_t comm_stream_ = nullptr;
    uint32_t *ready_ = nullptr, *arrived_ = nullptr;  // flags, by the rank that sets them
    std::unique_ptr<MappedMemory> memory_;
    uint32_t exchange_number_ = 0;  // of the last send(); flags only grow
    // What another GPU has written before it sets a flag must be visible after the wait for this flag. GPUs
    // that may reorder such writes have an option for the wait, flush_, which forbids it.
    const unsigned flush_ =
        device_attribute(cudaDevAttrCanFlushRemoteWrites) ? CU_STREAM_WAIT_VALUE_FLUSH : 0;
    using FlagOperation = decltype(cuStreamWriteValue32);  // that of the wait is the same
    FlagOperation* const write_value_ =
        library_function<FlagOperation>(DRIVER, "cuStreamWriteValue32_v2", CURE_OLD_DRIVER);
    FlagOperation* const wait_value_ =
        library_function<FlagOperation>(DRIVER, "cuStreamWaitValue32_v2", CURE_OLD_DRIVER);

    // Sets a flag to the number of this exchange.
    void set_flag(uint32_t* flag) const { put_on_stream(write_value_, flag, 0); }
    // Waits until a flag is at least the number of this exchange.
    void wait_for_flag(uint32_t* flag, unsigned flush = 0) const {
        put_on_stream(wait_value_, flag, CU_STREAM_WAIT_VALUE_GEQ | flush);
    }
    void put_on_stream(FlagOperation* operation, uint32_t* flag, unsigned options) const {
        if (operation(comm_stream_, reinterpret_cast<CUdeviceptr>(flag), exchange_number_, options) !=
            CUDA_SUCCESS)
            throw Error("The GPUs cannot signal each other; set COAT_NCCL=libnccl.so.2 to use NCCL instead.");
    }
};

// GPUs send through NCCL. It is loaded at run time, so that a program that does not use it does not need it.
class Nccl : public Transport {
public:
    Nccl(const RunSettings& s, const std::string& library)
        : settings_(s), library_(library), send_(function<SendOrReceive<const void*>>("ncclSend")),
          receive_(function<SendOrReceive<void*>>("ncclRecv")) {
        // NCCL's multicast adds in an order of its own, and some machines forbid it. Nothing here needs it.
        setenv("NCCL_NVLS_ENABLE", "0", 0);
        UniqueId id{};
        if (s.rank == 0) succeed(function<int(UniqueId*)>("ncclGetUniqueId")(&id), "ncclGetUniqueId");
        id = s.communicator->all_gather(id)[0];
        const auto init = function<int(void**, int, UniqueId, int)>("ncclCommInitRank");
        succeed(init(&communicator_, int(s.ranks), id, int(s.rank)), "ncclCommInitRank");
    }
    // Abort does not wait for ranks that have failed; at an orderly end there is nothing left to wait for.
    ~Nccl() override { function<int(void*)>("ncclCommAbort")(communicator_); }

    void attach(uint8_t*, uint32_t*, cudaStream_t stream) override { comm_stream_ = stream; }
    void send(const std::vector<Transfer>& transfers) override { send_on(comm_stream_, transfers); }

    // Sends a byte to every other rank. NCCL allocates its buffers for a rank when the first bytes travel to
    // it: so afterwards it has all its memory.
    void allocate_buffers() {
        const Stream stream(false);
        UniqueHandle<void*, cudaFree> bytes;
        check(cudaMalloc(&bytes.handle, size_t(settings_.ranks)), "Allocating memory failed");
        uint8_t* const mine = static_cast<uint8_t*>(bytes.handle);
        std::vector<Transfer> transfers;
        for (int64_t other = 0; other < settings_.ranks; other++)
            if (other != settings_.rank)
                transfers.push_back({.with = other,
                                     .send = mine + settings_.rank,
                                     .there = nullptr,
                                     .send_bytes = 1,
                                     .receive = mine + other,
                                     .receive_bytes = 1});
        send_on(stream, transfers);
        settings_.communicator->wait_until([&] { return cudaStreamQuery(stream) != cudaErrorNotReady; });
        check(cudaStreamSynchronize(stream), "NCCL cannot send");
    }

private:
    // The part of NCCL's interface that is used here, as its documentation gives it. It has been the same
    // since version 2.7.
    struct UniqueId {
        char bytes[128];
    };
    template <class Data>
    using SendOrReceive = int(Data, size_t, int type, int peer, void* communicator, cudaStream_t);
    static constexpr int SUCCESS = 0, IN_PROGRESS = 7, BYTE = 1;  // ncclSuccess, ncclInProgress, ncclUint8
    const RunSettings settings_;
    const std::string library_;
    void* communicator_ = nullptr;
    cudaStream_t comm_stream_ = nullptr;
    SendOrReceive<const void*>* const send_;
    SendOrReceive<void*>* const receive_;
    int (*const start_)() = function<int()>("ncclGroupStart");
    int (*const end_)() = function<int()>("ncclGroupEnd");

    template <class F> F* function(const char* name) const {
        return library_function<F>(library_, name,
                                   "GPUs that do not reach each other's memory need NCCL: install libnccl2, "
                                   "or name the file in COAT_NCCL");
    }
    // The sends and receives are a group of NCCL's: it starts them together, so that their order cannot make
    // ranks wait in a circle.
    void send_on(cudaStream_t stream, const std::vector<Transfer>& transfers) const {
        succeed(start_(), "ncclGroupStart");
        for (const Transfer& t : transfers) {
            const int with = int(t.with);
            if (t.send_bytes)
                succeed(send_(t.send, t.send_bytes, BYTE, with, communicator_, stream), "ncclSend");
            if (t.receive_bytes)
                succeed(receive_(t.receive, t.receive_bytes, BYTE, with, communicator_, stream), "ncclRecv");
        }
        succeed(end_(), "ncclGroupEnd");
    }
    void succeed(int result, const char* name) const {
        if (result == SUCCESS || result == IN_PROGRESS) return;
        throw Error(name, " failed (", function<const char*(int)>("ncclGetErrorString")(result),
                    "); NCCL_DEBUG=WARN in the environment makes it say more.");
    }
};

}  // namespace

// Whether the copy engines can be used. A small allocation is mapped to find out.
static bool reach_each_other(const RunSettings& s) {
    UniqueHandle<void*, cudaFree> memory;
    check(cudaMalloc(&memory.handle, GPU_ALIGNMENT), "Allocating memory failed");
    MappedMemory mapped(s, static_cast<uint8_t*>(memory.handle));
    return mapped.map();
}

static int64_t free_memory() {
    size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "Asking for the GPU's memory failed");
    return int64_t(free);
}

std::shared_ptr<Transport> connect_gpus(const RunSettings& s) {
    if (s.ranks == 1) return nullptr;
    const char* const set = std::getenv("COAT_NCCL");
    const std::string library = set ? set : "";
    bool chosen = false;  // whether any rank has it: a launcher may have set the variable on one host only
    for (const std::string& theirs : s.communicator->all_gather(library)) chosen = chosen || !theirs.empty();
    if (!chosen && reach_each_other(s)) return std::make_shared<CopyEngines>(s);
    const int64_t before = free_memory();
    auto nccl = std::make_shared<Nccl>(s, library.empty() ? "libnccl.so.2" : library);
    nccl->allocate_buffers();
    if (s.rank == 0)
        std::printf("The GPUs send through NCCL: %s. It takes %s GB of each, which --plan does not count.\n",
                    chosen ? "COAT_NCCL is set" : "they do not reach each other's memory",
                    gigabytes(before - free_memory()).c_str());
    return nccl;
}

}  // namespace coat::gpu
